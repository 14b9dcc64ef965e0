"""The end of a trial's output is sent with its failure."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest

from tests.support.refused_threads import threads_refused
from tests.support.waiting import eventually
from tests.unit.workers.fakes import start
from tunemq_shared.protocol.messages import (
    ResultReported,
    SlotFreed,
    TrialFailed,
    TrialProcessDied,
    TrialStarted,
    decode_node_event,
    encode,
)
from tunemq_workers.logs import failure_output
from tunemq_workers.logs.failure_output import FailureOutput, as_text, read_last

EVENTS = start().events_key


@pytest.fixture(autouse=True)
def _slow_loop(monkeypatch):
    """Raise the timeout for the disk, for a busy machine."""
    monkeypatch.setattr(failure_output, "TIMEOUT_S", 60.0)


def started(attempt=1, printed=(0, 0)):
    return TrialStarted("a", attempt, 7, "host", "127.0.0.1", 0.0, printed=printed)


def failed(attempt=1):
    return TrialFailed("a", attempt, "user", "ValueError: x", "", 0.0)


class World:
    """The events about one trial in a given folder; the test must close it."""

    def __init__(self, folder, **more):
        self.events = []
        self.words = FailureOutput(lambda key, event: self.events.append((key, event)), **more)
        self.words.running_trials = lambda: [
            (("a", attempt), start(folder=str(folder))) for attempt in range(1, 4)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.words.close()

    def say(self, *events, key=EVENTS):
        for event in events:
            self.words.emit(key, encode(event))

    @property
    def last(self):
        return decode_node_event(self.events[-1][1])


def test_failure_output_has_few_lines_of_both_files(tmp_path):
    (tmp_path / "stdout").write_text("".join(f"line {n}\n" for n in range(50)))
    (tmp_path / "stderr").write_text("a warning\n\n")
    shown = as_text(read_last(str(tmp_path)))
    assert shown.splitlines()[:2] == ["The last lines of stdout:", "line 30"]
    assert shown.endswith("line 49\n\nThe last lines of stderr:\na warning\n")


def test_invalid_text_and_cursor_movements_are_replaced(tmp_path):
    (tmp_path / "stdout").write_bytes(b"\xff\x00\x1b[2J\tend\r\n 1%\r99%\n\x9b")
    assert as_text(read_last(str(tmp_path))).splitlines()[1:] == [
        "\ufffd\ufffd\ufffd[2J\tend",
        "99%",
        "\ufffd",
    ]


def test_endless_line_is_cut_and_empty_output_shows_nothing(tmp_path):
    assert as_text(read_last(str(tmp_path))) == ""
    (tmp_path / "stdout").write_bytes(b"x" * 10_000_000)
    assert len(as_text(read_last(str(tmp_path)))) < 4000


def test_replaced_output_file_is_neither_waited_for_nor_followed(tmp_path):
    (tmp_path / "other").write_text("of another user\n")
    (tmp_path / "stderr").symlink_to(tmp_path / "other")
    os.mkfifo(tmp_path / "stdout")
    # A reader that blocks would find this line instead of hanging forever.
    pipe = os.open(tmp_path / "stdout", os.O_RDWR)
    os.write(pipe, b"from a pipe\n")
    try:
        assert read_last(str(tmp_path)) == {"stdout": b"", "stderr": b""}
    finally:
        os.close(pipe)


def test_stacks_stand_whole_below_the_output(tmp_path):
    stacks = (
        "Current thread 0x00007 (most recent call first):\n" + 40 * '  File "a.py", line 1 in f\n'
    )
    (tmp_path / "stderr").write_text("warned\n" + stacks)
    shown = as_text(read_last(str(tmp_path)))
    assert shown.startswith("The last lines of stderr:\nwarned\n")
    assert shown.endswith(f"What its threads were doing:\n{stacks}")


def test_failure_shows_only_the_output_of_its_attempt(tmp_path):
    (tmp_path / "stdout").write_text("the first\n")
    with World(tmp_path) as world:
        world.say(started(1), failed(1))
        assert world.last.output == "The last lines of stdout:\nthe first\n"
        with (tmp_path / "stdout").open("a") as file:
            file.write("the second\n")
        world.say(SlotFreed("a", 1), started(2, (10, 0)), TrialProcessDied("a", 2, 7, 9, None, 0.0))
        assert world.last.output == "The last lines of stdout:\nthe second\n"
        # A file that was truncated meanwhile is read from its beginning.
        world.say(started(3, (10_000, 0)), failed(3))
        assert "the first\nthe second" in world.last.output


def test_events_that_are_no_failure_of_a_process_are_passed_unchanged(tmp_path):
    (tmp_path / "stdout").write_text("something\n")
    world = World(tmp_path)
    events = [started(), ResultReported("a", 1, 1, {"x": 1}, 0.0, 1.0, 1.0, 1.0, 1), failed(9)]
    world.say(*events)
    world.say(failed(1), key="events:of another search")
    assert [event for _, event in world.events] == [*map(encode, events), encode(failed(1))]


def test_disk_that_hangs_costs_one_failure_its_output_and_the_loop_a_moment(tmp_path, monkeypatch):
    monkeypatch.setattr(failure_output, "TIMEOUT_S", 0.02)
    continues = threading.Event()
    asked = []

    def read(folder, printed):
        asked.append(folder)
        continues.wait()
        return {"stdout": b"read\n"}

    with World(tmp_path, read=read) as world:
        for _ in range(3):
            world.say(failed())
            assert world.last.output == ""
        eventually(lambda: asked)  # the thread may begin after the loop's timeout
        assert len(asked) == 1
        continues.set()
        monkeypatch.setattr(failure_output, "TIMEOUT_S", 60.0)
        while not world.last.output:
            world.say(failed())
    assert world.last.output == "The last lines of stdout:\nread\n"


def test_many_failures_on_a_slow_disk_delay_the_loop_no_longer_than_one(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(failure_output, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(failure_output, "PERIOD_S", 1000.0)
    asked = []

    def read(folder, printed):
        asked.append(folder)
        clock.now += 18.0
        return {"stdout": b"read\n"}

    with World(tmp_path, read=read) as world:
        world.say(failed())
        assert world.last.output == "The last lines of stdout:\nread\n"
        for _ in range(20):
            world.say(failed())
        assert len(asked) <= 4
        assert world.last.output == ""
        monkeypatch.setattr(failure_output, "PERIOD_S", 0.0)
        eventually(lambda: world.say(failed()) or world.last.output)
    assert world.last.output == "The last lines of stdout:\nread\n"


def test_failure_without_a_thread_to_read_output_is_passed_on_all_the_same(tmp_path):
    (tmp_path / "stdout").write_text("printed\n")
    with World(tmp_path) as world:
        with threads_refused():
            world.say(failed())
        assert world.last == failed()
        world.say(failed())
        assert world.last.output == "The last lines of stdout:\nprinted\n"
