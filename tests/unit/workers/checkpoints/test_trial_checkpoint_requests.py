"""How a node handles checkpoints that trial processes write and request; runs no process."""

from __future__ import annotations

import os
from urllib.parse import quote

import pytest

from tests.unit.workers.fake_checkpoint_node import (
    KEY,
    STORE,
    World,
    committed_ref,
    elsewhere,
    written_ref,
)
from tunemq_shared.base.errors import TransportError
from tunemq_shared.protocol.messages import (
    CheckpointCommitted,
    CheckpointRef,
    CheckpointWritten,
    NodeWarned,
    encode,
)
from tunemq_workers.checkpoints.checkpoint_messages import FetchAnswer, SaveAnswer
from tunemq_workers.runtime import frames


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def root_of(world):
    return str(world.folder / "node" / quote(KEY, safe=""))


# --- uploads ------------------------------------------------------------------------------------


def test_written_checkpoint_is_reported_uploaded_and_committed(world):
    process = world.process()
    key = process.save()
    assert key == "t/checkpoint_1-000001"
    (written,) = world.events()
    assert (written.key, written.size) == (key, 10)
    (upload,) = world.transfers.uploads
    assert (upload.store, upload.key, upload.base, upload.timeout_s) == (STORE, key, "", 60.0)
    assert upload.folder == os.path.join(root_of(world), key)
    world.finish(key)
    (committed,) = world.events(CheckpointCommitted)
    assert (committed.key, committed.n, committed.step, committed.size) == (key, 1, 1, 10)


def test_uploads_of_one_trial_run_one_by_one_and_beside_those_of_others(world):
    a, b = world.process("a"), world.process("b")
    first, second = a.save(), a.save()
    other = b.save()
    assert world.transfers.keys() == [first, other]
    world.finish(first)
    assert world.transfers.keys() == [other, second]


def test_third_checkpoint_waits_and_the_scheduler_learns_why(world):
    process = world.process()
    first, _ = process.save(), process.save()
    assert not process.ask()
    assert world.waits == [("save", "2 of its checkpoints are not in s3://bucket/exp yet")]
    world.transfers.trouble(first, "connection refused")
    assert world.waits[-1] == (
        "save",
        "2 of its checkpoints are not in the store yet: connection refused",
    )
    world.finish(first)
    assert process.answers[-1] == SaveAnswer(root_of(world))
    assert world.waits[-1] == ("", "")


def test_number_of_waiting_checkpoints_is_a_setting(world):
    process = world.process(waiting=0)
    process.save()
    assert not process.ask()


def test_request_is_rejected_after_the_timeout_with_the_last_problem(world):
    process = world.process()
    first, _ = process.save(), process.save()
    process.ask()
    world.transfers.trouble(first, "connection refused")
    world.clock.advance(60)
    (error,) = [answer.error for answer in process.answers if answer.error]
    assert "for 60 s (sync_timeout)" in error
    assert "connection refused" in error
    world.finish(first)
    assert len(process.answers) == 3  # the node does not answer it again


@pytest.mark.parametrize("how", [{"stop": True}, {"pause": True}])
def test_process_that_is_ending_waits_no_longer(world, how):
    process = world.process()
    process.save()
    process.save()
    assert not process.ask()
    process.told(**how)
    assert process.answers[-1] == SaveAnswer(root_of(world))
    process.write()
    assert process.ask()  # checkpoints that are due are still saved


def test_checkpoints_of_a_trial_are_counted_over_its_attempts(world):
    old = world.process()
    old.save()
    old.save()
    old.die()
    assert not world.process(attempt=2).ask()


def test_space_granted_to_a_dead_process_is_free_again(world):
    old, new = world.process(waiting=0), world.process(attempt=2, waiting=0)
    assert old.ask()
    assert not new.ask()
    old.die()
    assert new.answers[-1] == SaveAnswer(root_of(world))


