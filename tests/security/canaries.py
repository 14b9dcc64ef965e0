"""Secrets that are looked for, in whatever form they may have been written down.

A canary is a secret that a farm is given. It must not come out: not as it is, nor in hexadecimal,
in base64 (which is a task's argument), in a URL, or as a program prints bytes.
"""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import quote

import psutil

#: So long a part of a file is read at once.
_PIECE: Final = 2**22


def forms_of(secret: bytes) -> list[bytes]:
    """How a secret may be written."""
    found = {secret, secret.hex().encode(), secret.hex().upper().encode()}
    for begin in range(3):
        # In the middle of more: the first and the last character belong to its neighbours, too.
        text = base64.b64encode(bytes(begin) + secret)
        first, last = -(-begin * 8 // 6), (begin + len(secret)) * 8 // 6
        found |= {text[first:last], text[first:last].translate(bytes.maketrans(b"+/", b"-_"))}
    if secret.isascii():
        text = secret.decode()
        found |= {quote(text, safe="").encode(), json.dumps(text)[1:-1].encode()}
    else:
        found.add(repr(secret)[2:-1].encode())
    return sorted(found)


class Canaries:
    """Looks for secrets in all that it is shown, and remembers where it found one.

    Args:
        secrets: by name.
    """

    def __init__(self, secrets: Mapping[str, bytes | str]) -> None:
        self.names = frozenset(secrets)
        self._forms = [
            (name, form)
            for name, secret in secrets.items()
            for form in forms_of(secret.encode() if isinstance(secret, str) else secret)
        ]
        self._longest = max(len(form) for _, form in self._forms)
        #: By name, where it was found.
        self.found: dict[str, set[str]] = {}
        #: How many bytes were looked at, by the kind of place.
        self.seen: dict[str, int] = {}

    def look(self, kind: str, where: str, data: bytes) -> None:
        """Look for them in these bytes."""
        self.seen[kind] = self.seen.get(kind, 0) + len(data)
        for name, form in self._forms:
            if form in data:
                self.found.setdefault(name, set()).add(f"{kind}: {where}")

    def look_into(self, kind: str, files: Iterable[Path]) -> None:
        """Likewise in all of these files, and in their names."""
        for path in files:
            self.look(kind, "its name", os.fsencode(path))
            rest = b""
            with path.open("rb") as file:
                while piece := file.read(_PIECE):
                    self.look(kind, str(path), rest + piece)
                    rest = piece[-self._longest :]

    def of(self, *kinds: str) -> dict[str, set[str]]:
        """The secrets found in places of these kinds."""
        found = {
            name: {place for place in places if place.partition(":")[0] in kinds}
            for name, places in self.found.items()
        }
        return {name: places for name, places in found.items() if places}


class CommandLines(threading.Thread):
    """Notes the command lines of all processes of the machine, as `ps` shows them, until `stop`."""

    def __init__(self) -> None:
        super().__init__(name="ps", daemon=True)
        self.lines: set[bytes] = set()
        self._is_over = threading.Event()

    def run(self) -> None:
        """See `threading.Thread`."""
        known: set[int] = set()
        while not self._is_over.wait(0.002):
            pids = psutil.pids()
            for pid in sorted(pids, key=known.__contains__):  # new ones may not live for long
                try:
                    self.lines.add(Path(f"/proc/{pid}/cmdline").read_bytes())
                except OSError:  # it has just ended
                    continue
            known = set(pids)

    def stop(self) -> bytes:
        """All that was seen."""
        self._is_over.set()
        self.join()
        return b"\n".join(self.lines)


def files_below(folder: Path, without: Iterable[Path] = ()) -> Iterator[Path]:
    """All files in a folder, except those below the folders in ``without``."""
    left_out = set(without)
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if Path(path, name) not in left_out]
        for name in names:
            file = Path(path, name)
            if file not in left_out and file.is_file() and not file.is_symlink():
                yield file
