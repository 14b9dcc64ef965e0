"""Fetches the copy of a journal from an object store; see `journal_copy`."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from tunemq_scheduler.journal import journal_files
from tunemq_scheduler.journal.copy_layout import (
    READY,
    TUNER,
    CopiedObject,
    gaps,
    in_order,
    opened,
    parse_key,
)
from tunemq_scheduler.journal.damage_check import ReplayJournal, believe
from tunemq_scheduler.journal.journal_files import FILE_NAME, HISTORY, snapshot_file, turns_file
from tunemq_scheduler.journal.journal_frames import JournalFrames
from tunemq_scheduler.journal.journal_reader import RecoveredJournal, recover
from tunemq_scheduler.journal.salvage import SalvageResult, salvage
from tunemq_shared.base.errors import JournalCorrupt, JournalError
from tunemq_shared.base.retrying import CancelToken, StoreUnavailable, retried
from tunemq_shared.objects.object_store import NoSuchObject, ObjectStore
from tunemq_shared.signing.message_signing import MessageSigner

#: The most attempts: an active scheduler may remove objects while they are fetched.
_TRIES: Final = 10
#: Seconds for listing a copy.
_LIST_S: Final = 600.0

#: The most bytes of `READY`: an experiment's id after its signature's header.
_MOST_READY: Final = 1024
#: The pieces of each file of one copy, and the size of each object in bytes.
_Files = dict[str, dict[CopiedObject, int]]


class _Damaged(JournalError):
    """A piece was not listed; the scheduler may just have merged it into a longer one."""


def fetch_journal(
    objects: ObjectStore,
    folder: Path,
    message_signer: MessageSigner,
    *,
    replay: ReplayJournal = believe,
    timeout_s: float = 600.0,
) -> RecoveredJournal:
    """Fetch the copy into ``folder``, which is created, or must be empty.

    If the store lost parts of the copy, the result is what `salvage` makes of the rest. An object
    that the scheduler did not sign never counts as lost: it is an error.

    The copy's file `TUNER` is placed in ``folder``, too.

    Args:
        objects: the experiment's store.
        folder: the target.
        message_signer: verifies this search's journals; without keys the copy's origin is not
            checked.
        replay: see `salvage`.
        timeout_s: the most seconds for the whole fetch.

    Returns:
        The journal's contents; ``turn`` is the last turn in the copy, ``lost`` says what it lacked.

    Raises:
        NoSuchObject: there is no copy.
        JournalError: it cannot be used, or the scheduler did not sign it; or the folder is not
            empty, or cannot be written.
        StoreError: the store does not answer, or rejects the request.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise JournalError(f"{folder} is not empty; name a folder for the copy of the journal.")
    cancel = CancelToken(timeout_s)
    damage = ""
    for left in reversed(range(_TRIES)):
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as scratch:
            path = Path(scratch, FILE_NAME)
            try:
                lost = _fetched(objects, path, message_signer, cancel, replay, damage)
                return replace(_moved(path, folder), lost=lost)
            except NoSuchObject:
                if not left:
                    raise
            except _Damaged as error:
                damage = str(error)
    raise JournalError(
        f"the copy of a journal changes with each look at it, and {damage}: a scheduler may still "
        "write it; try again later."
    )


def copied_id(objects: ObjectStore, message_signer: MessageSigner) -> str:
    """Return the id of the experiment whose journal's copy this is.

    Raises:
        NoSuchObject: there is no copy.
        JournalError: the scheduler did not sign it.
        StoreError: the store does not answer, or rejects the request.
    """
    return _newest(objects, message_signer, CancelToken(_LIST_S)).experiment_id()


def has_others(objects: ObjectStore, folder: Path, message_signer: MessageSigner) -> bool:
    """Whether the copy has turns of another scheduler that the journal in ``folder`` lacks.

    An unusable copy has none; that of another experiment has only such.

    Raises:
        JournalError: the journal in the folder cannot be read.
        StoreError: the store does not answer, or rejects the request.
    """
    ours = recover(folder)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as scratch:
        copied = Path(scratch, FILE_NAME)
        try:
            theirs = fetch_journal(objects, copied, message_signer)
        except (NoSuchObject, JournalError):
            return False
        if theirs.header.experiment_id != ours.header.experiment_id:
            return True
        here, there = _turn(folder, theirs.turn), _turn(copied, theirs.turn)
        # A snapshot replaced the turn: a copy that is not longer follows its own journal.
        is_same = here is None or there is None or here == there
    return theirs.turn > ours.turn or not is_same


