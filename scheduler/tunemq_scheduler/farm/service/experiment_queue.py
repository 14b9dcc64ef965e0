"""`ExperimentQueue`: all experiments of a farm, those that wait in their order, durably.

Each has a file of its own, which a change replaces as a whole. So a change costs one file however
many there are, and after a crash at any moment each experiment is as it was before its last change
or after it. What is asked in each turn is answered from memory.

Where the disk is full a change is refused, and nothing of it is left. Only what has happened
anyway is kept in memory, until `save` finds room.
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

from tunemq_scheduler.api.farm_answers import ExperimentState as State
from tunemq_scheduler.farm.common.small_files import make_folder, rejected, write_beside
from tunemq_scheduler.farm.service.queue_entry import ENTRY_VERSION, ID_DIGITS, LEGAL, QueueEntry
from tunemq_scheduler.storage.folders import safe_name
from tunemq_shared.base.errors import BugError, ConfigError, JournalError, JournalFull
from tunemq_shared.base.failpoints import failpoint
from tunemq_shared.base.undecodable import UNDECODABLE
from tunemq_shared.protocol.farm_requests import ExperimentEnvironment, SubmittedCode

_SUFFIX: Final = ".json"
_NEW: Final = ".new"
#: What was set aside because nobody can read it.
_DAMAGED: Final = ".damaged"


class ExperimentQueue:
    """The experiments of a farm; has one user at a time, who holds the farm's lease.

    Args:
        folder: of the files; made if need be.
        now: the Unix time.
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
        #: The keys of those that wait, in their order, and whose they are.
        self._turns: list[tuple[int, int]] = []
        self._at_turn: dict[tuple[int, int], str] = {}
        #: Which experiment came of which request.
        self._requests: dict[str, str] = {}
        #: Those of which the file lacks the newest, and why the disk did not take it.
        self._unsaved: dict[str, str] = {}
        #: Grows with each change.
        self.changes = 0
        #: What could not be read and was set aside, in lines for people.
        self.damaged: list[str] = []
        make_folder(self._folder)
        with self._on_disk(self._folder, "read"):
            self._read_all()
        self._number = max((entry.number for entry in self._entries.values()), default=0)

    # --- what there is ----------------------------------------------------------------------------

    def get(self, name: str) -> QueueEntry | None:
        """The experiment of this name."""
        return self._entries.get(name)

    def submitted_by(self, request: str) -> QueueEntry | None:
        """The experiment that this request has submitted."""
        name = self._requests.get(request)
        return None if name is None else self._entries.get(name)

    def all(self) -> Sequence[QueueEntry]:
        """All of them, as they were submitted."""
        return sorted(self._entries.values(), key=lambda entry: entry.number)

    def waiting(self) -> Sequence[QueueEntry]:
        """Those that are queued, the next one first."""
        return [self._entries[self._at_turn[turn]] for turn in self._turns]

    def ahead_of(self, entry: QueueEntry) -> int:
        """How many wait before one that waits."""
        return bisect.bisect_left(self._turns, entry.turn)

    def in_state(self, *states: State) -> Sequence[QueueEntry]:
        """Those in one of these states."""
        return [entry for state in states for entry in self._by_state[state].values()]

    def unsaved(self, name: str) -> str:
        """Why the disk did not take its newest change; empty where it did."""
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
            ConfigError: the name is taken or cannot be used.
            JournalError: the disk refuses it; nothing was added.
        """
        check_name(name)
        if name in self._entries:
            raise ConfigError(f"there is an experiment {name}; give this one another name.")
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
        """Have an experiment be in another state.

        Args:
            reason: why, in words.
            retry: see `QueueEntry`; for one that is queued again.
            may_wait: where the disk is full it is so all the same, and `save` writes it.

        Raises:
            BugError: it cannot come there from where it is.
            JournalError: the disk refuses it; it is as it was.
        """
        entry = self._entries[name]
        if not self.may(entry, state):
            raise BugError(f"experiment {name} cannot go from {entry.state} to {state}.")
        return self._change(entry.moved(state, self._now(), reason, retry), may_wait=may_wait)

    def save(self) -> None:
        """Write what the disk had no room for.

        Raises:
            JournalFull: it still has none for all of it.
            JournalError: the disk refuses it.
        """
        for name in sorted(self._unsaved):
            self._write(self._entries[name])

    def begun(self, name: str) -> None:
        """Its newest run has begun: what was to be retried is."""
        entry = self._entries[name]
        if entry.retry:
            self._replace(entry, retry="")

    def count(self, name: str, trials: dict[str, int], total: int | None) -> None:
        """Keep how many trials there are, for when its process has ended."""
        entry = self._entries[name]
        if (entry.trials, entry.total) != (trials, total):
            self._replace(entry, trials=trials, total=total)

    def explain(self, name: str, reason: str) -> QueueEntry:
        """Say anew why an experiment is in its state; nothing is written if that is known."""
        entry = self._entries[name]
        if entry.reason == reason:
            return entry
        return self._replace(entry, reason=reason)

    @staticmethod
    def may(entry: QueueEntry, state: State) -> bool:
        """Whether an experiment can come to a state from where it is."""
        return state in LEGAL[entry.state]

    def remove(self, name: str) -> None:
        """Forget an experiment that is over.

        Raises:
            BugError: it is not over.
            JournalError: the disk refuses it; it is still there.
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
                path.unlink()  # of whoever died while it wrote; the old file stands
            elif path.name.endswith(_SUFFIX):
                self._read(path)

    def _read(self, path: Path) -> None:
        try:
            found = msgspec.json.decode(path.read_bytes())
            version = found["version"]
            if isinstance(version, int) and version > ENTRY_VERSION:
                raise JournalError(
                    f"{path} is of version {version}, this TuneMQ reads {ENTRY_VERSION}; start the"
                    " scheduler with the version that wrote it."
                )
            entry = msgspec.convert(found, QueueEntry)
            if entry.name + _SUFFIX != path.name or entry.turn in self._at_turn:
                raise msgspec.ValidationError("it is that of another experiment")
        except (*UNDECODABLE, KeyError, TypeError) as error:
            # One file that the disk has damaged is no reason to stop a farm of hundreds.
            path.replace(path.with_suffix(_DAMAGED))
            self.damaged.append(
                f"{path} cannot be read ({error}); its experiment is not queued any more, the file"
                f" is kept as {path.with_suffix(_DAMAGED).name}."
            )
            return
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
        except OSError as error:  # never "full": the change is made, and may not be refused
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
    """Return if an experiment of a farm may be called so.

    Raises:
        ConfigError: it may not; says a name that it may have.
    """
    safe = safe_name(name, "experiment")
    if name != safe:
        raise ConfigError(f"an experiment cannot be called {name!r}; call it {safe!r}.")
