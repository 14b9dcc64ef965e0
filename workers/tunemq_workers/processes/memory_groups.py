"""Control groups (cgroups) that limit the memory of trials: the kernel enforces the limit.

They are below the node's own cgroup, if the node may divide that:

    tunemq-<pid of the node>-<instance>/
        h1      a trial process and all that it starts
        node    version 2 only: the node and all else that it starts

In version 2 a cgroup that limits others must not contain processes itself, so the node moves into a
cgroup below. It does so only if its cgroup was delegated to it. If the node cannot divide its
cgroup, only `tunemq_workers.processes.tree_watch` limits memory, by polling.

Trials cannot change these cgroups if they run as another user than the node.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import socket
from contextlib import suppress
from typing import Final

from tunemq_shared.system.claimed_process import exists
from tunemq_shared.system.processes import is_readable
from tunemq_workers.processes.tree_memory import process_tree_of
from tunemq_workers.runtime.untrusted_sockets import socket_pair
from tunemq_workers.system.cgroup_limits import group_paths, read_value
from tunemq_workers.system.trial_user import own_files

_ROOT: Final = "/sys/fs/cgroup"
_ABOUT: Final = "/proc/self/cgroup"
_NODE: Final = "node"
_OF_NODES: Final = re.compile(r"tunemq-(\d+)-[0-9a-f]+")
#: Attributes that mark a cgroup as delegated to its service; which one depends on the release of
#: systemd.
_DELEGATED: Final = ("user.delegate", "trusted.delegate")
#: The most passes in which the node looks for processes that were forked during the last pass.
_ROUNDS: Final = 100
#: While a cgroup has room for it, the kernel charges memory in batches of this size.
_BATCH_BYTES: Final = 64 * mmap.PAGESIZE

_log = logging.getLogger(__name__)


class CgroupsUnavailable(Exception):
    """The node cannot limit memory by cgroups; says why."""


class MemoryCgroups:
    """One cgroup for each trial process with a memory limit.

    Used by the node's loop only, except for `held_at_kill`.

    Args:
        instance: the node's instance id, for names.
        root: the folder in which the kernel shows cgroups.
        about: the file that names this process's cgroup.
    """

    def __init__(self, instance: str, root: str = _ROOT, about: str = _ABOUT) -> None:
        self._name = f"tunemq-{os.getpid()}-{instance}"
        self._root, self._about = root, about
        self._base = self._top = ""
        self._is_v2 = self._was_tried = False
        self._folders: dict[str, str] = {}
        self._gates: dict[str, socket.socket] = {}

    def begin(self, process: str, limit: int) -> int | None:
        """Make a cgroup, and return the descriptor on which its trial process waits to begin.

        A read from it returns once the process is in its cgroup. None: there can be no cgroup.
        """
        if not self._was_tried:
            self._was_tried = True
            self._try_to_divide()
        if not self._top:
            return None
        folder = f"{self._top}/{process}"
        try:
            with own_files():
                os.mkdir(folder)
                _set_limit(folder, limit, is_v2=self._is_v2)
            self._gates[process], waiting = socket_pair()
        except OSError as problem:
            _log.warning("memory.no_group trial=%s problem=%r", process, str(problem))
            self.leave(process)
            return None
        self._folders[process] = folder
        return waiting.detach()

    def enter(self, process: str, proven: tuple[int, int] | None) -> None:
        """Move a trial process into its cgroup, if it has one, and let it begin.

        Args:
            process: its name.
            proven: its pidfd and pid; None if nothing proves that the pid is the process's. The
                forkserver, which runs user modules, reports the pid: it must never make the node
                move another process.
        """
        if (folder := self._folders.get(process)) is not None:
            try:
                self._move(folder, proven)
            except OSError as problem:  # it may have ended
                _log.warning("memory.not_entered trial=%s problem=%r", process, str(problem))
        self._open_gate(process)

    def _move(self, folder: str, proven: tuple[int, int] | None) -> None:
        if proven is None:
            raise OSError("its pid is not known for certain")
        pidfd, pid = proven
        with own_files():
            _write(f"{folder}/cgroup.procs", pid)
            if is_readable(pidfd):  # it ended: another process may have had its pid by then
                others = f"{self._top}/{_NODE}" if self._is_v2 else self._base
                _write(f"{others}/cgroup.procs", pid)

    def held_at_kill(self, process: str) -> int:
        """Return the most bytes that a cgroup held if the kernel killed it at its limit; else 0.

        It is 0, too, if another limit than this cgroup's was hit. Any thread may call this.
        """
        if (folder := self._folders.get(process)) is None:
            return 0
        try:
            if not self._is_v2:
                # Counters of failed requests miss those at the limit of memory and swap.
                kills = _numbers(f"{folder}/memory.oom_control").get("oom_kill")
                limit = int(read_value(f"{folder}/memory.limit_in_bytes"))
                held = int(read_value(f"{folder}/memory.max_usage_in_bytes"))
                return held if kills and held > limit - _BATCH_BYTES else 0
            events = _numbers(f"{folder}/memory.events")
            if not (events["oom_kill"] and events["oom"]):
                return 0
            peak = f"{folder}/memory.peak"  # since Linux 5.19
            return int(read_value(peak if os.path.exists(peak) else f"{folder}/memory.max"))
        except OSError:  # it has just been removed
            return 0

    def leave(self, process: str) -> None:
        """Remove a trial process's cgroup, if it has one; no process is in it any more."""
        self._open_gate(process)
        self._folders.pop(process, None)
        if self._top:
            self._remove_empty(self._top, {_NODE, *self._folders})

    def close(self) -> None:
        """Remove all cgroups; no trial process is left."""
        for process in {*self._folders, *self._gates}:
            self.leave(process)
        if not self._top:
            return
        with suppress(OSError), own_files():
            if self._is_v2:
                _write(f"{self._top}/cgroup.subtree_control", "-memory")
                _write(f"{self._base}/cgroup.subtree_control", "-memory")
                _move_all(f"{self._top}/{_NODE}", self._base)
                os.rmdir(f"{self._top}/{_NODE}")
            os.rmdir(self._top)
        self._top = ""

    def _open_gate(self, process: str) -> None:
        if (gate := self._gates.pop(process, None)) is not None:
            gate.close()

    def _try_to_divide(self) -> None:
        try:
            with own_files():
                self._divide()
        except (CgroupsUnavailable, OSError) as problem:
            _log.info("memory.polled reason=%s", problem)
        else:
            _log.info("memory.grouped folder=%s", self._top)

    def _divide(self) -> None:
        """Make the cgroup that contains those of trial processes.

        Raises:
            CgroupsUnavailable, OSError: it cannot be made.
        """
        base, self._is_v2 = _own_group(self._root, self._about)
        for name in os.listdir(base):
            left = _OF_NODES.fullmatch(name)
            if left and (int(left[1]) == os.getpid() or not exists(int(left[1]))):
                self._remove_empty(f"{base}/{name}", set())
                with suppress(OSError):
                    os.rmdir(f"{base}/{name}")
        top = f"{base}/{self._name}"
        os.mkdir(top)
        try:
            if self._is_v2:
                os.mkdir(f"{top}/{_NODE}")
                _move_all(base, f"{top}/{_NODE}")
                _write(f"{base}/cgroup.subtree_control", "+memory")
                _write(f"{top}/cgroup.subtree_control", "+memory")
        except (CgroupsUnavailable, OSError):
            with suppress(OSError, CgroupsUnavailable):
                _move_all(f"{top}/{_NODE}", base)
            for folder in (f"{top}/{_NODE}", top):
                with suppress(OSError):
                    os.rmdir(folder)
            raise
        self._base, self._top = base, top

    def _remove_empty(self, top: str, kept: set[str]) -> None:
        with suppress(OSError), own_files(), os.scandir(top) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and entry.name not in kept:
                    with suppress(OSError):  # tried again at the next removal
                        os.rmdir(entry.path)


