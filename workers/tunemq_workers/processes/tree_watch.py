"""`TreeWatch`: polls the memory and the number of processes of trials, in threads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from tunemq_shared.base.byte_sizes import show_bytes
from tunemq_shared.protocol.trial_limits import TrialLimitSpec
from tunemq_workers.processes.tree_memory import process_tree_of, tree_bytes
from tunemq_workers.runtime.reactor import do_nothing

#: Shortest and longest time between two looks at a process tree, in seconds.
_PERIODS_S: Final = (0.02, 0.5)
#: A process tree is looked at again before it could reach its limits at these rates, those of a
#: fast process.
_BYTES_PER_S: Final = 2 * 2**30
_FORKS_PER_S: Final = 2000
#: The most processor time that looks may take, as a share, per process tree.
_BUSY: Final = 0.02

_log = logging.getLogger(__name__)


class _WatchedTree(msgspec.Struct, eq=False):
    process: str
    pid: int
    limits: TrialLimitSpec
    due: float
    has_thread: bool = False
    left: threading.Event = msgspec.field(default_factory=threading.Event)


class TreeWatch:
    """Reports once for each process tree that it exceeds its limit of memory or processes.

    Each tree has its own thread: the kernel may block reads about a process, and a trial can cause
    that (with a page of memory from a file system that does not answer).

    Args:
        post: makes the node's loop call a function.
        held_at_kill: returns the peak bytes of a process tree that the kernel killed for its limit;
            else 0.
    """

    def __init__(
        self,
        post: Callable[[Callable[[], object]], None],
        held_at_kill: Callable[[str], int],
    ) -> None:
        #: Called by the loop with the trial process's name, and kind and error of the failure.
        self.on_exceeded: Callable[[str, str, str], object] = do_nothing
        self._post, self._held_at_kill = post, held_at_kill
        self._process_trees: dict[str, _WatchedTree] = {}
        self._lock = threading.Lock()

    def watch(self, process: str, pid: int, limits: TrialLimitSpec) -> None:
        """Start to look at the process tree of the trial process ``pid``."""
        tree = _WatchedTree(process, pid, limits, time.monotonic() + _PERIODS_S[0])
        with self._lock:
            self._process_trees[process] = tree
            without_thread = [one for one in self._process_trees.values() if not one.has_thread]
        for tree in without_thread:
            thread = threading.Thread(
                target=self._run, args=(tree,), name="tree watch", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as problem:  # a trial may have used up a container's processes
                _log.warning("limits.no_thread problem=%r", str(problem))  # the next trial retries
                return
            tree.has_thread = True

    def leave(self, process: str) -> None:
        """Stop looking at a process tree; does nothing if it is not watched."""
        with self._lock:
            tree = self._process_trees.pop(process, None)
        if tree is not None:
            tree.left.set()

    def late_look(self, process: str) -> float | None:
        """Return when a look that has not ended was due; None if none is late."""
        with self._lock:
            tree = self._process_trees.get(process)
        is_late = tree is not None and tree.has_thread and tree.due < time.monotonic()
        return tree.due if tree is not None and is_late else None

    def why_killed(self, process: str, limits: TrialLimitSpec) -> str:
        """Return the error of a trial with a process that the kernel killed at its limit; else "".

        Any thread may call this, also for a process tree that is not watched.
        """
        held = self._held_at_kill(process) if limits.memory else 0
        return _memory_error(f"needed more than {show_bytes(held)}", limits) if held else ""

    def _run(self, tree: _WatchedTree) -> None:
        while not tree.left.wait(max(0.0, tree.due - time.monotonic())):
            self._look(tree)

    def _look(self, tree: _WatchedTree) -> None:
        began, limits = time.monotonic(), tree.limits
        could_last_s = _PERIODS_S[1]
        members = process_tree_of(tree.pid)
        if limits.processes:
            if len(members) > limits.processes:
                error = (
                    f"the trial had {len(members)} processes, and its limit is {limits.processes}"
                )
                self._exceeded(tree, "processes", f"{error} (TrialLimits(processes=...)).")
                return
            could_last_s = min(could_last_s, (limits.processes - len(members)) / _FORKS_PER_S)
        if limits.memory:
            if error := self.why_killed(tree.process, limits):
                self._exceeded(tree, "memory", error)
                return
            used = tree_bytes(members, limits.memory)
            if used > limits.memory:
                self._exceeded(tree, "memory", _memory_error(f"held {show_bytes(used)}", limits))
                return
            could_last_s = min(could_last_s, (limits.memory - used) / _BYTES_PER_S)
        now = time.monotonic()
        tree.due = now + max(_PERIODS_S[0], could_last_s, (now - began) / _BUSY)

    def _exceeded(self, tree: _WatchedTree, kind: str, error: str) -> None:
        tree.left.set()
        with self._lock:
            if self._process_trees.get(tree.process) is tree:
                del self._process_trees[tree.process]
                self._post(lambda: self.on_exceeded(tree.process, kind, error))


def _memory_error(what: str, limits: TrialLimitSpec) -> str:
    limit = show_bytes(limits.memory)
    return (
        f"the trial's processes {what} of memory, and its limit is {limit}"
        " (TrialLimits(memory=...))."
    )
