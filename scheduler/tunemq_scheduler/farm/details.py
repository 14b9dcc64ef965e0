"""`Details`: what the processes of experiments said of themselves when they ended."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from tunemq_shared.answers import ExperimentDetail
from tunemq_shared.undecodable import UNDECODABLE


class Details:
    """One file for each experiment that is over or paused; what is lost of it is only not shown.

    Args:
        folder: of the files; made if need be.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def keep(self, name: str, detail: bytes) -> None:
        """Keep what it said, in place of what it said before."""
        path = self._path(name)
        beside = path.with_suffix(".new")
        with contextlib.suppress(OSError):
            beside.write_bytes(detail)
            beside.replace(path)

    def read(self, name: str) -> ExperimentDetail | None:
        """What it said last; None where nobody knows."""
        try:
            return msgspec.msgpack.decode(self._path(name).read_bytes(), type=ExperimentDetail)
        except (OSError, *UNDECODABLE):
            return None

    def forget(self, name: str) -> None:
        """Keep nothing of it."""
        with contextlib.suppress(OSError):
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.msgpack"
