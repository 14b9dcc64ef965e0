"""`Journal`: the open journal of one experiment, to which turns are appended.

A turn is one frame, so it is written completely or not at all, with one write and one fdatasync.
When many turns have accumulated and a snapshot is given, a new segment begins:

    1. append summaries of ended trials     to `history` and to its copy
    2. write the snapshot                   under another name
    3. create the next segment, empty
    4. rename the snapshot                  from here on it counts
    5. delete what only older snapshots than the last two needed

The effects of the turns that a snapshot replaces must be on disk before: see
`tunemq_scheduler.experiment.open_experiment.OpenExperiment.take_snapshot`.

A crash between any two of these steps loses nothing: before 4 the old snapshot and all turns exist,
after it the new one. The previous snapshot and its turns stay until the next, so that a damaged
snapshot loses nothing either (``tunemq journal salvage``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

from tunemq_scheduler.journal import ended_trials, journal_files
from tunemq_scheduler.journal.journal_files import snapshot_file, turns_file
from tunemq_scheduler.journal.journal_frames import pack
from tunemq_scheduler.journal.journal_headers import (
    JournalHeader,
    JournalSnapshot,
    SegmentHeader,
    SnapshotHeader,
)
from tunemq_scheduler.journal.journal_lock import JournalLock
from tunemq_scheduler.journal.journal_reader import RecoveredJournal, read_header, recover
from tunemq_shared.base.errors import JournalError, JournalFull
from tunemq_shared.base.failpoints import failpoint
from tunemq_shared.protocol.messages import JournalRecord, encode

#: The bytes of turns after which a snapshot is due; replaying them takes about a second.
SEGMENT_BYTES: Final = 16 * 2**20
#: The journal rejects turns while the disk has fewer free bytes, because the effects of a turn are
#: written, too, to files that must not lack what the journal has.
RESERVE_BYTES: Final = 2**18


class JournalPosition(NamedTuple):
    """How far a journal is durable.

    Attributes:
        snapshot: the number of the newest snapshot; 0 if there is none.
        segment, offset: its end.
        turn: the number of turns.
        history: how many bytes of the history belong to the snapshot.
    """

    snapshot: int
    segment: int
    offset: int
    turn: int
    history: int


class Journal:
    """The writer of a journal; made by `create` and `resume`.

    Attributes:
        folder: the folder with its files.
        header: the experiment's identity and rules.
        position: how far it is durable; safe to read in any thread.
        grown: called with the position after each turn; set by
            `tunemq_scheduler.journal.journal_copy`.
        guard: called before each write; raises if this process may not write any more.
    """

    def __init__(
        self,
        folder: Path,
        header: JournalHeader,
        lock: JournalLock,
        found: RecoveredJournal | None,
    ) -> None:
        self.folder = folder
        self.header = header
        self.grown: Callable[[JournalPosition], None] = lambda _position: None
        self.guard: Callable[[], None] = lambda: None
        self._lock = lock
        self._descriptor = -1
        #: Why no more turns can be appended; empty if they can.
        self._broken = ""
        #: The bytes of turns in the segments between the snapshot and the last segment.
        self._earlier = 0
        self._wait_until = 0
        self._extent = ended_trials.NOTHING
        if found is None:
            self.position = JournalPosition(0, 1, 0, 0, 0)
            with self._refusals():
                size = self._make_segment(1, 0)
                self._descriptor = os.open(turns_file(folder, 1), os.O_WRONLY | os.O_CLOEXEC)
            self.position = JournalPosition(0, 1, size, 0, 0)
        else:
            self._continue(found)

    @classmethod
    def create(cls, folder: Path, header: JournalHeader) -> Self:
        """Create the journal of a new experiment.

        Args:
            folder: its own folder, created if necessary.
            header: the experiment's identity and rules.

        Raises:
            JournalError: it already exists, or cannot be written.
            JournalLocked: another process has it open.
        """
        try:
            folder.mkdir(exist_ok=True)
            journal_files.sync_folder(folder.parent)
        except OSError as error:
            raise JournalError(
                f"the journal {folder} cannot be written: {error.strerror}."
            ) from error
        lock = JournalLock(folder, header.experiment)
        try:
            kinds = (journal_files.TURNS_SUFFIX, journal_files.SNAPSHOT_SUFFIX)
            if any(journal_files.numbers(folder, kind) for kind in kinds):
                raise JournalError(f"the journal {folder} exists already.")
            return cls(folder, header, lock, None)
        except BaseException:  # passed on to the caller
            lock.close()
            raise

    @classmethod
    def resume(cls, folder: Path) -> tuple[Self, RecoveredJournal]:
        """Open an existing journal; an incomplete turn at its end is cut off.

        Raises:
            JournalError: there is none, it cannot be read or written, or another version wrote it.
            JournalCorrupt: it is damaged; says where, and what to do.
            JournalLocked: another process has it open; says which.
        """
        lock = JournalLock(folder, read_header(folder).experiment)
        try:
            found = recover(folder)
            journal = cls(folder, found.header, lock, found)
        except BaseException:
            lock.close()
            raise
        return journal, found

    @property
    def turn(self) -> int:
        """The number of durable turns."""
        return self.position.turn

    @property
    def wants_snapshot(self) -> bool:
        """Whether enough turns follow the last snapshot for another one."""
        return self._earlier + self.position.offset >= max(SEGMENT_BYTES, self._wait_until)

    def append(self, journal_records: Sequence[JournalRecord]) -> None:
        """Write one turn; once this returns, it survives the death of the process or the machine.

        Raises:
            JournalFull: there is no space; nothing of the turn is written, and it may be retried.
            JournalError: the disk rejected it. No command of the turn may be executed then.
        """
        self.guard()
        if (free := self._free_bytes()) < RESERVE_BYTES:
            path = turns_file(self.folder, self.position.segment)
            raise JournalFull(f"the disk has no space for {path} ({free} bytes are free).")
        self._check_segment()
        self._append(encode(journal_records))
        self.grown(self.position)

    def snapshot(self, snapshot: JournalSnapshot, finished: Iterable[tuple[str, bytes]]) -> bool:
        """Begin a new segment after a snapshot of the state after the last turn.

        Args:
            snapshot: the state.
            finished: summaries of ended trials that are new or changed since the last snapshot, in
                the order in which the trials ended; an empty one marks a trial that runs again.

        Returns:
            Whether it was taken. It is not if the disk has no space: the journal continues
            unchanged, and asks for the next one after some more turns.

        Raises:
            JournalError: the disk rejected it.
        """
        self.guard()
        before = self.position, self._extent
        try:
            with self._refusals():
                self._rotate(snapshot, finished)
        except JournalFull:
            self.position, self._extent = before
            self._wait_until = self._earlier + self.position.offset + SEGMENT_BYTES // 2
            return False
        self.grown(self.position)
        return True

    def close(self) -> None:
        """Close the journal and release its lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    # --- turns ------------------------------------------------------------------------------------

    def _append(self, payload: bytes) -> None:
        at = self.position
        frame = pack(at.turn + 1, payload)
        with self._refusals(len(frame)):
            failpoint("journal.before_append")
            journal_files.write_at(self._descriptor, frame, at.offset)
            os.fdatasync(self._descriptor)
            failpoint("journal.after_append")
        self.position = at._replace(offset=at.offset + len(frame), turn=at.turn + 1)

    def _check_segment(self) -> None:
        """Check that the open file is the one in the folder.

        The search's process runs users' code, which may close a descriptor that is not its own.
        """
        path = turns_file(self.folder, self.position.segment)
        try:
            is_same = os.path.samestat(os.fstat(self._descriptor), os.stat(path))
        except OSError:
            is_same = False
        if not is_same:
            self._descriptor = -1  # it may be another file's now, which stays open
            self._broken = (
                f"{path} cannot be written: another program replaced or removed it, or code in the"
                " search's process closed it."
            )
            raise JournalError(self._broken)

    def _free_bytes(self) -> int:
        try:
            return journal_files.free_bytes(self.folder)
        except OSError as error:
            gone = isinstance(error, FileNotFoundError)
            why = (
                "another program removed or moved it while its search ran"
                if gone
                else error.strerror
            )
            raise JournalError(f"the journal {self.folder} cannot be written: {why}.") from error

    @contextmanager
    def _refusals(self, size: int | None = None) -> Iterator[None]:
        """Convert errors of the disk to JournalError; ``size`` is the number of bytes to write."""
        if self._broken:
            raise JournalError(self._broken)
        try:
            yield
        except OSError as error:
            what = f"{size} bytes" if size is not None else "a new segment"
            path = turns_file(self.folder, self.position.segment)
            message = f"{what} could not be written to {path}: {error.strerror}"
            if not (journal_files.is_full(error) and self._undone()):
                # The state on disk is unknown, so nothing may be written after it.
                self._broken = f"{message}."
                raise JournalError(self._broken) from error
            free = journal_files.free_bytes(self.folder)
            raise JournalFull(f"{message} ({free} bytes are free).") from error

    def _undone(self) -> bool:
        """Restore the files' previous state, as far as readers see it; return whether it worked."""
        try:
            journal_files.remove_parts(self.folder)
            for name in (snapshot_file, turns_file):  # in this order: a snapshot needs its segment
                name(self.folder, self.position.segment + 1).unlink(missing_ok=True)
            ended_trials.cut_history(self.folder, self._extent)
            if self._descriptor < 0:
                return False
            os.ftruncate(self._descriptor, self.position.offset)
            os.fdatasync(self._descriptor)
        except OSError:  # the caller reports the first error
            return False
        return True

    # --- segments ---------------------------------------------------------------------------------

    def _continue(self, found: RecoveredJournal) -> None:
        last = found.segments[-1]
        with self._refusals():
            journal_files.remove_parts(self.folder)
            self._descriptor = os.open(last.path, os.O_WRONLY | os.O_CLOEXEC)
            if last.torn:
                os.ftruncate(self._descriptor, last.end)
                os.fsync(self._descriptor)
        self._extent = found.history
        self._earlier = sum(segment.end for segment in found.segments[:-1])
        snapshot = found.segments[0].number if found.snapshot is not None else 0
        self.position = JournalPosition(
            snapshot, last.number, last.end, found.turn, found.history.size
        )

    def _rotate(self, snapshot: JournalSnapshot, finished: Iterable[tuple[str, bytes]]) -> None:
        at, number = self.position, self.position.segment + 1
        failpoint("journal.before_history")
        extent = ended_trials.append_history(
            self.folder, self._extent, finished, self.header.experiment_id
        )
        failpoint("journal.after_history")
        about = SnapshotHeader(
            experiment_id=self.header.experiment_id,
            segment=number,
            turns=at.turn,
            history_bytes=extent.size,
            history_records=extent.records,
        )
        path = snapshot_file(self.folder, number)
        content = pack(0, encode(about)) + pack(1, encode(snapshot))
        failpoint("journal.before_snapshot")
        part = journal_files.write_part(path, content)
        failpoint("journal.after_snapshot")
        size = self._make_segment(number, at.turn)
        descriptor = os.open(turns_file(self.folder, number), os.O_WRONLY | os.O_CLOEXEC)
        try:
            failpoint("journal.before_snapshot_rename")
            journal_files.put_in_place(part, path)
            failpoint("journal.after_snapshot_rename")
        except BaseException:
            os.close(descriptor)
            raise
        os.close(self._descriptor)
        self._descriptor, self._extent = descriptor, extent
        self._earlier = self._wait_until = 0
        self.position = JournalPosition(number, number, size, at.turn, extent.size)
        self._remove_old()

    def _make_segment(self, number: int, turns: int) -> int:
        """Create an empty segment; return its size in bytes."""
        header = SegmentHeader(**self.header.fields(), segment=number, turns_before=turns)
        content = pack(turns, encode(header))
        path = turns_file(self.folder, number)
        failpoint("journal.before_segment")
        part = journal_files.write_part(path, content)
        journal_files.put_in_place(part, path)
        failpoint("journal.after_segment")
        return len(content)

    def _remove_old(self) -> None:
        """Delete what neither the last snapshot nor the one before it needs."""
        snapshots = journal_files.numbers(self.folder, journal_files.SNAPSHOT_SUFFIX)
        needed = snapshots[-2] if len(snapshots) > 1 else 0
        segments = journal_files.numbers(self.folder, journal_files.TURNS_SUFFIX)
        failpoint("journal.before_removal")
        with contextlib.suppress(OSError):  # harmless leftovers, which the next snapshot removes
            for number in [one for one in snapshots if one < needed]:
                snapshot_file(self.folder, number).unlink()
            for number in [one for one in segments if one < needed]:
                turns_file(self.folder, number).unlink()
        failpoint("journal.after_removal")
