"""`ExperimentQueue`: the durable queue of all experiments of a farm, with their states.

Each experiment has its own file, which a change replaces as a whole. So a change costs one file,
however many experiments there are. After a crash each experiment is in its state before or after
its last change. Queries are answered from memory.

If the disk is full, a change is rejected and leaves no trace. Only events that have already
happened are kept in memory until `save` can write them.
"""

from __future__ import annotations

import bisect
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from tunemq_scheduler.api.farm_answer_types import ExperimentState as State
from tunemq_scheduler.farm.common.small_files import make_folder, rejected, write_beside
from tunemq_scheduler.farm.service.queue_entry import (
    ENTRY_VERSION,
    ID_DIGITS,
    LEGAL,
    QueueEntry,
    damaged_entry,
)
from tunemq_scheduler.storage.folders import safe_name
from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.base.errors import BugError, ConfigError, JournalError, JournalFull
from tunemq_shared.base.failpoints import failpoint
from tunemq_shared.protocol.farm_requests import ExperimentEnvironment, SubmittedCode

_SUFFIX: Final = ".json"
_NEW: Final = ".new"


class ExperimentQueue:
    """The experiments of a farm; for the one process that holds the farm's lease.

    Args:
        folder: the folder of the files; created if needed.
        now: returns the Unix time.
        ids: `QueueEntry.id` by name, for experiments that have one before they are submitted.

    Raises:
        JournalError: the folder cannot be used, or a later TuneMQ wrote a file in it.
    """

    def __init__(
        self,
        folder: Path | str,
        now: Callable[[], float] = time.time,
        ids: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._folder = Path(folder)
        self._now, self._ids = now, ids
        self._entries: dict[str, QueueEntry] = {}
        self._by_state: dict[State, dict[str, QueueEntry]] = {state: {} for state in State}
        #: The keys of waiting experiments in their order, and the name for each key.
        self._turns: list[tuple[int, int]] = []
        self._at_turn: dict[tuple[int, int], str] = {}
        #: The experiment that each request submitted.
        self._requests: dict[str, str] = {}
        #: Experiments whose newest change is not on disk, with the reason.
        self._unsaved: dict[str, str] = {}
        #: Grows with each change.
        self.changes = 0
        #: Files that could not be read, as lines for people.
        self.damaged: list[str] = []
        make_folder(self._folder)
        with self._on_disk(self._folder, "read"):
            self._read_all()
        self._number = max((entry.number for entry in self._entries.values()), default=0)

    # --- queries ----------------------------------------------------------------------------------

    def get(self, name: str) -> QueueEntry | None:
        """Return the experiment of this name."""
        return self._entries.get(name)

    def submitted_by(self, request: str) -> QueueEntry | None:
        """Return the experiment that this request submitted."""
        name = self._requests.get(request)
        return None if name is None else self._entries.get(name)

    def all(self) -> Sequence[QueueEntry]:
        """Return all experiments, in the order of submission."""
        return sorted(self._entries.values(), key=lambda entry: entry.number)

    def waiting(self) -> Sequence[QueueEntry]:
        """Return the queued experiments, the next one first."""
        return [self._entries[self._at_turn[turn]] for turn in self._turns]

    def ahead_of(self, entry: QueueEntry) -> int:
        """Return how many experiments wait before this one."""
        return bisect.bisect_left(self._turns, entry.turn)

    def in_state(self, *states: State) -> Sequence[QueueEntry]:
        """Return the experiments in one of these states."""
        return [entry for state in states for entry in self._by_state[state].values()]

    def unsaved(self, name: str) -> str:
        """Return why the disk rejected its newest change; empty if it did not."""
        return self._unsaved.get(name, "")

    # --- changes, which are durable when a method returns -----------------------------------------

    def add(
        self,
        name: str,
        *,
        owner: str,
        code: SubmittedCode,
        priority: int = 0,
        settings: ExperimentEnvironment | None = None,
        request: str = "",
    ) -> QueueEntry:
        """Queue a new experiment.

        Raises:
            ConfigError: the name is taken or invalid.
            JournalError: the disk rejects the write; nothing was added.
        """
        check_name(name)
        if name in self._entries:
            raise ConfigError(f"the experiment {name} exists already; choose another name.")
        entry = QueueEntry(
            name=name,
            id=self._ids.get(name) or self._new_id(),
            owner=owner,
            priority=priority,
            number=self._number + 1,
            submitted=self._now(),
            request=request,
            code=code,
            settings=settings or ExperimentEnvironment(),
        )
        self._change(entry)
        self._number = entry.number
        return entry

    def move(
        self,
        name: str,
        state: State,
        reason: str = "",
        *,
        retry: str = "",
        may_wait: bool = False,
    ) -> QueueEntry:
        """Change the state of an experiment.

        Args:
            name: the experiment.
            state: the new state.
            reason: why, in words.
            retry: see `QueueEntry`; for an experiment that is queued again.
            may_wait: if the disk is full, change it in memory, and let `save` write it.

        Raises:
            BugError: its current state does not allow this.
            JournalError: the disk rejects the write; the state is unchanged.
        """
        entry = self._entries[name]
        if not self.may(entry, state):
            raise BugError(f"experiment {name} cannot go from {entry.state} to {state}.")
        return self._change(entry.moved(state, self._now(), reason, retry), may_wait=may_wait)

    def save(self) -> None:
        """Write changes for which the disk had no space.

        Raises:
            JournalFull: it still lacks space for some.
            JournalError: the disk rejects the write.
        """
        for name in sorted(self._unsaved):
            self._write(self._entries[name])

    def begun(self, name: str) -> None:
        """Record that its newest run has begun, and has retried the trials to retry."""
        entry = self._entries[name]
        if entry.retry:
            self._replace(entry, retry="")

    def count(self, name: str, trials: dict[str, int], total: int | None) -> None:
        """Store the trial counts, for when its process has ended."""
        entry = self._entries[name]
        if (entry.trials, entry.total) != (trials, total):
            self._replace(entry, trials=trials, total=total)

    def explain(self, name: str, reason: str) -> QueueEntry:
        """Change the reason for an experiment's state; an equal reason is not written."""
        entry = self._entries[name]
        if entry.reason == reason:
            return entry
        return self._replace(entry, reason=reason)

    @staticmethod
    def may(entry: QueueEntry, state: State) -> bool:
        """Return whether an experiment's state and its file allow this change."""
        return state in LEGAL[entry.state] and not entry.is_damaged

    def remove(self, name: str) -> None:
        """Forget a finished experiment.

        Raises:
            BugError: it is not finished.
            JournalError: the disk rejects the removal; the experiment is still there.
        """
        entry = self._entries[name]
        if not entry.is_over:
            raise BugError(f"experiment {name} is {entry.state}, and cannot be removed.")
        failpoint("queue.before_removal")
        path = self._path(name)
        with self._on_disk(path, "removed"):
            path.unlink(missing_ok=True)
        failpoint("queue.after_removal")
        self._sync_folder()
        self._unsaved.pop(name, None)
        self._forget(entry)

    def _replace(self, entry: QueueEntry, **changes: Any) -> QueueEntry:
        return self._change(msgspec.structs.replace(entry, **changes), may_wait=True)

    def _change(self, entry: QueueEntry, *, may_wait: bool = False) -> QueueEntry:
        try:
            self._write(entry)
        except JournalFull as full:
            if not may_wait:
                raise
            self._unsaved[entry.name] = str(full)
        self._put(entry)
        return entry

    # --- memory -----------------------------------------------------------------------------------

    def _put(self, entry: QueueEntry) -> None:
        self.changes += 1
        if (before := self._entries.get(entry.name)) is not None:
            self._forget(before)
        self._entries[entry.name] = entry
        self._by_state[entry.state][entry.name] = entry
        if entry.request:
            self._requests[entry.request] = entry.name
        if entry.state is State.QUEUED:
            bisect.insort(self._turns, entry.turn)
            self._at_turn[entry.turn] = entry.name

    def _forget(self, entry: QueueEntry) -> None:
        self.changes += 1
        del self._entries[entry.name]
        del self._by_state[entry.state][entry.name]
        self._requests.pop(entry.request, None)
        if entry.state is State.QUEUED:
            del self._turns[bisect.bisect_left(self._turns, entry.turn)]
            del self._at_turn[entry.turn]

    def _new_id(self) -> str:
        taken = {entry.id for entry in self._entries.values()}
        while (made := os.urandom(3).hex()[:ID_DIGITS]) in taken:
            pass
        return made

    # --- the disk ---------------------------------------------------------------------------------

    def _read_all(self) -> None:
        for path in sorted(self._folder.iterdir()):
            if path.name.endswith(_NEW):
                path.unlink()  # left by a process that died while writing; the old file is valid
            elif path.name.endswith(_SUFFIX):
                self._read(path)

    def _read(self, path: Path) -> None:
        try:
            found = msgspec.json.decode(path.read_bytes())
            version = found["version"]
            if isinstance(version, int) and version > ENTRY_VERSION:
                raise JournalError(
                    f"{path} is of version {version}, and this TuneMQ reads {ENTRY_VERSION}; "
                    "start the scheduler with the version that wrote it."
                )
            entry = msgspec.convert(found, QueueEntry)
            if entry.name + _SUFFIX != path.name or entry.turn in self._at_turn:
                raise msgspec.ValidationError("it is the id of another experiment")
        except (*UNDECODABLE, KeyError, TypeError) as error:
            # One damaged file is no reason to stop a farm with hundreds of experiments.
            name, at = path.stem, path.stat().st_mtime
            why = (
                f"{path} is damaged ({error}), so this search cannot run. Restore that file "
                "from a backup and restart the scheduler; or forget the search and keep its "
                f"results folder: tunemq rm {name}"
            )
            self.damaged.append(f"{name}: {why}")
            if name != safe_name(name, "experiment"):
                return
            entry = damaged_entry(name, at, why)
        self._put(entry)

    def _write(self, entry: QueueEntry) -> None:
        path = self._path(entry.name)
        with self._on_disk(path, "written"):
            beside = write_beside(path, msgspec.json.format(msgspec.json.encode(entry), indent=1))
            failpoint("queue.before_rename")
            beside.replace(path)
        failpoint("queue.after_rename")
        self._sync_folder()
        self._unsaved.pop(entry.name, None)

    def _sync_folder(self) -> None:
        try:
            descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:  # never "full": the change is made and cannot be rejected
            raise JournalError(f"{self._folder} cannot be synced: {error.strerror}.") from error

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"

    @staticmethod
    @contextmanager
    def _on_disk(path: Path, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise rejected(path, what, error) from error


def check_name(name: str) -> None:
    """Check an experiment's name.

    Raises:
        ConfigError: it is invalid; suggests a valid one.
    """
    safe = safe_name(name, "experiment")
    if name != safe:
        raise ConfigError(f"the name {name!r} is invalid for an experiment; use {safe!r}.")
