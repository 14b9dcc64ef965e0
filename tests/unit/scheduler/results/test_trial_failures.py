"""Failures: their records, and groups by cause."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import pytest

from tunemq_scheduler.results.trial_failures import (
    FailureLog,
    TrialFailure,
    describe_death,
    failure_of,
    root_cause,
    write_failure,
)
from tunemq_shared.base.errors import StoreError
from tunemq_shared.protocol.messages import NodeLost, TrialFailed, TrialProcessDied


def raised(number: int = 3) -> str:
    try:
        try:
            raise KeyError(f"no column {number}")
        except KeyError as error:
            raise ValueError("bad data") from error
    except ValueError:
        return traceback.format_exc()


def failure(trial: str = "train_1", **changes: object) -> TrialFailure:
    told = {"kind": "user", "error": "ValueError: bad data", "traceback": raised(), **changes}
    return TrialFailure(trial=trial, hostname="node-a", **told)


@pytest.mark.parity(94)
def test_failure_is_appended_with_its_number_and_traceback(tmp_path):
    path = write_failure(str(tmp_path), failure(number=1))
    assert write_failure(str(tmp_path), failure(number=2)) == path == str(tmp_path / "error.txt")
    text = Path(path).read_text()
    first = r"Failure # 1 \(occurred at \d{4}-\d\d-\d\d_\d\d-\d\d-\d\d on node-a\)"
    assert re.fullmatch(first, text.splitlines()[0])
    assert "Failure # 2 (" in text
    assert text.count("ValueError: bad data") == 2


def test_failure_without_a_traceback_is_written_as_its_message(tmp_path):
    path = write_failure(str(tmp_path), failure(traceback="", error="killed \ud800"))
    assert Path(path).read_text().splitlines()[1] == "killed \\ud800"


def test_failure_is_written_without_control_characters(tmp_path):
    told = {
        "error": "\x1b]0;owned\x07\u202e",
        "traceback": "one\n\ttwo \x1b[31mred\r\nthree \x9b2J",
    }
    path = write_failure(str(tmp_path), failure(output="\x1b[2J", **told))
    assert Path(path).read_bytes().decode().splitlines()[1:] == [
        "one",
        r"	two \x1b[31mred\r".replace(r"\t", "\t"),
        r"three \x9b2J",
        r"\x1b[2J",
    ]
    path = write_failure(str(tmp_path), failure(**{**told, "traceback": ""}))
    assert Path(path).read_text().endswith(r"\x1b]0;owned\x07\u202e" + "\n")


def test_failure_is_written_with_its_class_budget_and_fix(tmp_path):
    told = {"verdict": "failure 1 of at most 2", "kind": "memory", "traceback": "", "error": "full"}
    write_failure(str(tmp_path), failure(is_final=False, **told))
    told["verdict"] = "failure 2 of at most 2"
    path = write_failure(str(tmp_path), failure(number=2, **told))
    assert Path(path).read_text().splitlines()[1::3] == ["full", "full"]
    first, last = Path(path).read_text().splitlines()[2::3]
    assert first == "(out of memory: failure 1 of at most 2; it is tried again)"
    assert last.startswith("(out of memory: failure 2 of at most 2; reduce its memory, or raise")


def test_unwritable_error_file_is_named(tmp_path):
    (tmp_path / "results").write_text("")
    with pytest.raises(StoreError, match=r"trial/error\.txt cannot be written"):
        write_failure(str(tmp_path / "results" / "trial"), failure())


def test_root_cause_is_the_first_exception_and_its_place():
    cause, place = root_cause(raised())
    assert cause == "KeyError: 'no column 3'"
    assert place.startswith(__file__)
    assert place.endswith(" in raised")


def test_text_that_is_no_traceback_has_no_cause():
    assert root_cause("") == ("", "")


def test_failures_that_differ_only_in_numbers_are_one_group():
    log = FailureLog()
    for number in range(10):
        log.add(failure(f"train_{number}", traceback=raised(number), file=f"/f/{number}"))
    (group,) = log.groups()
    assert (group.count, group.file, group.hostnames) == (10, "/f/0", ["node-a"])
    assert group.trials == ["train_0", "train_1", "train_2"]
    assert (group.error, group.cause) == ("ValueError: bad data", "KeyError: 'no column 0'")


def test_group_of_the_users_exception_comes_first_however_rare():
    log = FailureLog()
    for _ in range(5):
        log.add(failure(kind="storage", error="no space", traceback=""))
        log.add(failure(kind="died", error="killed", traceback=""))
    log.add(failure())
    assert [group.kind for group in log.groups()] == ["user", "died", "storage"]


def test_trial_that_fails_repeatedly_is_named_once():
    log = FailureLog()
    for _ in range(3):
        log.add(failure("train_1"))
    assert (log.groups()[0].trials, log.groups()[0].count, log.total) == (["train_1"], 3, 3)


def test_failure_groups_bound_their_memory_when_every_trial_fails_differently():
    log = FailureLog()
    for number in range(1000):
        log.add(failure(error="E" + "x" * number, traceback=""))
    assert len(log.groups()) <= 101
    assert sum(group.count for group in log.groups()) == 1000


def test_dead_process_failure_names_the_signal_and_hints_at_memory():
    assert "killed by SIGKILL; often that means that memory ran out" in describe_death(9, None)
    assert describe_death(11, None).endswith("killed by SIGSEGV")
    assert describe_death(63, None).endswith("killed by signal 63")
    assert describe_death(None, 3).endswith("exited by itself with code 3")
    assert "printed that a GPU's memory ran out" in describe_death(None, 1, "cuda_memory")


def test_failure_event_of_a_node_becomes_a_failure():
    failed = TrialFailed("1", 1, "metric", "MetricError: no loss", "Traceback", at=5.0)
    told = failure_of(failed, trial="train_1", hostname="node-a", number=2, retried=True)
    assert (told.kind, told.error, told.at, told.is_final) == (
        "metric",
        "MetricError: no loss",
        5.0,
        False,
    )
    died = TrialProcessDied("1", 1, pid=7, signal=9, exit_code=None, at=6.0)
    told = failure_of(died, trial="train_1", hostname="node-a", number=1, retried=False)
    assert (told.kind, told.number, told.is_final) == ("died", 1, True)


def test_failure_by_machine_memory_or_a_lost_node_is_named():
    died = TrialProcessDied("1", 1, pid=7, signal=9, exit_code=None, at=6.0, cause="memory")
    told = failure_of(died, trial="train_1", hostname="node-a", number=1, retried=False)
    assert (told.kind, "no memory left" in told.error) == ("memory", True)
    lost = NodeLost("n.1", "its lease ran out")
    told = failure_of(lost, trial="train_1", hostname="node-a", number=1, retried=False)
    assert (told.kind, told.error) == (
        "node",
        "the node that ran the trial was lost: its lease ran out",
    )
