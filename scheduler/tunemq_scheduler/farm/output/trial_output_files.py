"""What trials print on nodes that share no folder with the scheduler, in files in its folder.

Pieces come in a short stream of the experiment's (`tunemq_shared.protocol.output_pieces`) and are
added to ``stdout`` and ``stderr`` in the trial's folder, where whoever shows logs looks. Where
something was left out on the way a line says how much; all of it is in the store when the trial's
host has ended.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from tunemq_scheduler.journal.journal_layout import is_full
from tunemq_scheduler.transport.redis.redis_connection import RedisCommand
from tunemq_shared.base.safe_names import is_safe_name
from tunemq_shared.base.undecodable import UNDECODABLE
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol.output_pieces import OutputChunk, decode
from tunemq_shared.system.plain_files import open_plain

#: Takes the key of an experiment's events, and what came as a piece of its output.
OpenChunk = Callable[[str, bytes], bytes | None]

#: A file that has become longer gets no more: its node keeps the newest, and the store has it.
LIMIT_BYTES: Final = 64 * 2**20
#: So many pieces are taken at once.
_AT_ONCE: Final = 100
_NAMES: Final = frozenset({"stdout", "stderr"})
#: In the experiment's folder: up to which entry of the stream its files have everything.
_CURSOR: Final = ".output-cursor"
#: Beside it: how far each file is written, a line of JSON each; the last of a file counts. What
#: somebody says again after a restart of the scheduler is behind the cursor, too.
_KNOWN: Final = ".output-known"
#: So many lines more than there are files it has before it is written anew.
_KNOWN_LINES: Final = 10_000
#: Two numbers of 64 bits are shorter.
_CURSOR_LENGTH: Final = 64


#: A trial, its epoch, and the name of the file.
_File = tuple[str, int, str]
_Line = tuple[_File, tuple[int, int]]


class TrialOutputFiles:
    """The output files of one experiment. It does no I/O but on files: `asks`, then `answered`.

    Args:
        folder: the experiment's.
        events_key: of its stream of events.
        opened: opens a piece of the experiment with these events; None where it is refused.
    """

    def __init__(self, folder: Path | str, events_key: str, opened: OpenChunk) -> None:
        self._folder = Path(folder)
        self._events_key, self._opened = events_key, opened
        #: Of the stream that it reads.
        self.key = redis_keys.output(events_key)
        self._cursor = self._kept_cursor()
        #: How far each attempt's file is known here: its round there, and the bytes of that.
        self._known: dict[_File, tuple[int, int]] = self._kept_known()
        self._changed: set[_File] = set()
        self._lines = len(self._known)

    def asks(self) -> RedisCommand:
        """The command whose reply `answered` takes; it does not wait."""
        return ["XREAD", "COUNT", _AT_ONCE, "STREAMS", self.key, self._cursor]

    def answered(self, reply: list[tuple[bytes, list[tuple[bytes, list[bytes]]]]] | None) -> bool:
        """Add what came to the files; whether there may be more.

        Raises:
            OSError: a file cannot be written. Where the disk is full the next command asks for this
                piece again; else it is lost.
        """
        entries = reply[0][1] if reply else []
        for entry, fields in entries:
            before, self._cursor = self._cursor, entry.decode()
            told = dict(zip(fields[::2], fields[1::2], strict=True))
            piece = self._opened(self._events_key, told.get(redis_keys.PIECE, b""))
            if piece is None:
                continue
            try:
                with contextlib.suppress(*UNDECODABLE):
                    self._add(decode(piece))
            except OSError as error:
                if is_full(error):
                    self._cursor = before
                raise
        if entries:
            self._keep_known()
            self._keep_cursor()
        return len(entries) == _AT_ONCE

    def _add(self, piece: OutputChunk) -> None:
        if piece.name not in _NAMES or not self._is_trials(piece):
            return
        key = piece.trial, piece.attempt, piece.name
        begun, known = self._known.get(key, (piece.round, 0))
        if piece.round > begun:  # it was shortened on its node, and begins anew
            known = 0
        end = piece.offset + len(piece.data)
        if piece.round < begun or end <= known:
            return  # it is known: somebody says it again
        data = piece.data[max(0, known - piece.offset) :]
        path = self._folder / piece.folder / piece.name
        descriptor = open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        if descriptor is None:
            return  # the trial's own code put something else there
        if known < piece.offset:
            data = b"[%d bytes are not shown here]\n%b" % (piece.offset - known, data)
        with open(descriptor, "ab", buffering=0) as file:
            size = file.tell()
            try:
                while data and size < LIMIT_BYTES:
                    data = data[file.write(data) :]
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(size)  # all of it comes again
                raise
        self._known[key] = piece.round, end
        self._changed.add(key)

    def _is_trials(self, piece: OutputChunk) -> bool:
        """Whether the folder is one that its trial was given when the experiment added it."""
        return (
            piece.folder.endswith(f"_{piece.trial}")
            and is_safe_name(piece.folder)
            and "/" not in piece.folder
            and (self._folder / piece.folder).is_dir()
        )

    def _kept_cursor(self) -> str:
        try:
            descriptor = open_plain(self._folder / _CURSOR, os.O_RDONLY)
            if descriptor is None:
                return "0-0"
            with open(descriptor, encoding="ascii") as file:
                kept = file.read(_CURSOR_LENGTH)
        except (OSError, ValueError):
            return "0-0"
        return kept if all(part.isdecimal() for part in kept.split("-")) else "0-0"

    def _kept_known(self) -> dict[_File, tuple[int, int]]:
        found: dict[_File, tuple[int, int]] = {}
        with contextlib.suppress(OSError):
            descriptor = open_plain(self._folder / _KNOWN, os.O_RDONLY)
            if descriptor is not None:
                with open(descriptor, "rb") as file:
                    for line in file:
                        with contextlib.suppress(*UNDECODABLE):  # such as half a line of a crash
                            key, how_far = msgspec.json.decode(line, type=_Line)
                            found[key] = how_far
        return found

    def _keep_known(self) -> None:
        if not self._changed:
            return
        path = self._folder / _KNOWN
        self._lines += len(self._changed)
        if self._lines > len(self._known) + _KNOWN_LINES:
            temporary = self._folder / f"{_KNOWN}.{os.getpid()}"
            temporary.write_bytes(_lines(self._known.items()))
            temporary.replace(path)
            self._lines = len(self._known)
        else:
            descriptor = open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            if descriptor is not None:
                with open(descriptor, "ab") as file:
                    file.write(b"\n" + _lines((key, self._known[key]) for key in self._changed))
        self._changed.clear()

    def _keep_cursor(self) -> None:
        temporary = self._folder / f"{_CURSOR}.{os.getpid()}"
        temporary.write_text(self._cursor, encoding="ascii")
        temporary.replace(self._folder / _CURSOR)


def _lines(known: Iterable[_Line]) -> bytes:
    return b"".join(msgspec.json.encode(one) + b"\n" for one in known)