def is_copy_ahead(objects: ObjectStore, folder: Path, message_signer: MessageSigner) -> bool:
    """Whether the copy has turns that the journal in ``folder`` lacks; quick if it has none.

    A copy follows its journal, so this is true only of a folder that was restored from a backup,
    shortened by its disk, or repaired by `tunemq journal salvage` without the damaged turns.

    Raises:
        JournalError: the journal in the folder cannot be read.
        StoreError: the store does not answer, or rejects the request.
    """
    openings = _openings(objects, CancelToken(_LIST_S))
    ready = [number for number, files in openings.items() if READY in files]
    files = openings[max(ready)] if ready else {}
    copied = max(filter(_is_turns, files), key=_segment, default="")
    local = journal_files.numbers(folder, journal_files.TURNS_SUFFIX)
    if not copied or _segment(copied) < max(local, default=0):
        return False
    size = max(piece.end for piece in files[copied])
    path = folder / copied
    is_longer = not path.exists() or path.stat().st_size < size
    return is_longer and has_others(objects, folder, message_signer)


def _segment(turns: str) -> int:
    return int(turns.removesuffix(journal_files.TURNS_SUFFIX))


def _is_turns(name: str) -> bool:
    return name.endswith(journal_files.TURNS_SUFFIX)


def _fetched(
    objects: ObjectStore,
    scratch: Path,
    message_signer: MessageSigner,
    cancel: CancelToken,
    replay: ReplayJournal,
    damage: str,
) -> str:
    """Fetch the copy to ``scratch``; return what it lacked.

    Args:
        damage: what the previous attempt lacked; if this one lacks the same, it is lost.
    """
    copy = _newest(objects, message_signer, cancel)
    scratch.mkdir()
    return copy.bring(scratch, replay, damage)


def _newest(objects: ObjectStore, message_signer: MessageSigner, cancel: CancelToken) -> _Copy:
    openings = _openings(objects, cancel)
    ready = [number for number, files in openings.items() if READY in files]
    if not ready:
        kind = "signed copy" if message_signer.is_signed else "copy"
        raise NoSuchObject(f"there is no {kind} of a journal at {objects.address}.")
    return _Copy(objects, openings[max(ready)], message_signer, cancel)


def _moved(scratch: Path, folder: Path) -> RecoveredJournal:
    recover(scratch)  # before anything is moved
    folder.rmdir()
    shutil.move(scratch, folder)
    for path in folder.iterdir():
        _sync(path)
    journal_files.sync_folder(folder)
    journal_files.sync_folder(folder.parent)
    return recover(folder)


def _turn(folder: Path, number: int) -> bytes | None:
    """Return a turn in encoded form, from the last present segment that has it, or None."""
    for segment in reversed(journal_files.numbers(folder, journal_files.TURNS_SUFFIX)):
        frames = iter(JournalFrames(turns_file(folder, segment)))
        next(frames, None)
        for frame in frames:
            if frame.number == number:
                return frame.payload
    return None


def _openings(objects: ObjectStore, cancel: CancelToken) -> dict[int, _Files]:
    """Return the objects of all copies, by opening."""
    openings: dict[int, _Files] = {}
    for one in retried(lambda: list(objects.list(f"{FILE_NAME}/")), cancel):
        if (copied := parse_key(one.key)) is not None:
            openings.setdefault(copied.opening, {}).setdefault(copied.file, {})[copied] = one.size
    return openings


