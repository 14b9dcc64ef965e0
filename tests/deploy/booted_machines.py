"""Machines for tests of deployment: Debian with systemd as PID 1, by systemd-nspawn.

`debootstrap` fills one base folder once; each machine has an overlay on it in a folder of the test.
Machines of one test share a separate network, and reach nothing else.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tests.support.stores.object_servers import CACHE
from tests.support.waiting import eventually
from tunemq_shared.system.processes import children_of

#: Packages beyond a minimal Debian that a head, a worker and their tests need.
_PACKAGES: Final = (
    *("systemd", "systemd-sysv", "dbus", "python3", "python3-venv", "redis-server", "openssl"),
    *("iproute2", "procps", "ca-certificates", "openssh-client", "openssh-server"),
)
_SUITE: Final = "bookworm"
_TOOLS: Final = ("systemd-nspawn", "debootstrap", "ip", "nsenter")
#: They are built while other tests run.
_GENTLY: Final = ("nice", "-n", "19")


def what_is_missing() -> str:
    """The tools that this machine lacks to boot others; empty if it has all."""
    if os.geteuid() != 0:
        return "machines are booted by root"
    return ", ".join(tool for tool in _TOOLS if shutil.which(tool) is None)


def debian() -> Path:
    """The folder with the system that all machines begin with, made once."""
    made = CACHE / f"machine-{_SUITE}"
    if not made.exists():
        new = made.with_name(f"{made.name}.{os.getpid()}")
        include = "--include=" + ",".join(_PACKAGES)
        subprocess.run(
            [*_GENTLY, "debootstrap", "--variant=minbase", include, _SUITE, str(new)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        new.rename(made)
    return made


class Machine:
    """A booted machine.

    Args:
        name: its host name.
        folder: for its changes; must be empty.
        network: the name of its network namespace.
        address: in this network.
    """

    def __init__(self, name: str, folder: Path, network: str, address: str) -> None:
        self.name, self.network, self.address = name, network, address
        self.changes = folder / "upper"
        self.root = folder / "root"
        self._log = folder / "console.log"
        for part in (self.changes, self.root, folder / "work"):
            part.mkdir(parents=True)
        layers = f"lowerdir={debian()},upperdir={self.changes},workdir={folder / 'work'}"
        subprocess.run(
            ["mount", "-t", "overlay", "overlay", "-o", layers, str(self.root)], check=True
        )
        (self.root / "etc/hostname").write_text(f"{name}\n")
        (self.root / "etc/machine-id").write_text(f"{uuid.uuid4().hex}\n")
        self.leader = 0

    def boot(self) -> None:
        """Switch it on, and wait until all of its services have been started."""
        command = [*_GENTLY, "systemd-nspawn", "--quiet", f"--directory={self.root}", "--boot"]
        command += ["--register=no", "--keep-unit", f"--machine={self.name}", "--console=pipe"]
        command += [f"--network-namespace-path=/run/netns/{self.network}"]
        with self._log.open("ab") as log:
            self._nspawn = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Control groups of version 1 do not tell systemd in a container when a unit is
                # empty.
                env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
            )
        eventually(self._is_up, within=120, every=0.2, message=lambda: f"no boot\n{self.console}")

    def _is_up(self) -> bool:
        if self._nspawn.poll() is not None:
            raise AssertionError(f"systemd-nspawn ended: {self.console}")
        self.leader = next(iter(children_of(self._nspawn.pid)), 0)
        if not self.leader or not self._is_systemd():
            return False
        state = self.run("systemctl", "is-system-running", fails=True).strip()
        return state in {"running", "degraded"}

    def _is_systemd(self) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.leader}/comm").read_text().strip() == "systemd"
        return False

    @property
    def console(self) -> str:
        """The end of its boot output."""
        return self._log.read_text(errors="replace")[-3000:]

    def run(self, *command: str, fails: bool = False, given: str | None = None) -> str:
        """Run a command in there, as root, and return its output.

        Args:
            command: with its arguments.
            fails: whether it may.
            given: its input.
        """
        into = ["nsenter", f"--target={self.leader}", "-m", "-u", "-i", "-n", "-p", "-C"]
        into += [f"--root=/proc/{self.leader}/root", "--wdns=/", "--", "env", "-i"]
        ended = subprocess.run(
            [*into, *_ENVIRONMENT, *command],
            input=given,
            stdin=subprocess.DEVNULL if given is None else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            timeout=600,
        )
        assert fails or ended.returncode == 0, f"{command}: {ended.returncode}\n{ended.stdout}"
        return ended.stdout

    def sh(self, script: str, *, fails: bool = False) -> str:
        """Run a line of shell in there."""
        return self.run("sh", "-euc", script, fails=fails)

    def reboot(self) -> None:
        """Reboot from inside, as a user would."""
        self.run("systemctl", "reboot", fails=True)
        self._nspawn.wait(180)
        self.boot()

    def power_off(self) -> None:
        """End it, in whatever state it is."""
        if self._nspawn.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.leader, signal.SIGKILL)
            self._nspawn.wait(60)

    def close(self) -> None:
        """End it, and release its folder."""
        if self.leader:
            self.power_off()
        subprocess.run(["umount", "--lazy", str(self.root)], check=True)


_ENVIRONMENT: Final = (
    *("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"),
    *("LC_ALL=C.UTF-8", "SYSTEMD_PAGER=cat", "SYSTEMD_COLORS=0"),
)


@contextlib.contextmanager
def machines(folder: Path, names: Sequence[str]) -> Iterator[list[Machine]]:
    """Create machines, switched off, on a separate network; remove them after the test."""
    hub, *networks = [f"tunemq-{os.getpid()}-{name}" for name in ("hub", *names)]
    made: list[Machine] = []
    try:
        _network(hub)
        _ip("-n", hub, "link", "add", "hub", "type", "bridge")
        _ip("-n", hub, "link", "set", "hub", "up")
        for number, (name, network) in enumerate(zip(names, networks, strict=True), 1):
            _network(network)
            cable, plug = ("cable", "netns", network), (f"plug{number}", "netns", hub)
            _ip("link", "add", *cable, "type", "veth", "peer", "name", *plug)
            _ip("-n", hub, "link", "set", plug[0], "master", "hub", "up")
            address = f"192.0.2.{number}"  # of a network that examples have
            _ip("-n", network, "address", "add", f"{address}/24", "dev", "cable")
            _ip("-n", network, "link", "set", "cable", "up")
            made.append(Machine(name, folder / name, network, address))
        yield made
    finally:
        for machine in made:
            machine.close()
        for network in (hub, *networks):
            subprocess.run(["ip", "netns", "delete", network], check=False)


def _network(name: str) -> None:
    _ip("netns", "add", name)
    _ip("-n", name, "link", "set", "lo", "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def wheels(project: Path) -> Path:
    """A folder with this checkout's wheel and all that it needs, for the machines' own Python."""
    kept = CACHE / "wheels-311"
    pip = [*_GENTLY, sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    kept.mkdir(parents=True, exist_ok=True)
    for old in kept.glob("tunemq-*.whl"):
        old.unlink()
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(kept), str(project)], check=True)
    wheel = next(kept.glob("tunemq-*.whl"))
    # Of Debian's Python; `async-timeout` is what 3.11.2 lacks, and this interpreter may not.
    found = [*pip, "download", "--python-version=3.11", "--only-binary=:all:", "--dest", str(kept)]
    found += ["--constraint", str(project / "constraints.txt"), "async-timeout"]
    subprocess.run([*found, f"{wheel}[metrics,store]"], check=True)
    return kept
