"""`CheckpointStore`: where the checkpoints of one experiment are kept, whatever the storage.

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
    """A checkpoint that is wholly in the store: its manifest's hash, its files' size in bytes."""

    key: str
    sha256: str
    size: int


class OpenedCheckpoint(NamedTuple):
    """A folder with a checkpoint's verified files, to be read only, and its manifest."""

    path: Path
    manifest: Manifest


class CollectedGarbage(NamedTuple):
    """How many files or objects were removed because nothing refers to them, and their bytes."""

    objects: int
    bytes: int


class CheckpointStore(ABC):
    """Keeps checkpoints under keys ``<trial's folder>/<checkpoint>``.

    *Atomicity.* A checkpoint is there completely or not at all, at every moment and after any crash
    of the process that writes it. A key is written once and never over another.

    *Trust.* What is read is checked against the hash that the caller knows, before anybody else
    sees a byte of it; names in manifests never lead out of the checkpoint.

    *Processes.* Several may use one store at the same time, each writing keys of its own.
    """

    @abstractmethod
    def put_checkpoint(self, key: str, source: Path, info: CheckpointInfo) -> CommittedCheckpoint:
        """Keep the files below ``source``; when it returns, ``source`` may be changed or removed.

        Links to what is below ``source`` are replaced by what they point to.

        Raises:
            CheckpointError: ``source`` is no folder, or holds what is no file (the message names
                it).
            StoreError: the key is taken or not allowed, or the storage failed: nothing is left
                behind.
        """

    @abstractmethod
    def open_checkpoint(self, key: str, sha256: str) -> OpenedCheckpoint:
        """The checkpoint whose manifest has this hash, every file verified.

        Raises:
            CheckpointCorrupt: something is damaged or missing, be it all of it; names key, file,
                expected and found.
            StoreError: the storage failed.
        """

    @abstractmethod
    def get_checkpoint(self, key: str, sha256: str, target: Path) -> Manifest:
        """Put the checkpoint's verified files into the new folder ``target``, which appears whole.

        Raises:
            CheckpointCorrupt: something is damaged or missing; names key, file, expected and found.
            StoreError: the storage failed, or ``target`` is there or cannot be written.
        """

    @abstractmethod
    def read_manifest(self, key: str, sha256: str) -> Manifest:
        """The checkpoint's manifest, which has this hash.

        Raises:
            CheckpointCorrupt: it has another, or is missing.
            StoreError: the storage failed.
        """

    @abstractmethod
    def delete_checkpoint(self, key: str, keep: Iterable[str] = ()) -> None:
        """Remove the checkpoint; to remove one that is not there is no error.

        Args:
            key: The checkpoint's.
            keep: The names of its own objects that other checkpoints refer to.

        Raises:
            StoreError: the key is not allowed, or the storage failed.
        """

    @abstractmethod
    def delete_objects(self, keys: Iterable[str]) -> None:
        """Remove objects that were kept; to remove one that is not there is no error.

        Raises:
            StoreError: the storage failed.
        """

    @abstractmethod
    def list_checkpoints(self) -> list[str]:
        """The keys of all complete checkpoints, sorted."""

    @abstractmethod
    def collect(
        self,
        live: Mapping[str, str],
        is_busy: Callable[[str], bool],
        cancel: CancelToken | None = None,
    ) -> CollectedGarbage:
        """Remove what crashes left, while others may write.

        Args:
            live: The checkpoints that stay, with the hashes of their manifests.
            is_busy: Whether somebody may be writing the checkpoint with this key; it stays, too.
            cancel: What ends it early, with some of it done.

        Raises:
            Cancelled: it was called off.
            StoreError: the storage failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of connections; the store is not used any more."""


#: Of a key; stores take longer ones, and file systems do not.
_LONGEST_KEY: Final = 512


def check_key(key: str) -> None:
    """StoreError unless the key is ``<folder>/<name>`` of two visible names, of bounded length."""
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
