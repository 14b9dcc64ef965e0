"""`Journal`: the open journal of one experiment, to which turns are appended.

A turn is one frame, so it is there as a whole or not at all, and costs one write and one fdatasync.
When the tail has grown long and a snapshot is given, a new segment begins:

    1. summaries of trials that are over    behind the end of `history`, and of its copy
    2. the snapshot                         under another name
    3. the next segment, still empty
    4. the snapshot gets its name           from here on it counts
    5. what the snapshot before the last one needed is removed

What followed from turns that are let go of is on the disk before: see
`tunemq_scheduler.experiment.open_experiment.OpenExperiment.take_snapshot`.

A crash between any two of these loses nothing: until 4 the old snapshot and all turns are there,
from 4 on the new one is. The last generation is kept until the next, so that a snapshot that turns
out to be damaged costs nothing either (``tunemq journal salvage``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

from tunemq_scheduler.journal import journal_layout, trial_history
from tunemq_scheduler.journal.journal_contents import (
    JournalHeader,
    JournalSnapshot,
    SegmentHeader,
    SnapshotHeader,
)
from tunemq_scheduler.journal.journal_frames import pack
from tunemq_scheduler.journal.journal_layout import snapshot_file, turns_file
from tunemq_scheduler.journal.journal_lock import JournalLock
from tunemq_scheduler.journal.journal_reader import RecoveredJournal, read_header, recover
from tunemq_shared.base.errors import JournalError, JournalFull
from tunemq_shared.base.failpoints import failpoint
from tunemq_shared.protocol.messages import JournalRecord, encode

#: So many bytes of turns behind the last snapshot are replayed within about a second.
SEGMENT_BYTES: Final = 16 * 2**20
#: A turn is refused while the disk has less room than this: what follows from a turn is written,
#: too, into files of which none may lack what the journal has.
RESERVE_BYTES: Final = 2**18


class JournalPosition(NamedTuple):
    """How far a journal is durable.

    Attributes:
        snapshot: the number of the newest; 0 where there is none.
        segment, offset: where it ends.
        turn: how many turns there are.
        history: how much of the history belongs to the snapshot, in bytes.
    """

    snapshot: int
    segment: int
    offset: int
    turn: int
    history: int


class Journal:
    """One writer; made by `create` and `resume`.

    Attributes:
        folder: in which its files are.
        header: whose it is.
        position: how far it is durable; any thread may look.
        grown: called after each turn with that; `tunemq_scheduler.journal.journal_copy` sets it.
        guard: called before anything is written; raises where this process may not any more.
    """

    def __init__(
        self,
        folder: Path,
        header: JournalHeader,
        lock: JournalLock,
        found: RecoveredJournal | None,
        *,
        sync: bool,
        segment_bytes: int | None,
    ) -> None:
        self.folder = folder
        self.header = header
        self.grown: Callable[[JournalPosition], None] = lambda _position: None
        self.guard: Callable[[], None] = lambda: None
        self._lock = lock
        self._sync = sync
        self._segment_bytes = SEGMENT_BYTES if segment_bytes is None else segment_bytes
        self._descriptor = -1
        #: Why nothing can be appended any more.
        self._broken = ""
        #: Bytes of turns in the segments between the snapshot and the last segment.
        self._earlier = 0
        self._wait_until = 0
        self._extent = trial_history.NOTHING
        if found is None:
            self.position = JournalPosition(0, 1, 0, 0, 0)
            with self._refusals():
                size = self._make_segment(1, 0)
                self._descriptor = os.open(turns_file(folder, 1), os.O_WRONLY | os.O_CLOEXEC)
            self.position = JournalPosition(0, 1, size, 0, 0)
        else:
            self._go_on(found)

    @classmethod
    def create(
        cls,
        folder: Path,
        header: JournalHeader,
        *,
        sync: bool = True,
        segment_bytes: int | None = None,
    ) -> Self:
        """Begin the journal of a new experiment.

        Args:
            folder: its own, made if need be.
            sync: whether `append` waits until the disk has the turn; simulations may do without.
            segment_bytes: so many bytes of turns call for a snapshot; None: `SEGMENT_BYTES`.

        Raises:
            JournalError: there is one already, or it cannot be written.
            JournalLocked: another process is at it.
        """
        try:
            folder.mkdir(exist_ok=True)
            if sync:
                journal_layout.sync_folder(folder.parent)
        except OSError as error:
            raise JournalError(
                f"the journal {folder} cannot be written: {error.strerror}."
            ) from error
        lock = JournalLock(folder, header.experiment)
        try:
            kinds = (journal_layout.TURNS_SUFFIX, journal_layout.SNAPSHOT_SUFFIX)
            if any(journal_layout.numbers(folder, kind) for kind in kinds):
                raise JournalError(f"the journal {folder} cannot be written: there is one already.")
            return cls(folder, header, lock, None, sync=sync, segment_bytes=segment_bytes)
        except BaseException:  # passed on to whoever begins the journal
            lock.close()
            raise

    @classmethod
    def resume(
        cls, folder: Path, *, sync: bool = True, segment_bytes: int | None = None
    ) -> tuple[Self, RecoveredJournal]:
        """Go on with a journal; a turn at its end that is not whole is cut off.

        Raises:
            JournalError: there is none, it cannot be read or written, or another version wrote it.
            JournalCorrupt: it is damaged; says where, and what can be done.
            JournalLocked: another process has it open; says which.
        """
        lock = JournalLock(folder, read_header(folder).experiment)
        try:
            found = recover(folder)
            journal = cls(folder, found.header, lock, found, sync=sync, segment_bytes=segment_bytes)
        except BaseException:
            lock.close()
            raise
        return journal, found

    @property
    def turn(self) -> int:
        """How many turns are durable."""
        return self.position.turn

    @property
    def wants_snapshot(self) -> bool:
        """Whether the turns behind the last snapshot are so many that it is time for another."""
        return self._earlier + self.position.offset >= max(self._segment_bytes, self._wait_until)

    def append(self, journal_records: Sequence[JournalRecord]) -> None:
        """Write one turn; when this returns, it survives the death of the process and the machine.

        Raises:
            JournalFull: there is no room; nothing of the turn is there, and it may be tried again.
            JournalError: the disk refuses it. Nothing of the turn may be acted upon then.
        """
        self.guard()
        if self._sync and (free := self._free_bytes()) < RESERVE_BYTES:
            path = turns_file(self.folder, self.position.segment)
            raise JournalFull(f"there is no room left for {path} ({free} bytes are free).")
        self._append(encode(journal_records))
        self.grown(self.position)

    def snapshot(self, snapshot: JournalSnapshot, finished: Iterable[tuple[str, bytes]]) -> bool:
        """Begin a new segment behind a snapshot of the state after the last turn.

        Args:
            finished: summaries of trials that are over, where they are new or have changed since
                the last snapshot, in the order in which the trials came to be over; an empty one
                says that a trial is not over any more.

        Returns:
            Whether it was taken. Where the disk has no room it is not: the journal goes on as it
            was, and wants the next one after some more turns.

        Raises:
            JournalError: the disk refuses it.
        """
        self.guard()
        before = self.position, self._extent
        try:
            with self._refusals():
                self._rotate(snapshot, finished)
        except JournalFull:
            self.position, self._extent = before
            self._wait_until = self._earlier + self.position.offset + self._segment_bytes // 2
            return False
        self.grown(self.position)
        return True

    def close(self) -> None:
        """Close it; another process may open it."""
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
            journal_layout.write_at(self._descriptor, frame, at.offset)
            if self._sync:
                os.fdatasync(self._descriptor)
            failpoint("journal.after_append")
        self.position = at._replace(offset=at.offset + len(frame), turn=at.turn + 1)

    def _free_bytes(self) -> int:
        try:
            return journal_layout.free_bytes(self.folder)
        except OSError as error:
            gone = isinstance(error, FileNotFoundError)
            why = "somebody removed or moved it while its search ran" if gone else error.strerror
            raise JournalError(f"the journal {self.folder} cannot be written: {why}.") from error

    @contextmanager
    def _refusals(self, size: int | None = None) -> Iterator[None]:
        """What the disk refuses becomes a JournalError; ``size`` bytes were to be written."""
        if self._broken:
            raise JournalError(self._broken)
        try:
            yield
        except OSError as error:
            what = f"{size} bytes" if size is not None else "a new segment"
            path = turns_file(self.folder, self.position.segment)
            message = f"{what} could not be written to {path}: {error.strerror}"
            if not (journal_layout.is_full(error) and self._undone()):
                # What the disk has of it is not known, so nothing may be written behind it.
                self._broken = f"{message}."
                raise JournalError(self._broken) from error
            free = journal_layout.free_bytes(self.folder)
            raise JournalFull(f"{message} ({free} bytes are free).") from error

    def _undone(self) -> bool:
        """Bring the files back to what they were before, as far as anybody reads them."""
        try:
            journal_layout.remove_parts(self.folder)
            for name in (snapshot_file, turns_file):  # in this order: a snapshot needs its segment
                name(self.folder, self.position.segment + 1).unlink(missing_ok=True)
            trial_history.cut_history(self.folder, self._extent)
            if self._descriptor < 0:
                return False
            os.ftruncate(self._descriptor, self.position.offset)
            if self._sync:
                os.fdatasync(self._descriptor)
        except OSError:  # whoever asked raises an error that says what was refused first
            return False
        return True

    # --- segments ---------------------------------------------------------------------------------

    def _go_on(self, found: RecoveredJournal) -> None:
        last = found.segments[-1]
        with self._refusals():
            journal_layout.remove_parts(self.folder)
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
        extent = trial_history.append_history(
            self.folder, self._extent, finished, self.header.experiment_id, sync=self._sync
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
        part = journal_layout.write_part(path, content, sync=self._sync)
        failpoint("journal.after_snapshot")
        size = self._make_segment(number, at.turn)
        descriptor = os.open(turns_file(self.folder, number), os.O_WRONLY | os.O_CLOEXEC)
        try:
            failpoint("journal.before_snapshot_rename")
            journal_layout.put_in_place(part, path, sync=self._sync)
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
        """Make a segment that holds no turn; returns how long it is."""
        header = SegmentHeader(**self.header.fields(), segment=number, turns_before=turns)
        content = pack(turns, encode(header))
        path = turns_file(self.folder, number)
        failpoint("journal.before_segment")
        part = journal_layout.write_part(path, content, sync=self._sync)
        journal_layout.put_in_place(part, path, sync=self._sync)
        failpoint("journal.after_segment")
        return len(content)

    def _remove_old(self) -> None:
        """Remove what neither the last snapshot needs nor the one before it."""
        snapshots = journal_layout.numbers(self.folder, journal_layout.SNAPSHOT_SUFFIX)
        needed = snapshots[-2] if len(snapshots) > 1 else 0
        segments = journal_layout.numbers(self.folder, journal_layout.TURNS_SUFFIX)
        failpoint("journal.before_removal")
        with contextlib.suppress(OSError):  # they are in nobody's way, and the next one tries again
            for number in [one for one in snapshots if one < needed]:
                snapshot_file(self.folder, number).unlink()
            for number in [one for one in segments if one < needed]:
                turns_file(self.folder, number).unlink()
        failpoint("journal.after_removal")
