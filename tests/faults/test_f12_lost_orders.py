"""F12: orders that are duplicated, reordered or lost; consumers that die with an order."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.farms.own_farm import ChainRun, farm
from tunemq_shared.base.failpoints import VARIABLE
from tunemq_shared.protocol import messages as m

__all__ = ["farm"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]

#: A lost command is repeated this soon; the second limit is for a busy machine.
MADE_GOOD_WITHIN_S, AT_LAST_S = 2.0, 20.0


def each_was_started_once(run: ChainRun) -> None:
    started = Counter(event.trial for event in run.events() if isinstance(event, m.TrialStarted))
    assert len(started) == run.trials
    assert set(started.values()) == {1}, started


def made_good_in_time(waits: list[float], losses: int) -> None:
    """Check the longest waits, one per lost command, against limits for any machine."""
    longest = sorted(waits)[-losses:]
    assert longest[len(longest) // 2] < 2 * MADE_GOOD_WITHIN_S, longest
    assert longest[-1] < AT_LAST_S, longest


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_f12_doubled_and_swapped_orders_change_nothing(farm, tmp_path, seed):
    own = farm(proxies=True)
    tampering = own.to_scheduler.tamper(double=0.4, swap=0.4, seed=seed)
    run = ChainRun(own, tmp_path, trials=4, steps=30)
    run.ends()
    assert tampering.doubled > 10
    assert tampering.swapped > 0
    each_was_started_once(run)


def test_f12_lost_order_is_sent_again(farm, tmp_path):
    own = farm(proxies=True)
    tampering = own.to_scheduler.tamper(double=0.1, swap=0.1, lose=0.15, seed=3)
    run = ChainRun(own, tmp_path, steps=40)
    waits = run.watch(step_within=60)
    run.ends()
    assert tampering.lost > 5
    made_good_in_time(waits, tampering.lost)
    each_was_started_once(run)


@pytest.mark.soak
def test_f12_each_of_many_lost_orders_is_sent_again_in_time(farm, tmp_path):
    own = farm(proxies=True)
    tampering = own.to_scheduler.tamper(double=0.1, swap=0.1, lose=0.15, seed=4)
    run = ChainRun(own, tmp_path, steps=150)
    waits = run.watch()
    run.ends(within=250)
    print(f"{tampering.lost} lost; the longest waits {sorted(waits)[-tampering.lost :]}")
    assert tampering.lost > 20
    # The repetition of a lost command may be lost as well.
    assert max(waits) < MADE_GOOD_WITHIN_S * tampering.lost_in_a_row, sorted(waits)[-5:]
    each_was_started_once(run)


def consumers_die(farm, tmp_path, steps: int, every: int) -> tuple[int, list[float]]:
    """Run a search whose consumers die with every ``every``-th order."""
    own = farm(variables={VARIABLE: f"consumer.before_handover=kill@{every}"})
    run = ChainRun(own, tmp_path, steps=steps)
    waits = run.watch(step_within=60)
    run.ends(within=500)
    deaths = own.logs().count("consumer.died")
    print(f"{deaths} consumers died; the longest waits {sorted(waits)[-deaths:]}")
    made_good_in_time(waits, deaths)
    each_was_started_once(run)
    run.leaves_no_key()
    return deaths, waits


@pytest.mark.slow
def test_f12_consumers_that_die_between_receipt_and_handover_lose_no_order_for_good(farm, tmp_path):
    deaths, _ = consumers_die(farm, tmp_path, steps=30, every=6)
    assert deaths >= 8


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_f12_a_hundred_consumers_die_between_receipt_and_handover(farm, tmp_path):
    deaths, waits = consumers_die(farm, tmp_path, steps=220, every=4)
    assert deaths >= 100
    assert max(waits) < MADE_GOOD_WITHIN_S, sorted(waits)[-5:]
