"""`CheckpointStore`: the interface of all stores of one experiment's checkpoints.

Every implementation passes the suite in ``tests/contracts/test_store.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tunemq_shared.base.errors import StoreError
from tunemq_shared.base.failure_text import shortened
from tunemq_shared.base.retrying import CancelToken
from tunemq_shared.base.safe_names import is_safe_name
from tunemq_shared.checkpoints.manifest import CheckpointInfo, Manifest


class CommittedCheckpoint(NamedTuple):
    """A checkpoint that is complete in the store: its manifest's hash, its files' size in bytes."""

    key: str
    sha256: str
    size: int


class OpenedCheckpoint(NamedTuple):
    """A read-only folder with a checkpoint's verified files, and its manifest."""

    path: Path
    manifest: Manifest


class CollectedGarbage(NamedTuple):
    """The number of removed files or objects that nothing referred to, and their bytes."""

    objects: int
    bytes: int


class CheckpointStore(ABC):
    """Stores checkpoints under keys ``<trial's folder>/<checkpoint>``.

    *Atomicity.* A checkpoint is there completely or not at all, at every moment and after any crash
    of the process that writes it. A key is written once and never overwritten.

    *Trust.* A store checks everything it reads against the hash that the caller knows, before it
    hands out a byte; names in manifests never lead out of the checkpoint.

    *Processes.* Several may use one store at the same time, each writing its own keys.
    """

    @abstractmethod
    def put_checkpoint(self, key: str, source: Path, info: CheckpointInfo) -> CommittedCheckpoint:
        """Save the files below ``source``; afterwards the caller may change or remove ``source``.

        Links to files below ``source`` are replaced by those files.

        Raises:
            CheckpointError: ``source`` is not a folder, or holds something other than files and
                folders (the message names it).
            StoreError: The key is taken or invalid, or the storage failed; nothing is left behind.
        """

    @abstractmethod
    def open_checkpoint(self, key: str, sha256: str) -> OpenedCheckpoint:
        """Open the checkpoint whose manifest has this hash, with every file verified.

        Raises:
            CheckpointCorrupt: A part, or all of it, is damaged or missing; names key, file,
                expected and found.
            StoreError: The storage failed.
        """

    @abstractmethod
    def get_checkpoint(self, key: str, sha256: str, target: Path) -> Manifest:
        """Copy the checkpoint's verified files into the new folder ``target``, which appears whole.

        Raises:
            CheckpointCorrupt: A part is damaged or missing; names key, file, expected and found.
            StoreError: The storage failed, or ``target`` exists or cannot be written.
        """

    @abstractmethod
    def read_manifest(self, key: str, sha256: str) -> Manifest:
        """Read the checkpoint's manifest, which must have this hash.

        Raises:
            CheckpointCorrupt: It has another hash, or is missing.
            StoreError: The storage failed.
        """

    @abstractmethod
    def delete_checkpoint(self, key: str, keep: Iterable[str] = ()) -> None:
        """Remove the checkpoint, if it exists.

        Args:
            key: The checkpoint's key.
            keep: The names of those of its objects that other checkpoints refer to.

        Raises:
            StoreError: The key is invalid, or the storage failed.
        """

    @abstractmethod
    def delete_objects(self, keys: Iterable[str]) -> None:
        """Remove objects that earlier deletions kept, if they exist.

        Raises:
            StoreError: The storage failed.
        """

    @abstractmethod
    def list_checkpoints(self) -> list[str]:
        """List the keys of all complete checkpoints, sorted."""

    @abstractmethod
    def collect(
        self,
        live: Mapping[str, str],
        is_busy: Callable[[str], bool],
        cancel: CancelToken | None = None,
    ) -> CollectedGarbage:
        """Remove what crashes left, while other processes may write.

        Args:
            live: The checkpoints that stay, with the hashes of their manifests.
            is_busy: Whether a process may be writing the checkpoint with this key; it stays, too.
            cancel: Ends the collection early, partly done.

        Raises:
            TransferCancelled: A thread cancelled it.
            StoreError: The storage failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Close connections; the store must not be used afterwards."""


#: The longest key; stores accept longer ones, file systems do not.
_LONGEST_KEY: Final = 512


def check_key(key: str) -> None:
    """Raise StoreError unless the key is ``<folder>/<name>``, both visible, of bounded length."""
    parts = key[: _LONGEST_KEY + 1].split("/")
    if (
        len(key) > _LONGEST_KEY
        or not is_safe_name(key)
        or len(parts) != 2
        or any(part.startswith(".") for part in parts)
    ):
        raise StoreError(
            f"{shortened(repr(key[:_LONGEST_KEY]))} is not the key of a checkpoint; it must be"
            f" '<trial>/<name>', of at most {_LONGEST_KEY} characters."
        )
