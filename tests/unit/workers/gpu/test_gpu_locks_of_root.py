"""GPU locks of root's workers, where other users, such as trials, lock what they may."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.other_users import NOBODY, open_folder, reachable
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.messages import Gpu
from tunemq_workers.gpu.gpu_locks import ROOT_FOLDER, take_gpus

__all__ = ["open_folder"]

A = Gpu("GPU-a")

_TAKES = """
import sys
from tunemq_shared.protocol.messages import Gpu
from tunemq_workers.gpu.gpu_locks import take_gpus
take_gpus([Gpu("GPU-a")], "worker other", sys.argv[1])
"""
_WAITS = "print('locked', flush=True); sys.stdin.read()"

Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def folder(open_folder: Path) -> Path:
    """Return a folder such as /dev/shm."""
    path = open_folder / "shm"
    path.mkdir()
    path.chmod(0o1777)
    return path


@pytest.fixture
def run(folder: Path) -> Iterator[Run]:
    """Return a function that runs a program with the folder as its argument."""
    running: list[subprocess.Popen[str]] = []

    def start(program: str, user: int | None = NOBODY) -> subprocess.Popen[str]:
        line = [*reachable(user), sys.executable, "-c", program, str(folder)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd="/")
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def locked_by_root(run: Run, folder: Path) -> None:
    """Check that the worker starts, and that workers of root and of others are then refused."""
    locks = take_gpus([A], "worker me", str(folder))
    assert locks.has(A.uuid)
    who = f"GPU-a cannot be offered: used by process {os.getpid()} (worker me)"
    for user in (NOBODY, None):
        assert who in run(_TAKES, user).communicate()[1]
    locks.give_back_all()
    assert run(_TAKES, NOBODY).wait() == 0


def test_worker_of_root_starts_although_another_user_holds_the_lock_file(run, folder, caplog):
    holder = run(_TAKES + _WAITS)
    assert holder.stdout.readline() == "locked\n"
    locked_by_root(run, folder)
    assert f"used by process {holder.pid} (worker other)" in caplog.text


@pytest.mark.parametrize(
    "makes", ["os.makedirs(path + '/inside')", "os.mkfifo(path)", "os.symlink('precious', path)"]
)
@pytest.mark.parametrize("name", ["tunemq-gpu-GPU-a.lock", ROOT_FOLDER])
def test_worker_of_root_starts_although_another_user_put_something_there(run, folder, makes, name):
    program = f"import os, sys; path = sys.argv[1] + '/{name}'; {makes}"
    assert run(program).wait() == 0
    locked_by_root(run, folder)
    assert not (folder / "precious").exists()


def test_worker_of_root_is_refused_while_another_one_of_root_has_the_gpu(run, folder):
    holder = run(_TAKES + _WAITS, None)
    assert holder.stdout.readline() == "locked\n"
    who = rf"GPU-a cannot be offered: used by process {holder.pid} \(worker other\)"
    with pytest.raises(ConfigError, match=who):
        take_gpus([A], "worker me", str(folder))
    (folder / "tunemq-gpu-GPU-a.lock").unlink()
    with pytest.raises(ConfigError, match=who):
        take_gpus([A], "worker me", str(folder))
