"""`EventStreams`: the event streams of all experiments that may have trials on nodes."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from tunemq_scheduler.farm.common.small_files import replace_file
from tunemq_shared.base.errors import JournalError, JournalFull


class EventStreams:
    """The event keys by experiment, in a file that outlives this process and Redis.

    Raises:
        JournalError: the file cannot be read. Without it all nodes would end their trials.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_saved = True
        try:
            self.keys = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            self.keys = {}
        except (OSError, ValueError) as error:  # ValueError covers all errors of msgspec
            raise JournalError(
                f"{path} cannot be read ({error}). It says which searches run on the farm's nodes:"
                " put it back from a copy, or remove it; then they continue from their checkpoints."
            ) from error

    def put(self, name: str, key: str) -> None:
        """Set an experiment's event key; if the disk is full, `save` writes it later.

        Raises:
            JournalError: it cannot be stored.
        """
        if self.keys.get(name) != key:
            self._set({**self.keys, name: key})

    def drop(self, name: str) -> None:
        """Remove an experiment without trials on nodes; see `put`.

        Raises:
            JournalError: it cannot be stored.
        """
        if name in self.keys:
            self._set({one: key for one, key in self.keys.items() if one != name})

    def save(self) -> None:
        """Write changes for which the disk had no space.

        Raises:
            JournalFull: it still has none.
            JournalError: it cannot be stored.
        """
        if not self._is_saved:
            replace_file(self._path, msgspec.json.encode(self.keys))
            self._is_saved = True

    def _set(self, keys: dict[str, str]) -> None:
        self.keys, self._is_saved = keys, False
        with contextlib.suppress(JournalFull):
            self.save()
