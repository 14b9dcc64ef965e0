"""Brings the copy of a journal back from an object store; see `journal_copy`."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tunemq_scheduler.journal import journal_layout
from tunemq_scheduler.journal.copied_objects import (
    READY,
    TUNER,
    CopiedObject,
    opened,
    parse_key,
)
from tunemq_scheduler.journal.journal_frames import JournalFrames
from tunemq_scheduler.journal.journal_layout import FILE_NAME, HISTORY, snapshot_file, turns_file
from tunemq_scheduler.journal.journal_reader import RecoveredJournal, recover
from tunemq_shared.base.errors import JournalError
from tunemq_shared.base.retrying import CancelToken, StoreUnavailable, retried
from tunemq_shared.objects.object_store import NoSuchObject, ObjectInfo, ObjectStore
from tunemq_shared.signing.message_signing import HEAD_BYTES, MessageSigner

#: A scheduler that goes on may remove what is just being fetched; then it is looked at again.
_TRIES: Final = 10
#: Seconds for listing a copy.
_LIST_S: Final = 600.0

#: An experiment's id, behind the head of a seal.
_MOST_READY: Final = 1024
#: The pieces of each file of one copy, and how many bytes each object has.
_Files = dict[str, dict[CopiedObject, int]]


class _PieceMissing(JournalError):
    """A piece was not listed: it may have become part of a longer one just then."""


def fetch_journal(
    objects: ObjectStore, folder: Path, message_signer: MessageSigner, *, timeout_s: float = 600.0
) -> RecoveredJournal:
    """Bring the copy into ``folder``, which is made, and must be empty if it is there.

    Where the experiment's whole folder is synced to the store, and there is no copy, or the search
    went on from it and made none, that journal is brought; with keys never, since it is not signed.
    The file `TUNER` of the copy comes into ``folder``, too.

    Args:
        seal: of the journals of this search; without keys it is not checked who wrote the copy.

    Returns:
        What it comes to; ``turn`` says how far the copy had got.

    Raises:
        MissingObject: there is no copy.
        JournalError: it is not usable, or the scheduler did not write it; or the folder is not
            empty, or cannot be written.
        StoreError: the store does not answer, or refuses it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise JournalError(f"{folder} is not empty; name a folder for the copy of the journal.")
    cancel = CancelToken(timeout_s)
    missing = ""
    for left in reversed(range(_TRIES)):
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as scratch:
            try:
                return _fetched(objects, Path(scratch, FILE_NAME), folder, message_signer, cancel)
            except NoSuchObject:
                if not left:
                    raise
            except _PieceMissing as error:
                if not left or str(error) == missing:  # in the next listing, too: it is not there
                    raise
                missing = str(error)
    raise AssertionError  # the last try returns or raises


def has_others(objects: ObjectStore, folder: Path, message_signer: MessageSigner) -> bool:
    """Whether the copy holds turns that the journal in ``folder`` does not: somebody else's.

    A copy that is of no use holds none.

    Raises:
        JournalError: the journal in the folder cannot be read.
        StoreError: the store does not answer, or refuses it.
    """
    ours = recover(folder).turn
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as scratch:
        copied = Path(scratch, FILE_NAME)
        try:
            last = fetch_journal(objects, copied, message_signer).turn
        except (NoSuchObject, JournalError):
            return False
        here, there = _turn(folder, last), _turn(copied, last)
        is_same = here is None or there is None or here == there
    return last > ours or not is_same


def is_copy_ahead(objects: ObjectStore, folder: Path, message_signer: MessageSigner) -> bool:
    """Whether the copy has turns that the journal in ``folder`` lacks; quick where it has not.

    A copy follows its journal, so that is true only of a folder that was put back from a backup,
    that its disk shortened, or whose damage `tunemq journal salvage` left out.

    Raises:
        JournalError: the journal in the folder cannot be read.
        StoreError: the store does not answer, or refuses it.
    """
    found = retried(lambda: list(objects.list(f"{FILE_NAME}/")), CancelToken(_LIST_S))
    openings, _ = _sorted(found, is_signed=True)
    ready = [number for number, files in openings.items() if READY in files]
    files = openings[max(ready)] if ready else {}
    suffix = journal_layout.TURNS_SUFFIX
    copied = max((name for name in files if name.endswith(suffix)), key=_segment, default="")
    local = journal_layout.numbers(folder, suffix)
    if not copied or _segment(copied) < max(local, default=0):
        return False
    size = max(piece.end for piece in files[copied])
    path = folder / copied
    is_longer = not path.exists() or path.stat().st_size < size
    return is_longer and has_others(objects, folder, message_signer)


def _segment(turns: str) -> int:
    return int(turns.removesuffix(journal_layout.TURNS_SUFFIX))


def _fetched(
    objects: ObjectStore,
    scratch: Path,
    folder: Path,
    message_signer: MessageSigner,
    cancel: CancelToken,
) -> RecoveredJournal:
    found = retried(lambda: list(objects.list(f"{FILE_NAME}/")), cancel)
    openings, mirrored = _sorted(found, is_signed=message_signer.is_signed)
    ready = [number for number, files in openings.items() if READY in files]
    mirror = scratch.with_name("mirror")
    if mirrored:
        mirror.mkdir()
        for name, one in mirrored.items():
            objects.get_file(one.key, mirror / name, size=one.size, cancel=cancel)
    if ready:
        scratch.mkdir()
        _Copy(objects, openings[max(ready)], message_signer, cancel).bring(scratch)
    if mirrored and (not ready or _goes_on(scratch, mirror)):
        shutil.rmtree(scratch, ignore_errors=True)
        mirror.rename(scratch)
    elif not ready:
        kind = "signed copy" if message_signer.is_signed else "copy"
        raise NoSuchObject(f"there is no {kind} of a journal at {objects.address}.")
    recover(scratch)  # before anything is made of it
    folder.rmdir()
    shutil.move(scratch, folder)
    for path in folder.iterdir():
        _sync(path)
    journal_layout.sync_folder(folder)
    journal_layout.sync_folder(folder.parent)
    return recover(folder)


