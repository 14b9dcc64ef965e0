"""Machines for tests: network namespaces, each with an address, plugged into one switch.

    with Hosts() as hosts:
        head, worker = hosts.add("head"), hosts.add("worker")
        worker.start(["tunemq", "worker"], environ)     # a process on that machine
        worker.unplug(); worker.plug_in()               # its cable
        worker.kill()                                   # all of its processes, at once

Processes of a machine reach its loopback interface and the other machines' addresses, but neither
the real machine nor the internet. Machines share the file system, so give each process separate
folders. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from tests.integration.farm_support import is_alive, process_tree_of
from tests.support.waiting import eventually, need
from tests.support.warm_commands import WarmCommands

_NET: Final = "10.0.0"


class Host:
    """A machine: a network namespace with an address.

    Attributes:
        processes: those that were started on it.
    """

    def __init__(self, space: str, switch: str, number: int) -> None:
        self._space, self._switch, self._number = space, switch, number
        self.address = f"{_NET}.{number}"
        self.processes: list[subprocess.Popen[Any]] = []
        _ip("netns", "add", space)
        port = f"p{number}"
        peer = ("peer", "name", "eth0", "netns", space)
        _ip("-n", switch, "link", "add", port, "type", "veth", *peer)
        _ip("-n", switch, "link", "set", port, "master", "br0", "up")
        _ip("-n", space, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "link", "set", "lo", "up")

    def start(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        log: Path,
        *,
        cwd: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a program on this machine in a new session; its output goes to ``log``."""
        with log.open("ab") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self._space, *command],
                env=dict(environ),
                cwd=cwd or log.parent,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def commands(self, environ: Mapping[str, str]) -> WarmCommands:
        """The runner of `tunemq` commands on this machine, in this environment."""
        return WarmCommands(environ, ["ip", "netns", "exec", self._space])

    def unplug(self) -> None:
        """Pull its cable: packets are lost without an error at either end."""
        _ip("-n", self._switch, "link", "set", f"p{self._number}", "down")

    def plug_in(self) -> None:
        """Put the cable back."""
        _ip("-n", self._switch, "link", "set", f"p{self._number}", "up")

    def kill(self) -> None:
        """Cut its power: all of its processes are gone at once."""
        # Another process may have the number of one that was waited for.
        running = [process.pid for process in self.processes if process.poll() is None]
        pids = [member for pid in running for member in process_tree_of(pid)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        self.processes.clear()
        eventually(lambda: not any(map(is_alive, pids)))


class Hosts:
    """Machines on one switch; all that was made is removed at the end."""

    def __init__(self) -> None:
        need("iproute2", shutil.which("ip"))
        need("root, for network namespaces", os.geteuid() == 0 or None)
        self._mark = f"tmq{secrets.token_hex(3)}"
        self._switch = f"{self._mark}-switch"
        self._spaces = [self._switch]
        self._hosts: list[Host] = []

    def __enter__(self) -> Self:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._hosts:
            host.kill()
        for space in self._spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)

    def add(self, name: str) -> Host:
        """One more machine."""
        space = f"{self._mark}-{name}"
        self._spaces.append(space)
        host = Host(space, self._switch, len(self._hosts) + 1)
        self._hosts.append(host)
        return host


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
