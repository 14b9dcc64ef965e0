"""Matches in the output of trials, limits on their time, and hostile output."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import without_collections
from tunemq_workers.logs import output_files
from tunemq_workers.logs.log_policy_scanner import SHOWN, LogPatterns, LogScanner, PatternDisabled
from tunemq_workers.logs.log_tail import LINE_BYTES, LOOK_BYTES, LogFile, end_of
from tunemq_workers.logs.scanner_messages import (
    AttemptOutput,
    FinishOutput,
    FollowOutput,
    ForgetOutput,
    LineMatched,
    LogAnswer,
    OutputFinished,
    PatternDropped,
)

#: Takes a time that doubles with each x where no y follows.
CATASTROPHIC = r"(x+x+)+y"
MANY_X = "x" * 200


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGVTALRM)
    with without_collections():  # garbage collections would count into a pattern's time
        yield
    signal.signal(signal.SIGVTALRM, before)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / output_files.STDERR


def add(path: Path, text: str | bytes) -> None:
    with path.open("ab") as file:
        file.write(text if isinstance(text, bytes) else text.encode())


# --- lines ----------------------------------------------------------------------------------------


def test_lines_come_once_when_they_are_complete(path: Path) -> None:
    file = LogFile(str(path), 0)
    assert file.lines() == []
    add(path, "one\ntw")
    assert file.lines() == ["one"]
    add(path, "o\r\nthree\rfour\n\nfi")
    assert file.lines() == ["two", "three", "four"]
    assert file.lines() == []
    assert file.lines(is_last=True) == ["fi"]
    assert file.lines(is_last=True) == []


def test_earlier_output_is_not_read(path: Path) -> None:
    add(path, "of the attempt before\n")
    file = LogFile(str(path), path.stat().st_size)
    add(path, "mine\n")
    assert file.lines() == ["mine"]
    assert end_of(str(path), len("of the attempt before\n"), 1000) == b"mine\n"


def test_long_line_is_matched_at_its_beginning_however_it_is_split(path: Path) -> None:
    file = LogFile(str(path), 0)
    for _ in range(5):
        add(path, "a" * 2000)
        assert file.lines() == []
    add(path, "end\nnext\n")
    assert file.lines() == ["a" * LINE_BYTES, "next"]


def test_large_output_is_matched_at_its_newest_part(path: Path) -> None:
    file = LogFile(str(path), 0)
    add(path, b"old\n" + b"filler\n" * LOOK_BYTES + b"new\n")
    lines = file.lines()
    assert lines[-1] == "new"
    assert "old" not in lines
    assert sum(len(line) + 1 for line in lines) <= LOOK_BYTES


def test_invalid_text_is_read_all_the_same(path: Path) -> None:
    add(path, b"\xff\x00 ECC \xc3\n")
    assert "ECC" in LogFile(str(path), 0).lines()[0]


def test_shortened_file_is_read_from_the_same_place(path: Path) -> None:
    file = LogFile(str(path), 0)
    add(path, "".join(f"line {number}\n" for number in range(1000)))
    length = path.stat().st_size
    assert len(file.lines()) == 1000
    add(path, "behind it\n")
    output_files.cap(str(path), limit=1000)
    assert file.lines() == ["behind it"]
    before = path.stat().st_size
    add(path, "and more\n")
    assert file.lines() == ["and more"]
    assert end_of(str(path), length, 1000) == b"behind it\nand more\n"
    path.write_text("emptied\n")
    assert path.stat().st_size < before
    assert file.lines() == ["emptied"]


def test_only_regular_files_of_the_trial_are_opened(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key\n")
    (tmp_path / "link").symlink_to(secret)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name in ("link", "fifo", "folder", "missing"):
        assert LogFile(str(tmp_path / name), 0).lines(is_last=True) == []
        assert end_of(str(tmp_path / name), 0, 1000) == b""


# --- patterns -------------------------------------------------------------------------------------


def test_first_matching_line_is_shown_around_the_match() -> None:
    patterns = LogPatterns()
    assert patterns.search("b+", ["a", "xbby", "b"]) == "xbby"
    assert patterns.search("c", ["a"]) is None
    long = "a" * 2000 + "HERE" + "z" * 2000
    shown = patterns.search("HERE", [long])
    assert shown is not None
    assert "HERE" in shown
    assert len(shown) <= SHOWN
    assert patterns.search("red", ["\x1b[31mred\x07"]) == "[31mred"


def test_pattern_that_would_take_for_ever_is_dropped_soon_and_others_are_not() -> None:
    patterns = LogPatterns(budget_s=0.05)
    began = time.process_time()
    with pytest.raises(PatternDisabled, match=r"it took more than 0\.05 s"):
        patterns.search(CATASTROPHIC, [MANY_X])
    assert time.process_time() - began < 5
    with pytest.raises(PatternDisabled, match=r"it took more than 0\.05 s"):
        patterns.search(CATASTROPHIC, ["xxy"])
    assert patterns.search("x+y", ["xxy"]) == "xxy"
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0


def test_pattern_unknown_to_this_python_is_dropped() -> None:
    with pytest.raises(PatternDisabled, match="it cannot be used here"):
        LogPatterns().search("(", ["x"])


def test_output_of_one_search_leaves_out_no_pattern_of_another():
    patterns = LogPatterns(budget_s=0.05)
    with pytest.raises(PatternDisabled, match=r"more than 0\.05 s"):
        patterns.search(CATASTROPHIC, [MANY_X], "one")
    assert patterns.search(CATASTROPHIC, ["xxy"], "two") == "xxy"


def test_search_with_several_slow_patterns_has_its_others_left_out():
    patterns = LogPatterns(budget_s=0.01)
    for number in range(4):
        with pytest.raises(PatternDisabled, match="more than"):
            patterns.search(f"{CATASTROPHIC}{number}", [MANY_X], "one")
    with pytest.raises(PatternDisabled, match="4 other patterns of its search"):
        patterns.search("x", ["x"], "one")
    assert patterns.search("x", ["x"], "two") == "x"


# --- the process ----------------------------------------------------------------------------------


class Told:
    """A scanner and its answers."""

    def __init__(self, folder: Path) -> None:
        self.answers: list[LogAnswer] = []
        self.scanner = LogScanner(self.answers.append)
        self.folder = folder

    def output(self, *patterns: str, printed: tuple[int, int] = (0, 0)) -> AttemptOutput:
        return AttemptOutput("search", str(self.folder), printed, patterns)

    def take(self) -> list[LogAnswer]:
        answers = self.answers[:]
        self.answers.clear()
        return answers


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


def test_each_pattern_is_reported_once_whichever_file_matches(told: Told) -> None:
    told.scanner.obey(FollowOutput(1, told.output("ECC", "NCCL")))
    told.scanner.look()
    assert told.take() == []
    add(told.folder / "stdout", "an ECC error\nan ECC error\n")
    told.scanner.look()
    assert told.take() == [LineMatched(1, "ECC", "an ECC error")]
    add(told.folder / "stderr", "NCCL and ECC, without an end")
    told.scanner.look()
    assert told.take() == []
    told.scanner.obey(FinishOutput(1, told.output("ECC", "NCCL"), asks_memory=False))
    matched = LineMatched(1, "NCCL", "NCCL and ECC, without an end")
    assert told.take() == [matched, OutputFinished(1, is_cuda_memory=False)]


def test_restarted_process_reads_all_from_the_beginning(told: Told) -> None:
    add(told.folder / "stderr", "before\nECC\n")
    told.scanner.obey(FinishOutput(7, told.output("ECC", printed=(0, 7)), asks_memory=False))
    assert told.take() == [LineMatched(7, "ECC", "ECC"), OutputFinished(7, is_cuda_memory=False)]


def test_dropped_trial_is_not_read(told: Told) -> None:
    told.scanner.obey(FollowOutput(1, told.output("ECC")))
    told.scanner.obey(ForgetOutput(1))
    told.scanner.obey(ForgetOutput(2))
    add(told.folder / "stdout", "ECC\n")
    told.scanner.look()
    assert told.take() == []


def test_pattern_that_takes_too_long_is_reported_and_the_others_are_found(told: Told) -> None:
    add(told.folder / "stdout", f"{MANY_X}\nECC\n")
    told.scanner.obey(FinishOutput(1, told.output(CATASTROPHIC, "ECC"), asks_memory=False))
    left_out, matched, finished = told.take()
    assert isinstance(left_out, PatternDropped)
    assert left_out.pattern == CATASTROPHIC
    assert (matched, finished) == (
        LineMatched(1, "ECC", "ECC"),
        OutputFinished(1, is_cuda_memory=False),
    )


def test_gpu_memory_error_at_the_end_of_the_output_is_found_on_request(told: Told) -> None:
    add(told.folder / "stderr", "[rank1]: torch.OutOfMemoryError: CUDA out of memory.\n")
    add(told.folder / "stderr", "torchrun: a rank has failed\n" * 100)
    for asks_memory in (True, False):
        told.scanner.obey(FinishOutput(1, told.output(), asks_memory=asks_memory))
        assert told.take() == [OutputFinished(1, is_cuda_memory=asks_memory)]


def test_memory_error_that_the_trial_survived_is_ignored(told: Told, tmp_path: Path) -> None:
    before = "CUDA out of memory, in the attempt before\n"
    add(told.folder / "stderr", before)
    told.scanner.obey(FinishOutput(1, told.output(printed=(0, len(before))), asks_memory=True))
    assert told.take() == [OutputFinished(1, is_cuda_memory=False)]
    add(told.folder / "stdout", "CUDA out of memory, with a smaller batch now\n")
    add(told.folder / "stdout", "step\n" * 10_000)
    told.scanner.obey(FinishOutput(1, told.output(printed=(0, len(before))), asks_memory=True))
    assert told.take() == [OutputFinished(1, is_cuda_memory=False)]