def _goes_on(copied: Path, mirror: Path) -> bool:
    """Whether a mirrored folder has all turns of the copy, and more.

    That is so where the search went on from the copy without making one itself. A scheduler that
    was thought dead may have mirrored more turns, too; but others.
    """
    last = recover(copied).turn
    try:
        has_more = recover(mirror).turn > last
    except JournalError:  # its files are of different moments, and then it is of no use
        return False
    ours, theirs = _turn(copied, last), _turn(mirror, last)
    return has_more and ours is not None and ours == theirs


def _turn(folder: Path, number: int) -> bytes | None:
    """The turn of a number, encoded; of the segments that are there the last one that has it."""
    for segment in reversed(journal_layout.numbers(folder, journal_layout.TURNS_SUFFIX)):
        frames = iter(JournalFrames(turns_file(folder, segment)))
        next(frames, None)
        for frame in frames:
            if frame.number == number:
                return frame.payload
    return None


def _sorted(
    found: Iterable[ObjectInfo], *, is_signed: bool
) -> tuple[dict[int, _Files], dict[str, ObjectInfo]]:
    """The copies by opening, and the files of a mirrored folder."""
    openings: dict[int, _Files] = {}
    mirrored: dict[str, ObjectInfo] = {}
    for one in found:
        top, _, name = one.key.partition("/")
        if (copied := parse_key(one.key)) is not None:
            openings.setdefault(copied.opening, {}).setdefault(copied.file, {})[copied] = one.size
        elif is_signed or top != FILE_NAME:
            pass
        elif name == HISTORY or journal_layout.is_numbered(name):
            mirrored[name] = one
    return openings, mirrored


class _Copy:
    """One copy of a journal in the store.

    Args:
        files: its objects.
    """

    def __init__(
        self,
        objects: ObjectStore,
        files: _Files,
        message_signer: MessageSigner,
        cancel: CancelToken,
    ) -> None:
        self._objects, self._files, self._message_signer, self._cancel = (
            objects,
            files,
            message_signer,
            cancel,
        )
        self._experiment_id = ""

    def bring(self, folder: Path) -> None:
        """Write the files that count into the folder.

        Raises:
            JournalError: a piece is missing or damaged, or the scheduler did not write it.
        """
        (ready,) = self._files[READY]
        self._experiment_id = self._body(ready).decode(errors="replace")
        for path in self._wanted(folder):
            for piece in _in_order(self._files[path.name]):
                with open(path, "ab") as file:
                    file.write(self._body(piece))
        if (found := recover(folder).header.experiment_id) != self._experiment_id:
            raise JournalError(
                f"the copy of a journal is damaged: {ready.key} is of experiment "
                f"{self._experiment_id}, and the journal beside it of {found}."
            )

    def _wanted(self, folder: Path) -> list[Path]:
        numbers = [
            int(name.removesuffix(journal_layout.SNAPSHOT_SUFFIX))
            for name in self._files
            if name.endswith(journal_layout.SNAPSHOT_SUFFIX)
        ]
        # A snapshot of which nothing else is there is one that is just being copied.
        base = max((n for n in numbers if turns_file(folder, n).name in self._files), default=0)
        wanted = [folder / name for name in (TUNER, HISTORY) if name in self._files]
        if base:
            wanted.append(snapshot_file(folder, base))
        number = max(1, base)
        while (path := turns_file(folder, number)).name in self._files:
            wanted.append(path)
            number += 1
        return wanted

    def _body(self, one: CopiedObject) -> bytes:
        def get() -> bytes:
            content = self._objects.get_bytes(one.key, limit=size)
            if len(content) != size:
                raise StoreUnavailable(f"{one.key}: {size - len(content)} bytes did not come.")
            return content

        size = self._files[one.file][one]
        if one.file != READY and size - (one.end - one.begin) not in {1, HEAD_BYTES}:
            raise JournalError(f"the copy of a journal is damaged: {one.key} has {size} bytes.")
        if one.file == READY and size > _MOST_READY:
            raise JournalError(f"the copy of a journal is damaged: {one.key} has {size} bytes.")
        body = opened(self._message_signer, one, self._experiment_id, retried(get, self._cancel))
        if one.file != READY and len(body) != one.end - one.begin:
            raise JournalError(f"the copy of a journal is damaged: {one.key} has {size} bytes.")
        return body


def _in_order(pieces: Iterable[CopiedObject]) -> list[CopiedObject]:
    """The pieces that make up a file; of those that overlap the longest, the others were merged.

    Raises:
        JournalError: one is missing.
    """
    longest: dict[int, CopiedObject] = {}
    for one in pieces:
        longest[one.begin] = max(longest.get(one.begin, one), one)
    chosen: list[CopiedObject] = []
    at, size = 0, max(one.end for one in longest.values())
    while at < size:
        if at not in longest:
            file = one.key.rpartition("/")[0]
            raise _PieceMissing(
                f"the copy of a journal is damaged: the piece of {file} that begins at byte {at} "
                "is missing."
            )
        chosen.append(longest[at])
        at = longest[at].end
    return chosen


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