def test_waiting_bytes_are_bounded_over_all_trials_in_order_of_requests(tmp_path):
    world = World(tmp_path, uploads_bytes=100)
    large, small, other = world.process("a"), world.process("b"), world.process("c")
    first = large.save(b"x" * 60)
    assert not large.ask()
    assert "no more than 100 bytes" in world.waits[-1][1]
    assert not small.ask()  # it would fit, but it came later
    assert world.waits[-1] == ("save", "others wait for room on this node")
    other.told(stop=True)
    assert other.ask()
    world.finish(first)
    assert large.answers[-1].cache
    assert small.answers[-1].cache


def test_one_checkpoint_may_be_larger_than_the_limit(tmp_path):
    world = World(tmp_path, uploads_bytes=1)
    process = world.process()
    key = process.save(b"x" * 1000)
    assert not process.ask()
    world.finish(key)
    assert process.answers[-1].cache


def test_upload_that_is_given_up_fails_its_trial_and_all_later_uploads_of_it(world):
    old = world.process()
    first, second = old.save(), old.save()
    old.die()
    new = world.process(attempt=2)
    assert not new.ask()
    world.fail(first, "no answer for 60 s")
    assert world.lost == [first, second]
    (trial, reason), *more = world.given_up
    assert (trial.trial, more) == ("t", [])
    assert first in reason
    assert "no answer for 60 s" in reason
    assert world.on_disk() == []


def test_uploads_that_are_given_up_free_their_space_for_other_trials(tmp_path):
    world = World(tmp_path, uploads_bytes=100)
    lost, other = world.process("a"), world.process("b")
    first = lost.save(b"x" * 40)
    lost.save(b"x" * 40)
    world.fail(first)
    other.save(b"x" * 50)
    assert other.ask()


def test_dead_transfer_process_is_reported_once_to_searches_with_partial_uploads(world):
    world.process("a").save()
    other = world.process("b", key="tunemq:events:other")
    world.finish(other.save())
    for _ in range(2):
        world.transfers.on_death("the transfers process 7 ended with SIGKILL")
    ((key, warned),) = [said for said in world.said if isinstance(said[1], NodeWarned)]
    assert key == KEY
    assert "SIGKILL" in warned.text
    assert warned.has_leftovers


def test_checkpoint_written_after_a_lost_one_is_lost_too(world):
    process = world.process()
    first = process.save()
    assert process.ask()
    world.fail(first)
    second = process.write()
    assert world.written == world.lost == [first, second]
    process.die()
    assert world.transfers.uploads[1:] == []
    assert world.on_disk() == []


def test_upload_may_refer_to_checkpoints_committed_by_or_restored_for_its_attempt(world):
    source = world.process("source")
    origin = source.save()
    world.finish(origin)
    ref = committed_ref(world, origin)
    clone = world.process("clone", restore=(ref,))
    assert clone.fetch(ref) == FetchAnswer(root_of(world))
    first = clone.save()
    world.finish(first)
    second = clone.save()
    bases = [upload.base for upload in world.transfers.uploads]
    files = [os.path.join(root_of(world), key, "committed.json") for key in (origin, first)]
    assert bases == ["", *files]
    world.finish(second)


def test_attempt_does_not_refer_to_checkpoints_of_an_older_attempt(world):
    """For this attempt the scheduler keeps only the checkpoint from which it was restored."""
    old = world.process()
    first, second = old.save(), old.save()
    world.finish(first)
    world.finish(second)
    old.die()
    ref = committed_ref(world, first)
    new = world.process(attempt=2, restore=(ref,))
    new.fetch(ref)
    new.save()
    assert first in world.transfers.uploads[-1].base


def test_checkpoint_fetched_for_reading_is_no_base_of_an_upload(world):
    process = world.process()
    first = process.save()
    process.fetch(written_ref(world, first))
    second = process.save()
    world.finish(first)
    assert first in world.transfers.uploads[-1].base  # this attempt committed it
    world.finish(second)