@dataclass(eq=False)
class _Copy:
    """One copy of a journal in the store.

    Attributes:
        objects: the experiment's store.
        files: the copy's objects.
        message_signer: verifies the objects.
        cancel: cancels the reads.
    """

    objects: ObjectStore
    files: _Files
    message_signer: MessageSigner
    cancel: CancelToken

    def __post_init__(self) -> None:
        """Choose the pieces of each file."""
        self._experiment_id = ""
        self._pieces = {
            name: in_order(one for one, size in found.items() if one.is_whole(size))
            for name, found in self.files.items()
            if name != READY
        }

    def experiment_id(self) -> str:
        """Read the experiment's id, which the signatures of all other objects cover."""
        (ready,) = self.files[READY]
        self._experiment_id = self._body(ready).decode(errors="replace")
        return self._experiment_id

    def bring(self, folder: Path, replay: ReplayJournal, damage: str) -> str:
        """Write the needed files into the folder; return which parts are lost.

        Args:
            folder: the target.
            replay: see `salvage`.
            damage: the damage that the previous attempt found; if it is still there, those parts
                are lost.

        Raises:
            _Damaged: other parts are damaged than in the previous attempt.
            JournalError: nothing can be used, or the scheduler did not sign it.
        """
        self.experiment_id()
        found = self._lacks()
        if not found:
            self._write(folder, self._wanted())
            try:
                recover(folder)
            except JournalCorrupt as error:
                name = Path(error.path).name
                found = f"has a {name} that is damaged at byte {error.offset}: {error.reason}"
        lost = ""
        if found:
            if found != damage:
                raise _Damaged(found)
            whole = (name for name in self._pieces if name != TUNER or not self._gaps(name))
            self._write(folder, whole)
            lost = _told(found, _salvaged(folder, found, replay))
        if (owner := recover(folder).header.experiment_id) != self._experiment_id:
            raise JournalError(
                f"the copy of a journal at {self.objects.address} is damaged: its `{READY}` is of "
                f"experiment {self._experiment_id}, and the journal beside it of {owner}."
            )
        return lost

    def _write(self, folder: Path, names: Iterable[str]) -> None:
        """Write these files; bytes after a gap directly follow those before it."""
        for name in names:
            with open(folder / name, "wb") as file:
                file.writelines(self._body(piece) for piece in self._pieces[name])

    def _lacks(self) -> str:
        """Describe what the needed files lack, judging by the names of their pieces."""
        wanted = self._wanted()
        lacks = [
            f"bytes {begin} to {end} of {name}"
            for name in wanted
            for begin, end in self._gaps(name)
        ]
        first = max(1, self._base())
        turns = [_segment(name) for name in wanted if _is_turns(name)]
        for before, number in pairwise([first - 1, *sorted(turns)]):
            if number > before + 1:
                lacks.append(f"what comes before {number:06d}{journal_files.TURNS_SUFFIX}")
        return f"lacks {', '.join(lacks)}" if lacks else ""

    def _gaps(self, name: str) -> list[tuple[int, int]]:
        return gaps(self._pieces[name], max(one.end for one in self.files[name]))

    def _wanted(self) -> list[str]:
        """Return the needed files."""
        base = self._base()
        others = (TUNER, HISTORY, snapshot_file(Path(), base).name)
        turns = [name for name in self._pieces if _is_turns(name) and _segment(name) >= base]
        return [*(name for name in others if name in self._pieces), *turns]

    def _base(self) -> int:
        """Return the newest usable snapshot; one without its segment is still being copied."""
        numbers = (_segment(name) for name in self._pieces if _is_turns(name))
        return max(
            (n for n in numbers if self._pieces.get(snapshot_file(Path(), n).name)), default=0
        )

    def _body(self, one: CopiedObject) -> bytes:
        def get() -> bytes:
            content = self.objects.get_bytes(one.key, limit=size)
            if len(content) != size:
                raise StoreUnavailable(f"{one.key}: {size - len(content)} bytes did not come.")
            return content

        size = self.files[one.file][one]
        if one.file == READY and size > _MOST_READY:
            raise JournalError(f"the copy of a journal is damaged: {one.key} has {size} bytes.")
        body = opened(self.message_signer, one, self._experiment_id, retried(get, self.cancel))
        if one.file != READY and len(body) != one.end - one.begin:
            raise JournalError(f"the copy of a journal is damaged: {one.key} has {size} bytes.")
        return body


def _salvaged(folder: Path, found: str, replay: ReplayJournal) -> SalvageResult:
    try:
        return salvage(folder, replay)
    except JournalError as error:
        raise JournalError(
            f"the copy of a journal {found}, and the rest cannot be used: restore the search from "
            "its folder on the scheduler's machine, or begin it again under another name."
        ) from error


def _told(found: str, done: SalvageResult) -> str:
    """Describe the loss, for messages."""
    turns = "turn" if done.unusable == 1 else "turns"
    behind = f"; {done.unusable} whole {turns} behind that mean nothing" if done.unusable else ""
    trials = f" Lost finished trials: {', '.join(done.missing)}." if done.missing else ""
    return (
        f"the copy of the journal {found}, as after a power cut of its store. It counts up to turn "
        f"{done.turns}{behind}.{trials}"
    )


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
