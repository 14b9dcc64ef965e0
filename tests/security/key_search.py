"""Code that searches for keys from inside a trial, wherever it can look; see the tests beside it.

It gets each key in halves, as it would find a whole key in its own memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tunemq_shared.checkpoints.checkpoint import Checkpoint
from tunemq_shared.trial.session import report

_CHUNK = 2**22
_LARGEST = 64 * 2**20
_GETFD = 438

#: Holds the key that it is given in all places where a process may hold one.
_WATCHDOG = """
import os, sys, time
file = os.memfd_create("watchdog")
os.write(file, os.environ["KEY"].encode())
print("ready", flush=True)
time.sleep(600)
"""


def halves_of(key: str) -> list[str]:
    """A key in two parts, which stand nowhere side by side."""
    middle = len(key) // 2
    return [key[:middle], key[middle:]]


def saving(config: dict[str, Any]) -> None:
    """Save once, so that the node has to do with its store."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "weights").write_bytes(b"w" * 1000)
        report({"step": 1}, checkpoint=Checkpoint(folder))


def searching(config: dict[str, Any]) -> None:
    """Report where each of ``config["keys"]``, by name, was found.

    ``config["planted"]`` is one, too, which is put into places before.
    """
    planted = "".join(config["planted"])
    Path("planted").write_text(planted)
    os.environ["PLANTED"] = planted
    os.write(os.memfd_create("planted"), planted.encode())
    watchdog = subprocess.Popen(
        [sys.executable, "-c", _WATCHDOG, planted],
        env={**os.environ, "KEY": planted},
        stdout=subprocess.PIPE,
    )
    assert watchdog.stdout is not None
    watchdog.stdout.readline()
    try:
        search = Search({**config["keys"], "planted": config["planted"]})
        search.environment()
        for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
            search.process(pid)
        home = os.path.expanduser("~")
        for folder in (*config["folders"], os.getcwd(), *([home] if home != "/" else [])):
            search.folder(folder)
        report({
            "found": {name: sorted(places) for name, places in search.found.items()},
            "rejected": dict(search.rejected),
            "processes": search.opened,
            "user": os.geteuid(),
            "groups": os.getgroups(),
            "rights": _rights(),
        })  # fmt: skip
    finally:
        watchdog.kill()
        watchdog.wait()


class Search:
    """Search for keys, and record where access was denied."""

    def __init__(self, keys: Mapping[str, list[str]]) -> None:
        self._keys = {name: (one.encode(), two.encode()) for name, (one, two) in keys.items()}
        self.found: dict[str, set[str]] = {}
        self.rejected = Counter[str]()
        #: Processes whose memory it has read.
        self.opened: list[int] = []

    def environment(self) -> None:
        """This process's own."""
        text = "\n".join(f"{name}={value}" for name, value in os.environ.items())
        self._look("os.environ", text.encode(errors="surrogateescape"))

    def process(self, pid: int) -> None:
        """All that /proc and the kernel show of a process."""
        whose = "own" if pid == os.getpid() else "other"
        for name in ("environ", "cmdline"):
            for data in self._read(f"/proc/{pid}/{name}", name):
                self._look(f"{whose} {name}", data)
        for fd in self._listed(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{fd}"
            with self._asking("descriptor"):
                self._look(f"{whose} descriptor", os.fsencode(os.readlink(path)))
                if os.path.isfile(path):
                    for data in self._read(path, "descriptor"):
                        self._look(f"{whose} descriptor", data)
        self._memory(pid, whose)
        self._steal(pid)

    def folder(self, folder: str) -> None:
        """All files below it that can be read."""
        for path, _, names in os.walk(folder, onerror=self._count):
            for name in names:
                file = os.path.join(path, name)
                if os.path.isfile(file):
                    for data in self._read(file, "file"):
                        self._look("file", data)

    def _memory(self, pid: int, whose: str) -> None:
        with self._asking("mem"), open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            for first, last in _writable(pid):
                rest = b""
                for at in range(first, last, _CHUNK):
                    try:
                        memory.seek(at)
                        data = memory.read(min(_CHUNK, last - at)) or b""
                    except (OSError, ValueError, OverflowError):
                        break
                    self._look(f"{whose} memory", rest + data)
                    rest = data[-200:]
            self.opened.append(pid)

    def _steal(self, pid: int) -> None:
        """Take one of its descriptors, as a debugger may."""
        with self._asking("pidfd_getfd"):
            pidfd = os.pidfd_open(pid)
            libc = ctypes.CDLL(None, use_errno=True)
            stolen = libc.syscall(_GETFD, pidfd, 2, 0)
            os.close(pidfd)
            if stolen < 0:
                raise OSError(ctypes.get_errno(), "pidfd_getfd")
            os.close(stolen)

    def _read(self, path: str, kind: str) -> Iterator[bytes]:
        with self._asking(kind), open(path, "rb", buffering=0) as file:
            left = _LARGEST
            while left > 0 and (data := file.read(_CHUNK)):
                left -= len(data)
                yield data

    def _listed(self, folder: str) -> list[str]:
        with self._asking("descriptors"):
            return os.listdir(folder)
        return []

    @contextlib.contextmanager
    def _asking(self, kind: str) -> Iterator[None]:
        try:
            yield
        except PermissionError:
            self.rejected[kind] += 1
        except OSError:  # it has ended, or is a kernel's thread
            return

    def _count(self, problem: OSError) -> None:
        self.rejected["folder"] += isinstance(problem, PermissionError)

    def _look(self, place: str, data: bytes) -> None:
        for name, (one, two) in self._keys.items():
            at = data.find(one)
            while at >= 0:
                if data.startswith(two, at + len(one)):
                    self.found.setdefault(name, set()).add(place)
                    break
                at = data.find(one, at + 1)


def _writable(pid: int) -> list[tuple[int, int]]:
    """The parts of a process's memory that hold data."""
    parts = []
    with open(f"/proc/{pid}/maps") as maps:
        for line in maps:
            addresses, rights, *_ = line.split()
            if rights.startswith("rw"):
                first, last = (int(one, 16) for one in addresses.split("-"))
                parts.append((first, last))
    return parts


def _rights() -> dict[str, str]:
    """The privileges of this process, according to the kernel."""
    with open("/proc/self/status") as status:
        lines = dict(line.rstrip("\n").split(":\t", 1) for line in status if ":\t" in line)
    return {name: lines[name] for name in ("CapEff", "CapPrm", "NoNewPrivs", "Uid")}
