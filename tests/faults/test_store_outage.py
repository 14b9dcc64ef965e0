"""The object store becomes unreachable during a search, and comes back."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.support.stores.object_servers import ObjectServer
from tests.support.stores.own_store import Start, own_bucket, server, start
from tests.support.waiting import eventually
from tunemq_shared.protocol import messages as m

__all__ = ["own_bucket", "server", "start"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]


def outage(start: Start, server: ObjectServer, seconds: float, end: Callable[[], None]) -> None:
    search = start(trials=2, steps=60, save_every=3, step_s=0.05, kept=None, gate=12)
    for number in range(2):
        search.wait_for(m.CheckpointCommitted, trial=search.trial(number))
    end()
    gone_at = time.monotonic()
    search.open_gate(60)
    # Both trials write as far as they may, and then wait in their reports.
    for number in range(2):
        search.wait_for(m.TrialWaits, trial=search.trial(number), what="save")
    eventually(lambda: b"waits for the store" in search.said, message=lambda: str(search))
    eventually(lambda: time.monotonic() > gone_at + seconds, within=seconds + 60)
    assert search.process.poll() is None, str(search)
    server.thaw() if server.process is not None else server.start()
    assert search.ends() == 0, str(search)

    search.is_undisturbed()
    for number in range(2):
        committed = [
            event
            for event in search.all_of(m.CheckpointCommitted)
            if event.trial == search.trial(number)
        ]
        assert [event.step for event in committed] == list(range(3, 61, 3)), (
            "in order, none left out"
        )
        assert {event.attempt for event in committed} == {1}, "no trial had to begin again"
    assert search.all_of(m.TrialFailed) == search.all_of(m.TrialProcessDied) == []
    search.journal_gives_the_state()
    search.is_whole()
    search.leaves_nothing()


@pytest.mark.parity(97, 106, 114)
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_f21_trials_wait_for_the_store_and_commit_everything_afterwards(start, server, how):
    outage(start, server, 4.0, server.kill if how == "killed" else server.freeze)


@pytest.mark.soak
def test_f21_store_outage_of_a_minute_loses_no_checkpoint(start, server):
    outage(start, server, 60.0, server.stop)


def test_f21_store_that_stays_away_ends_trials_with_an_error(start, server):
    search = start(trials=1, steps=600, step_s=0.02, max_storage_failures=0, sync_timeout=3.0)
    search.wait_for(m.CheckpointCommitted, trial=search.trial(0))
    server.kill()
    failed = search.wait_for(m.TrialFailed).event
    assert failed.kind == "storage", failed
    assert search.ends() == 0, str(search)
    assert search.results()[0]["status"] == "ERROR"
    assert server.url in failed.error
    search.leaves_nothing()
