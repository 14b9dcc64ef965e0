"""The record of an experiment's last run, and what the next run concludes from it."""

from __future__ import annotations

import msgspec
import pytest

from tunemq_scheduler.base.lease_holder import LeaseHolder
from tunemq_scheduler.storage.last_run import (
    RunRecord,
    check_newest,
    read_record,
    write_record,
)
from tunemq_shared.base.errors import JournalError, SchedulerSuperseded

ME = LeaseHolder.this_process()


def record(term: int = 7, run: int = 2, holder: LeaseHolder = ME, **more: bool) -> RunRecord:
    more = {"is_warm": False, **more}
    return RunRecord(holder=holder, term=term, run=run, events_key="e", **more)


def test_run_record_is_read_as_it_was_written(tmp_path):
    (tmp_path / "journal").mkdir()
    assert read_record(str(tmp_path)) is None
    for written in (record(), record(term=8, is_over=True)):
        write_record(str(tmp_path), written)
        assert read_record(str(tmp_path)) == written
    assert [path.name for path in (tmp_path / "journal").iterdir()] == ["scheduler"]


def test_damaged_run_record_is_an_error_that_names_the_file(tmp_path):
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "scheduler").write_bytes(b"{")
    with pytest.raises(JournalError, match=str(tmp_path / "journal" / "scheduler")):
        read_record(str(tmp_path))


@pytest.mark.parametrize(
    ("last", "journalled_run", "is_next_warm"),
    [
        (record(run=2), 2, True),  # it was killed
        (record(run=2, is_over=True), 2, False),  # it deregistered
        (record(run=3, is_warm=True), 2, True),  # killed before its first turn, as the next
        (record(run=3, is_warm=False), 2, False),
    ],
)
def test_run_is_warm_if_the_previous_one_did_not_deregister(last, journalled_run, is_next_warm):
    assert last.is_next_warm(journalled_run) is is_next_warm


def test_folder_that_is_behind_the_store_is_rejected():
    check_newest(record(7), None, "here")
    check_newest(record(7), record(7), "here")
    other = msgspec.structs.replace(ME, token="other")
    check_newest(record(8, holder=other), record(7), "here")
    for local in (record(6, holder=other), None):
        with pytest.raises(SchedulerSuperseded, match=r"here is not the newest.*--take-over"):
            check_newest(local, record(7), "here")


def test_folder_of_a_search_continued_elsewhere_is_rejected():
    of_script = msgspec.structs.replace(record(term=0), events_key="")
    check_newest(of_script, of_script, "here")
    # The folder's record also says that the store has all of it.
    check_newest(msgspec.structs.replace(of_script, is_copied=True), of_script, "here")
    other = msgspec.structs.replace(ME, token="other")
    with pytest.raises(SchedulerSuperseded, match="continued elsewhere"):
        check_newest(record(7, holder=other), of_script, "here")


def test_process_is_told_from_others_with_the_same_pid():
    assert ME.is_here
    assert not ME.is_gone
    assert msgspec.structs.replace(ME, born=ME.born + 1).is_gone
    stranger = msgspec.structs.replace(ME, place="another kernel", born=0)
    assert not stranger.is_here
    assert not stranger.is_gone  # this machine cannot know
    assert not stranger.kill()
