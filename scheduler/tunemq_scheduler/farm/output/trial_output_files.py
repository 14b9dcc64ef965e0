"""`TrialOutputFiles`: writes trial output from nodes without a shared folder into local files.

Chunks arrive in a short stream of the experiment (`tunemq_shared.protocol.output_chunks`) and are
appended to ``stdout`` and ``stderr`` in the trial's folder, where log commands read them. If bytes
are missing, a line says how many; the store has all of the output once the trial process has ended.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from tunemq_scheduler.journal.journal_files import is_full
from tunemq_scheduler.transport.redis.redis_connection import RedisCommand
from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.base.safe_names import is_safe_name
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol.output_chunks import OutputChunk, decode
from tunemq_shared.system.plain_files import open_plain

#: Takes an event key and a received chunk of output; returns the verified chunk, or None.
OpenChunk = Callable[[str, bytes], bytes | None]

#: A file of this size gets no more output: its node keeps the newest, and the store has it.
LIMIT_BYTES: Final = 64 * 2**20
#: The most chunks to take at once.
_AT_ONCE: Final = 100
_NAMES: Final = frozenset({"stdout", "stderr"})
#: In the experiment's folder: the last stream entry that its files contain.
_CURSOR: Final = ".output-cursor"
#: Next to it: how far each file is written, as lines of JSON; the last line of a file counts. Data
#: that is sent again after a restart of the scheduler may come after the cursor.
_KNOWN: Final = ".output-known"
#: How many more lines than files it may have before it is rewritten.
_KNOWN_LINES: Final = 10_000
#: The most that is read of it, and of a line of it: the search's code may have written it.
_KNOWN_BYTES: Final = 32 * 2**20
_LINE_BYTES: Final = 4096
#: Two numbers of 64 bits are shorter.
_CURSOR_LENGTH: Final = 64


#: A trial, its attempt, and the name of the file.
_File = tuple[str, int, str]
_Line = tuple[_File, tuple[int, int]]


class TrialOutputFiles:
    """The output files of one experiment.

    Its only I/O is on files; callers send `asks` to Redis and pass the reply to `answered`.

    Args:
        folder: the experiment's folder.
        events_key: the experiment's event key.
        opened: verifies a chunk of output for an event key; returns None if rejected.
    """

    def __init__(self, folder: Path | str, events_key: str, opened: OpenChunk) -> None:
        self._folder = Path(folder)
        self._events_key, self._opened = events_key, opened
        #: The key of its output stream.
        self.key = redis_keys.output(events_key)
        self._cursor = self._kept_cursor()
        #: How far each attempt's file is written: its round, and the bytes of that round.
        self._known: dict[_File, tuple[int, int]] = self._kept_known()
        self._changed: set[_File] = set()
        self._lines = len(self._known)

    def asks(self) -> RedisCommand:
        """Return the non-blocking command whose reply `answered` takes."""
        return ["XREAD", "COUNT", _AT_ONCE, "STREAMS", self.key, self._cursor]

    def answered(self, reply: list[tuple[bytes, list[tuple[bytes, list[bytes]]]]] | None) -> bool:
        """Append the chunks to the files; return whether there may be more.

        Raises:
            OSError: a file cannot be written. If the disk is full, the next command asks for this
                chunk again; otherwise it is lost.
        """
        entries = reply[0][1] if reply else []
        for entry, fields in entries:
            before, self._cursor = self._cursor, entry.decode()
            told = dict(zip(fields[::2], fields[1::2], strict=True))
            chunk = self._opened(self._events_key, told.get(redis_keys.CHUNK, b""))
            if chunk is None:
                continue
            try:
                with contextlib.suppress(*UNDECODABLE):
                    self._add(decode(chunk))
            except OSError as error:
                if is_full(error):
                    self._cursor = before
                raise
        if entries:
            self._keep_known()
            self._keep_cursor()
        return len(entries) == _AT_ONCE

    def _add(self, chunk: OutputChunk) -> None:
        if chunk.name not in _NAMES or not self._is_trials(chunk):
            return
        key = chunk.trial, chunk.attempt, chunk.name
        begun, known = self._known.get(key, (chunk.round, 0))
        if chunk.round > begun:  # the node truncated the file, and it begins anew
            known = 0
        end = chunk.offset + len(chunk.data)
        if chunk.round < begun or end <= known:
            return  # a repeated chunk
        data = chunk.data[max(0, known - chunk.offset) :]
        path = self._folder / chunk.folder / chunk.name
        descriptor = open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        if descriptor is None:
            return  # the trial's own code put something else there
        if known < chunk.offset:
            data = b"[%d bytes are not shown here]\n%b" % (chunk.offset - known, data)
        with open(descriptor, "ab", buffering=0) as file:
            size = file.tell()
            try:
                while data and size < LIMIT_BYTES:
                    data = data[file.write(data) :]
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(size)  # all of it arrives again
                raise
        self._known[key] = chunk.round, end
        self._changed.add(key)

    def _is_trials(self, chunk: OutputChunk) -> bool:
        """Return whether this is the folder that the experiment gave the trial."""
        return (
            chunk.folder.endswith(f"_{chunk.trial}")
            and is_safe_name(chunk.folder)
            and "/" not in chunk.folder
            and (self._folder / chunk.folder).is_dir()
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
                    while file.tell() < _KNOWN_BYTES and (line := file.readline(_LINE_BYTES)):
                        with contextlib.suppress(*UNDECODABLE):  # a crash leaves partial lines
                            key, how_far = msgspec.json.decode(line, type=_Line)
                            found[key] = how_far
        return found

    def _keep_known(self) -> None:
        if not self._changed:
            return
        path = self._folder / _KNOWN
        self._lines += len(self._changed)
        if self._lines > len(self._known) + _KNOWN_LINES:
            self._replace(path, _lines(self._known.items()))
            self._lines = len(self._known)
        else:
            descriptor = open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            if descriptor is not None:
                with open(descriptor, "ab") as file:
                    file.write(b"\n" + _lines((key, self._known[key]) for key in self._changed))
        self._changed.clear()

    def _keep_cursor(self) -> None:
        self._replace(self._folder / _CURSOR, self._cursor.encode("ascii"))

    def _replace(self, path: Path, content: bytes) -> None:
        """Replace a file; the search's code, which may write to the folder, can guess no name."""
        temporary = path.with_name(f"{path.name}.{os.urandom(8).hex()}")
        try:
            with open(temporary, "xb") as file:
                file.write(content)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def _lines(known: Iterable[_Line]) -> bytes:
    return b"".join(msgspec.json.encode(one) + b"\n" for one in known)