def test_uploads_of_a_trial_continue_after_its_process_has_ended(world):
    process = world.process()
    first, second = process.save(), process.save()
    process.die()
    assert world.checkpoints.unsettled() == {KEY}
    world.finish(first)
    world.finish(second)
    assert world.committed == [first, second]
    assert world.checkpoints.unsettled() == set()


@pytest.mark.parametrize(
    ("key", "trial"),
    [("t/../x", "t"), ("/etc/x", "t"), ("t/.staging", "t"), ("u/checkpoint_1-000001", "u")],
)
def test_process_cannot_claim_to_have_written_elsewhere(world, key, trial):
    process = world.process()
    process.ask()
    said = CheckpointWritten(trial, 1, 1, 1, key, "a" * 64, 1)
    with pytest.raises(TransportError):
        world.checkpoints.said(process.process, frames.WRITTEN, encode(said))
    assert world.events() == []


@pytest.mark.parametrize("kind", [frames.WRITTEN, frames.FETCH])
@pytest.mark.parametrize(
    "payload", [b"", b"\x91" * 100_000, b"\x98\xa1\xff" + b"\x00" * 9, b"\xff"]
)
def test_unreadable_message_of_a_process_ends_only_that_process(world, kind, payload):
    process = world.process()
    process.ask()
    with pytest.raises(TransportError, match=r"cannot be read|is impossible"):
        world.checkpoints.said(process.process, kind, payload)


@pytest.mark.parametrize("sha256", ["", "\0", "a" * 63, "a" * 64 + "\n"])
def test_written_checkpoint_without_a_hash_is_rejected(world, sha256):
    process = world.process()
    process.ask()
    said = CheckpointWritten("t", 1, 1, 1, "t/checkpoint_1-000001", sha256, 1)
    with pytest.raises(TransportError, match="'sha256'"):
        world.checkpoints.said(process.process, frames.WRITTEN, encode(said))


def test_process_cannot_write_without_permission(world):
    process = world.process()
    said = CheckpointWritten("t", 1, 1, 1, "t/checkpoint_1-000001", "a" * 64, 1)
    with pytest.raises(TransportError):
        world.checkpoints.said(process.process, frames.WRITTEN, encode(said))


def test_node_that_ends_cancels_transfers_in_progress(world):
    process = world.process()
    process.save()
    process.save()
    process.ask()
    world.checkpoints.close()
    assert world.transfers.is_closed
    world.clock.advance(3600)
    process.ask()
    assert len(process.answers) == 2


# --- restoring ----------------------------------------------------------------------------------


def test_checkpoint_written_on_this_node_is_not_downloaded(world):
    old = world.process()
    key = old.save()
    old.die()
    ref = written_ref(world, key)
    assert world.process(attempt=2, restore=(ref,)).fetch(ref) == FetchAnswer(root_of(world))
    world.finish(key)
    ref = committed_ref(world, key)
    assert world.process("u", restore=(ref,)).fetch(ref) == FetchAnswer(root_of(world))
    assert world.transfers.downloads == []


def test_ten_processes_wait_for_one_download(world):
    ref = elsewhere(world)
    processes = [world.process(f"t{n}", restore=(ref,)) for n in range(10)]
    assert [process.fetch(ref) for process in processes] == [None] * 10
    (download,) = world.transfers.downloads
    assert download.folder == os.path.join(root_of(world), ref.key)
    world.finish(ref.key)
    assert [process.answers for process in processes] == [[FetchAnswer(root_of(world))]] * 10
    assert world.waits == []
    late = world.process("t11", restore=(ref,))
    assert late.fetch(ref) == FetchAnswer(root_of(world))
    assert len(world.transfers.downloads) == 1


def test_store_problem_is_reported_until_the_store_works_again(world):
    ref = elsewhere(world)
    process = world.process(restore=(ref,))
    process.fetch(ref)
    world.transfers.trouble(ref.key, "connection refused")
    world.transfers.trouble(ref.key, "")
    world.finish(ref.key)
    assert world.waits == [("restore", "connection refused"), ("", "")]


