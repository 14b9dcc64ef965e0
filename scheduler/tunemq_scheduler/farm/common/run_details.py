"""`RunDetails`: what the processes of experiments said of themselves when they ended."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from tunemq_scheduler.api.farm_answers import ExperimentDetail
from tunemq_scheduler.farm.common.small_files import make_folder, replace_file
from tunemq_shared.base.errors import JournalError, JournalFull
from tunemq_shared.base.undecodable import UNDECODABLE


class RunDetails:
    """One file for each experiment that is over or paused; what is lost of it is only not shown.

    Args:
        folder: of the files; made if need be.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        #: What the disk had no room for.
        self._unsaved: dict[str, bytes] = {}
        make_folder(folder)

    def keep(self, name: str, detail: bytes) -> None:
        """Keep what it said, in place of what it said before."""
        self._unsaved[name] = detail
        with contextlib.suppress(JournalFull):
            self.save()

    def save(self) -> None:
        """Write what the disk had no room for.

        Raises:
            JournalFull: it still has none.
        """
        for name, detail in list(self._unsaved.items()):
            try:
                replace_file(self._path(name), detail)
            except JournalFull:
                raise
            except JournalError:
                pass  # it is lost
            del self._unsaved[name]

    def read(self, name: str) -> ExperimentDetail | None:
        """What it said last; None where nobody knows."""
        try:
            detail = self._unsaved.get(name) or self._path(name).read_bytes()
            return msgspec.msgpack.decode(detail, type=ExperimentDetail)
        except (OSError, *UNDECODABLE):
            return None

    def forget(self, name: str) -> None:
        """Keep nothing of it."""
        self._unsaved.pop(name, None)
        with contextlib.suppress(OSError):
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.msgpack"
