"""Record which files are synced to disk, and which are renamed to their final names before."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class SyncedFiles:
    """Observe fsync and rename in this process; both do their work.

    Attributes:
        renamed: the name of each file that was renamed, or whose folder was.
        unsynced: the names of those that were not completely synced before.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.renamed: list[str] = []
        self.unsynced: list[str] = []
        self._sizes: dict[int, int] = {}
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._syncing(getattr(os, name)))
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, self._renaming(getattr(os, name)))

    def has(self, path: Path) -> bool:
        """Whether all of a file, or the names in a folder, were synced."""
        found = path.stat()
        return self._sizes.get(found.st_ino) == found.st_size

    def _syncing(self, sync: Callable[[int], None]) -> Callable[[int], None]:
        def synced(descriptor: int) -> None:
            sync(descriptor)
            found = os.fstat(descriptor)
            self._sizes[found.st_ino] = found.st_size

        return synced

    def _renaming(self, rename: Callable[..., None]) -> Callable[..., None]:
        def renamed(source: Any, target: Any) -> None:
            for path in (Path(source), *Path(source).rglob("*")):
                if path.is_file():
                    self.renamed.append(path.name)
                    if not self.has(path):
                        self.unsynced.append(path.name)
            rename(source, target)

        return renamed
