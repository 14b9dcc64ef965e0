"""Brings the copy of a journal back from an object store; see `tunemq_scheduler.journal.copy`."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tunemq_scheduler.journal import layout
from tunemq_scheduler.journal.copy import READY
from tunemq_scheduler.journal.frames import Frames
from tunemq_scheduler.journal.layout import FILE_NAME, HISTORY, snapshot_file, turns_file
from tunemq_scheduler.journal.reading import Recovered, recover
from tunemq_shared.errors import JournalError
from tunemq_shared.object_store import MissingObject, ObjectInfo, ObjectStore
from tunemq_shared.retrying import Cancel, retried

#: A scheduler that goes on may remove what is just being fetched; then it is looked at again.
_TRIES: Final = 10

#: Of the objects of one opening, or of a mirrored folder: name -> the objects of that file.
_Files = dict[str, list[ObjectInfo]]


class _PieceMissing(JournalError):
    """A piece was not listed: it may have become part of a longer one just then."""


def fetch_journal(objects: ObjectStore, folder: Path, *, timeout_s: float = 600.0) -> Recovered:
    """Bring the copy into ``folder``, which is made, and must be empty if it is there.

    Where the experiment's whole folder is synced to the store, and there is no copy, or the search
    went on from it and made none, that journal is brought.

    Returns:
        What it comes to; ``turn`` says how far the copy had got.

    Raises:
        MissingObject: there is no copy.
        JournalError: it is not usable; or the folder is not empty, or cannot be written.
        StoreError: the store does not answer, or refuses it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise JournalError(f"{folder} is not empty; name a folder for the copy of the journal.")
    cancel = Cancel(timeout_s)
    missing = ""
    for left in reversed(range(_TRIES)):
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as scratch:
            try:
                return _fetched(objects, Path(scratch, FILE_NAME), folder, cancel)
            except MissingObject:
                if not left:
                    raise
            except _PieceMissing as error:
                if not left or str(error) == missing:  # in the next listing, too: it is not there
                    raise
                missing = str(error)
    raise AssertionError  # the last try returns or raises


def has_others(objects: ObjectStore, folder: Path) -> bool:
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
            last = fetch_journal(objects, copied).turn
        except (MissingObject, JournalError):
            return False
        here, there = _turn(folder, last), _turn(copied, last)
        is_same = here is None or there is None or here == there
    return last > ours or not is_same


def _fetched(objects: ObjectStore, scratch: Path, folder: Path, cancel: Cancel) -> Recovered:
    found = retried(lambda: list(objects.list(f"{FILE_NAME}")), cancel)
    openings, mirrored, single = _sorted(found)
    ready = [number for number, files in openings.items() if READY in files]
    mirror = scratch.with_name("mirror")
    if mirrored:
        mirror.mkdir()
        for name, (one,) in mirrored.items():
            _bring(objects, [one], mirror / name, cancel)
    if ready:
        scratch.mkdir()
        _bring_copy(objects, openings[max(ready)], scratch, cancel)
    if mirrored and (not ready or _goes_on(scratch, mirror)):
        shutil.rmtree(scratch, ignore_errors=True)
        mirror.rename(scratch)
    elif ready:
        pass
    elif single:
        _bring(objects, single, scratch, cancel)  # of version 1
    else:
        raise MissingObject(f"there is no copy of a journal at {objects.address}.")
    recover(scratch)  # before anything is made of it
    folder.rmdir()
    shutil.move(scratch, folder)
    if folder.is_dir():
        for path in folder.iterdir():
            _sync(path)
        layout.sync_folder(folder)
    layout.sync_folder(folder.parent)
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
    for segment in reversed(layout.numbers(folder, layout.TURNS_SUFFIX)):
        frames = iter(Frames(turns_file(folder, segment)))
        next(frames, None)
        for frame in frames:
            if frame.number == number:
                return frame.payload
    return None


def _sorted(found: Iterable[ObjectInfo]) -> tuple[dict[int, _Files], _Files, list[ObjectInfo]]:
    """The copies by opening, the files of a mirrored folder, and a journal of version 1."""
    openings: dict[int, _Files] = {}
    mirrored: _Files = {}
    single: list[ObjectInfo] = []
    for one in found:
        match one.key.split("/"):
            case [top] if top == FILE_NAME:
                single.append(one)
            case [top, name] if top == FILE_NAME and _is_wanted(name):
                mirrored[name] = [one]
            case [top, opening, name, *_] if top == FILE_NAME and opening.isdecimal():
                openings.setdefault(int(opening), {}).setdefault(name, []).append(one)
            case _:
                pass
    return openings, mirrored, single


def _is_wanted(name: str) -> bool:
    return name == HISTORY or name.endswith((layout.TURNS_SUFFIX, layout.SNAPSHOT_SUFFIX))


def _bring_copy(objects: ObjectStore, files: _Files, folder: Path, cancel: Cancel) -> None:
    snapshots = [
        number
        for name in files
        if name.endswith(layout.SNAPSHOT_SUFFIX)
        # A snapshot of which nothing else is there is one that is just being copied.
        and turns_file(folder, number := int(name.partition(".")[0])).name in files
    ]
    base = max(snapshots, default=0)
    wanted: dict[Path, list[ObjectInfo]] = {}
    if base:
        path = snapshot_file(folder, base)
        wanted[path] = files[path.name]
    if HISTORY in files:
        wanted[folder / HISTORY] = _in_order(files[HISTORY])
    number = max(1, base)
    while (path := turns_file(folder, number)).name in files:
        wanted[path] = _in_order(files[path.name])
        number += 1
    for path, pieces in wanted.items():
        _bring(objects, pieces, path, cancel)


def _in_order(pieces: list[ObjectInfo]) -> list[ObjectInfo]:
    """The pieces that make up a file; of those that overlap the longest, the others were merged.

    Raises:
        JournalError: one is missing, or is not as long as its name says.
    """
    longest: dict[int, tuple[int, ObjectInfo]] = {}
    for one in pieces:
        begin, _, end = one.key.rpartition("/")[2].partition("-")
        if int(end) - int(begin) != one.size:
            raise JournalError(f"the copy of a journal is damaged: {one.key} has {one.size} bytes.")
        longest[int(begin)] = max(longest.get(int(begin), (0, one)), (int(end), one))
    chosen: list[ObjectInfo] = []
    at, size = 0, max(end for end, _ in longest.values())
    while at < size:
        if at not in longest:
            raise _PieceMissing(
                f"the copy of a journal is damaged: the piece of {pieces[0].key.rpartition('/')[0]}"
                f" that begins at byte {at} is missing."
            )
        at, one = longest[at]
        chosen.append(one)
    return chosen


def _bring(objects: ObjectStore, pieces: list[ObjectInfo], path: Path, cancel: Cancel) -> None:
    with tempfile.TemporaryDirectory(prefix=".piece-", dir=path.parent.parent) as scratch:
        for n, one in enumerate(pieces):
            part = Path(scratch, f"{n}")
            objects.get_file(one.key, part, size=one.size, cancel=cancel)
            with open(part, "rb") as source, open(path, "ab") as target:
                shutil.copyfileobj(source, target)
            part.unlink()


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
