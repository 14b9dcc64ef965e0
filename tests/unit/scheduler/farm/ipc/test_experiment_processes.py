"""A failed start of an experiment process is reported and leaves nothing behind."""

from __future__ import annotations

import errno
import os
import select
import socket
import subprocess
from collections.abc import Iterator, Sequence

import pytest

from tests.support.waiting import eventually
from tunemq_scheduler.farm.common.scheduler_exit_codes import EXIT_AGAIN, EXIT_USE
from tunemq_scheduler.farm.ipc.experiment_processes import (
    ERRORS,
    OUTPUT,
    ExperimentForkservers,
    ExperimentProcess,
)
from tunemq_scheduler.farm.ipc.fork_messages import (
    ExperimentExited,
    ExperimentForked,
    ExperimentForkFailed,
    ForkAnswer,
    encode,
)
from tunemq_shared.base.errors import ConfigError


@pytest.fixture
def forkservers() -> Iterator[ExperimentForkservers]:
    made = ExperimentForkservers("")
    yield made
    made.close()


@pytest.mark.parametrize(
    "options",
    [
        {"variables": {"A=B": ""}},
        {"variables": {"A": "\0"}},
        {"variables": {"A": "\ud800"}},
    ],
)
def test_invalid_start_of_a_process_is_reported(forkservers, tmp_path, options):
    ours, theirs = socket.socketpair()
    with ours, pytest.raises(ConfigError, match="cannot be started with"):
        forkservers.start(tmp_path / "search", theirs, **options)
    assert theirs.fileno() == -1


def test_interpreter_that_cannot_be_executed_is_reported(forkservers, tmp_path):
    ours, theirs = socket.socketpair()
    with ours:
        process = forkservers.start(tmp_path / "search", theirs, python="/nowhere/python")
        eventually(lambda: process.returncode() is not None)
    assert process.returncode() == EXIT_USE
    assert "/nowhere/python cannot run experiments: it cannot be" in process.last_output()
    process.close()


def test_fifos_in_place_of_output_files_are_moved_aside(forkservers, tmp_path):
    folder = tmp_path / "search"
    folder.mkdir()
    for name in (OUTPUT, ERRORS):
        os.mkfifo(folder / name)
    ours, theirs = socket.socketpair()
    with ours:
        process = forkservers.start(folder, theirs, python="/nowhere/python")
        eventually(lambda: process.returncode() is not None)
        assert (folder / OUTPUT).is_file()
        (folder / ERRORS).unlink()
        os.mkfifo(folder / ERRORS)
        process.last_output()
        process.close()


class FakeForkserver:
    """The other end of an experiment's channel."""

    uses = 0
    has_forked = False
    python = "/its/python"

    def __init__(self) -> None:
        self.rejection: OSError | None = None
        self.pid = os.getpid()
        self.killed: list[str] = []

    def kill(self, why: str) -> None:
        self.killed.append(why)

    def start(self, descriptors: Sequence[int]) -> None:
        if self.rejection is not None:
            raise self.rejection
        self.channel = socket.socket(fileno=os.dup(descriptors[0]))

    def say(self, answer: ForkAnswer) -> None:
        self.channel.send(encode(answer))

    @property
    def is_cut_off(self) -> bool:
        return bool(select.select([self.channel], [], [], 0)[0]) and not self.channel.recv(99)

    def release(self) -> None:
        self.uses -= 1
        if self.rejection is None:
            self.channel.close()


def start(server: FakeForkserver, folder) -> ExperimentProcess:
    ours, theirs = socket.socketpair()
    ours.close()
    return ExperimentProcess(server, folder / "search", theirs)


def test_folder_that_cannot_be_created_is_reported(forkservers, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(forkservers, "_server", lambda *_: FakeForkserver())
    ours, theirs = socket.socketpair()
    with ours, pytest.raises(ConfigError, match=r"cannot be started: .*Not a directory"):
        forkservers.start(tmp_path / "file" / "search", theirs)
    assert theirs.fileno() == -1


def test_experiment_whose_fork_failed_is_to_be_restarted(tmp_path):
    server = FakeForkserver()
    process = start(server, tmp_path)
    assert process.returncode() is None
    server.say(ExperimentForkFailed("fork: Resource temporarily unavailable"))
    assert select.select([process.watched], [], [], 0)[0]
    assert process.returncode() == EXIT_AGAIN
    assert "fork: Resource temporarily unavailable" in process.last_output()
    process.close()


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process of the same user, in its own session, that is no child of the forkserver."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_process_that_is_no_child_of_the_forkserver_is_not_signalled(tmp_path, victim):
    server = FakeForkserver()
    server.pid = os.getppid()
    process = start(server, tmp_path)
    server.say(ExperimentForked(victim.pid))
    assert process.returncode() == EXIT_USE
    process.kill()
    assert process.pid is None
    assert f"process {victim.pid} is no child of process {server.pid}" in process.last_output()
    assert server.is_cut_off
    assert len(server.killed) == 1
    process.close()
    assert victim.poll() is None


@pytest.mark.parametrize("pid", [0, -1, 1, 2**22 + 1])
def test_number_of_an_unknown_experiment_is_rejected(tmp_path, pid):
    server = FakeForkserver()
    process = start(server, tmp_path)
    server.say(ExperimentForked(pid))
    assert process.returncode() == EXIT_USE
    assert server.killed
    process.close()


@pytest.mark.parametrize("lie", [ExperimentForked(1), ExperimentForkFailed("no")])
def test_second_report_of_the_start_of_a_process_ends_the_forkserver(tmp_path, victim, lie):
    server = FakeForkserver()
    process = start(server, tmp_path)
    server.say(
        ExperimentForked(victim.pid)
    )  # a child of this process, which stands for the forkserver
    assert process.returncode() is None
    assert process.pid == victim.pid
    server.say(lie)
    process.kill()
    eventually(lambda: process.returncode() is not None)
    assert process.returncode() == EXIT_USE
    assert server.killed
    process.close()


def test_report_of_the_end_of_a_process_that_was_not_forked_ends_the_forkserver(tmp_path):
    server = FakeForkserver()
    process = start(server, tmp_path)
    server.say(ExperimentExited(0))
    assert process.returncode() == EXIT_USE
    assert server.killed
    process.close()


def test_experiment_that_died_with_its_forkserver_is_to_be_restarted(tmp_path, victim):
    server = FakeForkserver()
    server.pid = os.getppid()
    process = start(server, tmp_path)
    server.say(ExperimentForked(victim.pid))
    server.channel.close()
    assert process.returncode() == EXIT_AGAIN
    assert not server.killed
    process.close()


def test_experiment_killed_before_its_fork_is_disconnected(tmp_path):
    server = FakeForkserver()
    process = start(server, tmp_path)
    process.kill()
    assert process.returncode() == -9
    assert server.is_cut_off
    process.close()


def test_experiment_beyond_the_process_limit_is_to_be_restarted(tmp_path):
    server = FakeForkserver()
    server.rejection = BlockingIOError(errno.EAGAIN, "there is no room")
    process = start(server, tmp_path)
    assert process.returncode() == EXIT_AGAIN
    assert "there is no room" in process.last_output()
    process.close()
    assert server.uses == 0
