"""A search on a store while other programs, or its owner, misuse the store."""

from __future__ import annotations

import signal

import pytest

from tests.support.searches.killed_searches import NODE
from tests.support.stores.own_store import own_bucket, server, start
from tests.support.waiting import eventually
from tunemq_shared.protocol import messages as m

__all__ = ["own_bucket", "server", "start"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]


def test_a_bucket_that_is_taken_away_and_comes_back_costs_no_trial_and_no_checkpoint(
    start, server, own_bucket
):
    search = start(trials=2, steps=24, step_s=0.05, kept=None, gate=7)
    search.wait_for(m.CheckpointCommitted, trial=search.trial(0), n=2)
    there, away = server.data / own_bucket, server.data.parent / "away"
    # A put that runs during the deletion would create the bucket again.
    server.stop()
    there.rename(away)
    server.start()
    search.open_gate(24)
    told = f"there is no bucket '{own_bucket}'".encode()
    eventually(lambda: told in search.said, message=lambda: str(search))
    assert search.process.poll() is None, str(search)
    away.rename(there)
    assert search.ends() == 0, str(search)
    search.is_undisturbed()
    assert search.all_of(m.CheckpointLost) == []
    search.is_whole()


@pytest.mark.soak
def test_a_node_that_was_stopped_for_longer_than_its_lease_harms_nothing(start):
    search = start(trials=2, steps=30, step_s=0.25, kept=1)
    search.wait_for(m.CheckpointCommitted, trial=search.trial(0), n=1)
    (node,) = search.processes(NODE)
    node.send_signal(signal.SIGSTOP)
    search.wait_for(m.NodeLost)
    node.send_signal(signal.SIGCONT)
    assert search.ends() == 0, str(search)
    search.is_undisturbed()
    search.is_whole()


def test_two_searches_that_got_the_same_place_at_once_take_nothing_from_each_other(
    start, server, own_bucket
):
    # As on two machines: each has a results folder, and neither sees the other's search yet.
    first = start(trials=2, steps=18, step_s=0.1, gate=6)
    second = start(trials=2, steps=36, step_s=0.1, same_place=first, gate=6)
    first.wait_for(m.CheckpointCommitted, trial=first.trial(0), n=1)
    second.wait_for(m.CheckpointCommitted, trial=second.trial(0), n=1)
    assert first.store_address() == second.store_address()
    assert first.kill_the_node()  # so that it looks for leftovers in the end
    for search in (first, second):
        search.open_gate(36)
    for search in (first, second):
        assert search.ends() == 0, str(search)
        search.is_undisturbed()
        search.is_restorable()
