"""What an experiment's process cannot be started with is told, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Iterator, Sequence

import pytest

from tunemq_scheduler.farm.exits import EXIT_AGAIN
from tunemq_scheduler.farm.relay.forking import Answer, Forked, NotForked, encode
from tunemq_scheduler.farm.relay.forkservers import Forkservers
from tunemq_scheduler.farm.relay.process import ExperimentProcess
from tunemq_shared.errors import ConfigError


@pytest.fixture
def forkservers() -> Iterator[Forkservers]:
    made = Forkservers("")
    yield made
    made.close()


@pytest.mark.parametrize(
    "options",
    [
        {"variables": {"A=B": ""}},
        {"variables": {"A": "\0"}},
        {"variables": {"A": "\ud800"}},
        {"python": "/nowhere/python"},
    ],
)
def test_what_it_cannot_be_started_with_is_told(forkservers, tmp_path, options):
    ours, theirs = socket.socketpair()
    with ours, pytest.raises(ConfigError, match="cannot be started with"):
        forkservers.start(tmp_path / "search", theirs, **options)
    assert theirs.fileno() == -1


class FakeForkserver:
    """The other end of an experiment's channel."""

    uses = 0
    has_forked = False

    def __init__(self) -> None:
        self.refusal: OSError | None = None

    def start(self, descriptors: Sequence[int]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.channel = socket.socket(fileno=os.dup(descriptors[0]))

    def say(self, answer: Answer) -> None:
        self.channel.send(encode(answer))

    @property
    def is_cut_off(self) -> bool:
        return bool(select.select([self.channel], [], [], 0)[0]) and not self.channel.recv(99)

    def release(self) -> None:
        self.uses -= 1
        if self.refusal is None:
            self.channel.close()


def start(server: FakeForkserver, folder) -> ExperimentProcess:
    ours, theirs = socket.socketpair()
    ours.close()
    return ExperimentProcess(server, folder / "search", theirs)


def test_a_folder_that_cannot_be_made_is_told(forkservers, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(forkservers, "_server", lambda *_: FakeForkserver())
    ours, theirs = socket.socketpair()
    with ours, pytest.raises(ConfigError, match=r"cannot be started: .*Not a directory"):
        forkservers.start(tmp_path / "file" / "search", theirs)
    assert theirs.fileno() == -1


def test_one_for_which_there_is_no_process_is_to_be_started_again(tmp_path):
    server = FakeForkserver()
    process = start(server, tmp_path)
    assert process.returncode() is None
    server.say(NotForked("fork: Resource temporarily unavailable"))
    assert select.select([process.watched], [], [], 0)[0]
    assert process.returncode() == EXIT_AGAIN
    assert "fork: Resource temporarily unavailable" in process.last_words()
    process.close()


def test_one_that_cannot_be_watched_is_cut_off_and_to_be_started_again(tmp_path):
    server = FakeForkserver()
    process = start(server, tmp_path)
    server.say(Forked(2**22 + 1))  # no number is as great
    assert process.returncode() == EXIT_AGAIN
    assert "cannot be watched" in process.last_words()
    assert server.is_cut_off
    process.close()


def test_one_that_is_killed_before_it_is_forked_is_cut_off(tmp_path):
    server = FakeForkserver()
    process = start(server, tmp_path)
    process.kill()
    assert process.returncode() == -9
    assert server.is_cut_off
    process.close()


def test_one_too_many_is_to_be_started_again(tmp_path):
    server = FakeForkserver()
    server.refusal = BlockingIOError(errno.EAGAIN, "there is no room")
    process = start(server, tmp_path)
    assert process.returncode() == EXIT_AGAIN
    assert "there is no room" in process.last_words()
    process.close()
    assert server.uses == 0
