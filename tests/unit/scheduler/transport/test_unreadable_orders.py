"""An order that no node could read ends its search with the reason."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support.searches.plans import PLAN
from tunemq_scheduler.core.commands import (
    ContinueTrial,
    PauseTrial,
    ReattachTrial,
    ReleaseTrial,
    StartTrial,
    StopTrial,
)
from tunemq_scheduler.transport.celery_executor import CeleryTrialExecutor
from tunemq_scheduler.transport.desired_state_executor import DesiredStateExecutor
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.message_limits import START_BYTES
from tunemq_shared.protocol.messages import TrialOrder
from tunemq_shared.protocol.result_conditions import next_result

ORDER = StartTrial("t1", 1, "n", 0, b"", {"cpu": 1.0}, (), 0, ())


class Sent(CeleryTrialExecutor):
    """Records the orders that would go to a node."""

    def __init__(self, plan: Any) -> None:
        DesiredStateExecutor.__init__(self)
        self._plan = plan
        self.sent: list[Any] = []

    def _put(self, instance_id: str, order: TrialOrder) -> None:
        self.sent.append(order)

    def _release(self, instance_id: str, trial: str, attempt: int) -> None:
        self.sent.append((instance_id, trial, attempt))


@pytest.mark.parametrize(
    ("field", "told"), [("checkpoint_at_end", "checkpoint_at_end"), ("reuse", "reuse")]
)
@pytest.mark.parametrize("value", [None, "yes"])
def test_order_that_no_node_can_read_fails_its_search_and_is_not_sent(field, told, value):
    executor = Sent(msgspec.structs.replace(PLAN, **{field: value}))
    for send in (
        lambda: executor.start_trial(ORDER),
        lambda: executor.reattach_trial(
            ReattachTrial(ORDER, is_wanted=True, pause=False, stop=False)
        ),
    ):
        with pytest.raises(ConfigError, match=rf"No node can start trial t1: .*{told}"):
            send()
    assert executor.sent == []


def test_start_that_is_too_long_fails_its_search_and_is_not_sent():
    executor = Sent(PLAN)
    order = msgspec.structs.replace(ORDER, config=bytes(START_BYTES))
    with pytest.raises(ConfigError, match=r"Trial t1 .* 4,194,\d+ bytes.* tune.with_parameters"):
        executor.start_trial(order)
    assert executor.sent == []


def test_readable_order_is_sent_unchanged():
    executor = Sent(PLAN)
    executor.start_trial(ORDER)
    assert executor.sent == [TrialOrder("t1", 1, (), start=PLAN.trial_spec(ORDER))]


def test_later_orders_about_a_running_trial_repeat_all_but_the_start():
    executor = Sent(PLAN)
    executor.start_trial(ORDER)
    executor.continue_training(ContinueTrial("t1", 1, "n", next_result(3)))
    executor.pause_trial(PauseTrial("t1", 1, "n"))
    executor.stop_trial(StopTrial("t1", 1, "n"))
    last = TrialOrder("t1", 1, next_result(3), stop=True, pause=True)
    assert executor.sent[-1] == last
    executor.sent.clear()
    executor.stop_trial(StopTrial("t1", 2, "n"))
    executor.stop_trial(StopTrial("t1", 1, "another"))
    assert executor.sent == [], "no order about a trial that does not run there"
    executor.release_trial(ReleaseTrial("t1", 1, "n"))
    executor.stop_trial(StopTrial("t1", 1, "n"))
    assert executor.sent == [("n", "t1", 1)]


def test_unwanted_trial_found_on_a_node_is_killed():
    executor = Sent(PLAN)
    executor.reattach_trial(ReattachTrial(ORDER, is_wanted=False, pause=False, stop=False))
    assert executor.sent == [TrialOrder("t1", 1, (), start=PLAN.trial_spec(ORDER), kill=True)]
