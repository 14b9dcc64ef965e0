"""A search that ends while its store does not answer."""

from __future__ import annotations

import signal

import pytest

from tests.support.searches.chain_searches import ChainSearch
from tests.support.stores.object_servers import ObjectServer
from tests.support.stores.own_store import Start, own_bucket, server, start
from tests.support.waiting import eventually
from tunemq_scheduler.journal.fetch_copy import fetch_journal
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.journal.journal_reader import recover
from tunemq_shared.checkpoints.open_store import open_objects
from tunemq_shared.protocol import messages as m
from tunemq_shared.signing.key_files import journal_signer

__all__ = ["own_bucket", "server", "start"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]


def left_with_an_upload(start: Start, server: ObjectServer) -> ChainSearch:
    """A search whose only trial has finished, and whose last checkpoint cannot be uploaded."""
    search = start(trials=1, steps=6, save_every=3, step_s=0.02, gate=4)
    search.wait_for(m.CheckpointCommitted, trial=search.trial(0), n=1)
    server.freeze()
    search.open_gate(6)
    search.wait_for(m.CheckpointWritten, trial=search.trial(0), n=2)
    told = b"waiting for 1 checkpoint on the way to s3://"
    eventually(lambda: told in search.said, message=lambda: str(search))
    return search


def test_f21_search_whose_last_checkpoint_cannot_be_uploaded_waits_with_a_notice(start, server):
    search = left_with_an_upload(start, server)
    assert search.process.poll() is None, str(search)
    server.thaw()
    assert search.ends() == 0, str(search)
    search.is_undisturbed()
    assert not (search.folder / "search" / ".cache").exists()


def test_f21_ctrl_c_while_uploads_are_waited_for_names_their_folder(start, server):
    search = left_with_an_upload(start, server)
    search.process.send_signal(signal.SIGINT)
    assert search.ends() != 0
    said = search.said.decode()
    cache = search.folder / "search" / ".cache"
    assert "1 checkpoint has not reached s3://" in said
    assert str(cache) in said
    assert len(list(cache.glob("*/checkpoint_1-000002/files/payload"))) == 1
    search.leaves_nothing()
    server.thaw()


def test_f18_results_of_a_trial_that_ended_before_a_kill_reach_the_store_with_the_next_run(
    start, server
):
    options = {"trials": 2, "steps": 6, "save_every": 4, "step_s": 0.5, "cpus": 1}
    search = start(gate=4, **options)
    search.wait_for(m.CheckpointCommitted, trial=search.trial(0), n=1)
    server.freeze()
    search.open_gate(6)
    search.wait_for(m.TrialFinished, trial=search.trial(0))
    search.process.kill()
    search.ends()
    search.leaves_nothing()
    server.thaw()
    storage = search.store_address().rpartition("/search")[0]
    again = ChainSearch(search.folder, storage=storage, **options)
    try:
        assert again.ends() == 0, str(again)
        again.is_undisturbed()
        with open_objects(search.store_address()) as objects:
            keys = [one.key for one in objects.list() if one.key.endswith("/result.json")]
            rows = [len(objects.get_bytes(key, limit=10**6).splitlines()) for key in keys]
        assert rows == [6, 6], str(again)
    finally:
        again.close()


def test_search_that_ends_while_its_store_is_away_waits_until_the_store_has_its_journal(
    start, server, tmp_path
):
    search = start(trials=1, steps=5, save_every=3, step_s=0.02, gate=4)
    search.wait_for(m.CheckpointCommitted, trial=search.trial(0), n=1)
    server.freeze()
    search.open_gate(5)
    told = b"Waiting for the journal to reach s3://"
    eventually(lambda: told in search.said, message=lambda: str(search))
    server.thaw()
    assert search.ends() == 0, str(search)
    with open_objects(search.store_address()) as objects:
        copied = fetch_journal(objects, tmp_path / "copied", journal_signer())
    assert copied.turn == recover(search.folder / "search" / FILE_NAME).turn
