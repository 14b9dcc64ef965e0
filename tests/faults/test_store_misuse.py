"""A search on a store while other programs, or its owner, misuse the store."""

from __future__ import annotations

import signal
import time

import pytest

from tests.support.searches.chain_searches import ChainSearch
from tests.support.searches.killed_searches import NODE
from tests.support.stores.own_store import Start, own_bucket, server, start
from tests.support.waiting import eventually
from tunemq_scheduler.journal.fetch_copy import fetch_journal
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.journal.journal_reader import recover
from tunemq_shared.protocol import messages as m
from tunemq_shared.signing.key_files import journal_signer

__all__ = ["own_bucket", "server", "start"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]


def test_bucket_that_is_removed_and_restored_loses_no_trial_and_no_checkpoint(
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
def test_node_stopped_for_longer_than_its_lease_harms_no_checkpoint(start):
    search = start(trials=2, steps=30, step_s=0.25, kept=1)
    search.wait_for(m.CheckpointCommitted, trial=search.trial(0), n=1)
    (node,) = search.processes(NODE)
    node.send_signal(signal.SIGSTOP)
    search.wait_for(m.NodeLost)
    node.send_signal(signal.SIGCONT)
    assert search.ends() == 0, str(search)
    search.is_undisturbed()
    search.is_whole()


def two_at_one_address(start: Start) -> list[ChainSearch]:
    """Two searches, as on two machines: each has a results folder, and none saw the other's."""
    for _ in range(20):
        first = start(trials=2, steps=18, gate=6)
        second = start(trials=2, steps=18, same_place=first, gate=6)
        # One that saw the other's search took another name, ``search_2``.
        if name_of(first) == name_of(second):
            return [first, second]
    raise AssertionError(f"one always saw the other: {second}")


def name_of(search: ChainSearch) -> str:
    """The name of a search once it has its journal."""
    journals = f"*/{FILE_NAME}"
    eventually(lambda: any(search.folder.glob(journals)), message=lambda: str(search))
    (journal,) = search.folder.glob(journals)
    return journal.parent.name


def test_second_of_two_searches_at_the_same_store_address_is_refused(start, server, own_bucket):
    both = two_at_one_address(start)
    gates, opened_at = iter(range(7, 17)), time.monotonic()

    def one_has_ended() -> bool:
        # A search looks whether the place is its own when it writes there, once a second at most.
        nonlocal opened_at
        if time.monotonic() > opened_at + 1.5 and (gate := next(gates, None)):
            opened_at = time.monotonic()
            for one in both:
                one.open_gate(gate)
        return any(one.process.poll() is not None for one in both)

    eventually(one_has_ended, message=lambda: "\n".join(map(str, both)))
    (ended,) = (one for one in both if one.process.poll() is not None)
    (stays,) = (one for one in both if one is not ended)
    assert ended.store_address() == stays.store_address()
    assert b"Another search" in ended.said, str(ended)
    assert f"process {stays.process.pid} on".encode() in ended.said, str(ended)
    assert stays.kill_the_node()  # so that it looks for leftovers in the end
    stays.open_gate(18)
    assert stays.ends() == 0, str(stays)
    stays.is_undisturbed()
    stays.is_whole()
    # The journal in the store is that of one search, which can be restored from there.
    objects = server.objects(own_bucket, stays.store_address().partition("?")[0].split("/", 3)[3])
    with objects:
        copied = fetch_journal(objects, stays.folder / "fetched", journal_signer())
    assert copied.turn == recover(stays.folder / "search" / FILE_NAME).turn