@pytest.mark.parametrize("is_corrupt", [True, False])
def test_failed_download_is_answered_with_the_reason(world, is_corrupt):
    ref = elsewhere(world)
    process = world.process(restore=(ref,))
    process.fetch(ref)
    world.transfers.trouble(ref.key, "away")
    world.fail(ref.key, "why", is_corrupt=is_corrupt)
    reason = "why" if is_corrupt else f"checkpoint {ref.key} could not be downloaded: why"
    assert process.answers == [FetchAnswer("", reason, is_corrupt)]
    assert world.waits[-1] == ("", "")


def test_damaged_copy_is_replaced_once_for_all_processes_that_found_it(world):
    ref = elsewhere(world)
    a, b = world.process("a", restore=(ref,)), world.process("b", restore=(ref,))
    for process in (a, b):
        process.fetch(ref)
    world.finish(ref.key)
    assert a.fetch(ref, again=True) is None
    assert world.on_disk() == []
    world.finish(ref.key)
    assert a.answers[-1] == FetchAnswer(root_of(world))
    assert b.fetch(ref, again=True) == FetchAnswer(root_of(world))
    assert len(world.transfers.downloads) == 2
    assert b.fetch(ref, again=True) is None  # damaged as well
    assert len(world.transfers.downloads) == 3


def test_damaged_copy_of_an_uncommitted_checkpoint_is_corrupt(world):
    old = world.process()
    ref = written_ref(world, old.save())
    old.die()
    process = world.process(attempt=2, restore=(ref,))
    process.fetch(ref)
    answer = process.fetch(ref, again=True)
    assert answer.is_corrupt
    assert "not in the store yet" in answer.error
    assert world.transfers.downloads == []


def test_missing_checkpoint_that_was_never_committed_is_corrupt(world):
    ref = CheckpointRef("t/checkpoint_1-000001", "", 1, "a hash")
    answer = world.process(restore=(ref,)).fetch(ref)
    assert answer.is_corrupt
    assert ref.key in answer.error


def test_checkpoint_committed_and_evicted_after_the_retry_was_ordered_is_downloaded(tmp_path):
    world = World(tmp_path, cache_bytes=0)
    old = world.process()
    key = old.save()
    ref = written_ref(world, key)  # the scheduler knows only this when it orders the retry
    old.die()
    world.finish(key)
    assert world.on_disk() == []
    process = world.process(attempt=2, restore=(ref,))
    assert process.fetch(ref) is None
    world.finish(key)
    (answer,) = process.answers
    assert answer == FetchAnswer(root_of(world), sha256=committed_ref(world, key).sha256)


def test_damaged_copy_of_a_checkpoint_committed_after_the_retry_was_ordered_is_replaced(world):
    old = world.process()
    key = old.save()
    ref = written_ref(world, key)
    old.die()
    process = world.process(attempt=2, restore=(ref,))
    process.fetch(ref)
    world.finish(key)
    assert process.fetch(ref, again=True) is None
    world.finish(key)
    assert process.answers[-1].sha256 == committed_ref(world, key).sha256


def test_download_without_waiting_processes_is_cancelled(world):
    ref = elsewhere(world)
    process = world.process(restore=(ref,))
    process.fetch(ref)
    process.die()
    assert world.transfers.keys() == []
    other = world.process("u", restore=(ref,))
    assert other.fetch(ref) is None
    world.finish(ref.key)
    assert other.answers == [FetchAnswer(root_of(world))]


def test_fetch_cannot_name_a_path_outside_the_cache(world):
    with pytest.raises(TransportError):
        world.process().fetch(CheckpointRef("../x", "a hash", 1))


def test_unusable_folder_is_reported(world):
    (world.folder / "node").write_text("a file where folders were to be made")
    ref = elsewhere(world)
    process = world.process(restore=(ref,))
    process.ask()
    assert "folder for checkpoints" in process.answers[-1].error
    answer = process.fetch(ref)
    assert "folder for checkpoints" in answer.error
    assert not answer.is_corrupt