def _own_group(root: str, about: str) -> tuple[str, bool]:
    """Return the folder of this process's memory cgroup, and whether that is of version 2."""
    groups = group_paths(about)
    is_v2 = "memory" not in groups
    if is_v2 and "" not in groups:
        raise CgroupsUnavailable("the kernel has no control groups for memory")
    path = groups[""] if is_v2 else groups["memory"]
    folder = (root if is_v2 else f"{root}/memory") + path.rstrip("/")
    if not os.path.isdir(folder) or os.getpid() not in _processes(folder):
        raise CgroupsUnavailable(f"the worker cannot find its control group {path}")
    if is_v2:
        _check_delegated(folder, path)
    elif read_value(f"{folder}/memory.use_hierarchy") != "1":
        raise CgroupsUnavailable(
            f"limits of the control group {path} do not hold for groups below it"
        )
    return folder, is_v2


def _check_delegated(folder: str, path: str) -> None:
    """Check that this node may divide a cgroup of version 2.

    Raises:
        CgroupsUnavailable: it may not.
    """
    if "memory" not in read_value(f"{folder}/cgroup.controllers").split():
        raise CgroupsUnavailable(f"the control group {path} has no memory controller")
    for name in _DELEGATED:
        with suppress(OSError):
            if os.getxattr(folder, name) == b"1":
                return
    if path != "/":  # a container sees its own cgroup as the root
        raise CgroupsUnavailable(f"the control group {path} is not delegated to the worker")


def _move_all(source: str, target: str) -> None:
    """Move all processes of a cgroup to another one.

    Raises:
        CgroupsUnavailable: it contains processes that are not the node's.
        OSError: the kernel does not allow it.
    """
    for _ in range(_ROUNDS):
        found = _processes(source)
        if not found:
            return
        others = found.difference(process_tree_of(os.getpid()))
        if any(os.path.exists(f"/proc/{pid}") for pid in others):
            raise CgroupsUnavailable("other programs than the worker are in its control group")
        for pid in found:
            with suppress(ProcessLookupError):  # it has just ended
                _write(f"{target}/cgroup.procs", pid)
    raise CgroupsUnavailable("the worker's control group does not get empty")


def _set_limit(folder: str, limit: int, *, is_v2: bool) -> None:
    if is_v2:
        _write(f"{folder}/memory.max", limit)
        _write(f"{folder}/memory.oom.group", 1)
        swap = ("memory.swap.max", 0)
    else:
        _write(f"{folder}/memory.limit_in_bytes", limit)
        swap = ("memory.memsw.limit_in_bytes", limit)  # memory and swap together
    with suppress(OSError):  # the kernel may not count swap
        _write(f"{folder}/{swap[0]}", swap[1])


def _processes(folder: str) -> set[int]:
    return set(map(int, read_value(f"{folder}/cgroup.procs").split()))


def _numbers(file: str) -> dict[str, int]:
    pairs = (line.split() for line in read_value(file).splitlines())
    return {name: int(number) for name, number in pairs}


def _write(file: str, value: str | int) -> None:
    with open(file, "w", encoding="ascii") as writer:
        writer.write(str(value))
