"""`RunDetails`: stores the last reports of experiment processes that have ended."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from tunemq_scheduler.api.farm_answer_types import ExperimentDetail
from tunemq_scheduler.farm.common.small_files import make_folder, replace_file
from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.base.errors import JournalError, JournalFull


class RunDetails:
    """One file for each finished or paused experiment; a loss only hides details."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        #: Reports for which the disk had no space.
        self._unsaved: dict[str, bytes] = {}
        make_folder(folder)

    def keep(self, name: str, detail: bytes) -> None:
        """Store a report in place of the earlier one."""
        self._unsaved[name] = detail
        with contextlib.suppress(JournalFull):
            self.save()

    def save(self) -> None:
        """Write reports for which the disk had no space.

        Raises:
            JournalFull: it still has none.
        """
        for name, detail in list(self._unsaved.items()):
            try:
                replace_file(self._path(name), detail)
            except JournalFull:
                raise
            except JournalError:
                pass  # the report is lost
            del self._unsaved[name]

    def read(self, name: str) -> ExperimentDetail | None:
        """Return the last report; None if there is none."""
        try:
            detail = self._unsaved.get(name) or self._path(name).read_bytes()
            return msgspec.msgpack.decode(detail, type=ExperimentDetail)
        except (OSError, *UNDECODABLE):
            return None

    def forget(self, name: str) -> None:
        """Delete the report."""
        self._unsaved.pop(name, None)
        with contextlib.suppress(OSError):
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.msgpack"
