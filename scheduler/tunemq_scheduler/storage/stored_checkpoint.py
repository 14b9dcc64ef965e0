"""`StoredCheckpoint`: a checkpoint in a store, which is read on demand.

Separate from `Checkpoint`, because it can access every kind of store: trial processes never import
it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tunemq_shared.base.errors import CheckpointError
from tunemq_shared.checkpoints.checkpoint import DICT_FILE, METADATA_FILE, Checkpoint
from tunemq_shared.checkpoints.manifest import Manifest
from tunemq_shared.checkpoints.open_store import open_store
from tunemq_shared.checkpoints.store import CheckpointStore
from tunemq_shared.objects.store_address import join, without_settings
from tunemq_shared.system.folder_trees import walk


class StoredCheckpoint(Checkpoint):
    """A committed checkpoint; every byte that is read is verified.

    ``path`` and `as_directory` download into a temporary folder; that of ``path`` exists as long as
    this object. `to_directory` downloads into a folder of the caller. It is pickled as its address,
    so the process that unpickles it needs its own credentials.

    Args:
        address: The address of the experiment's store, see `tunemq_shared.checkpoints.open_store`.
        key: The checkpoint's key there.
        sha256: The hash of its manifest.
    """

    def __init__(self, address: str, key: str, sha256: str) -> None:
        self._path = self._pickled = None
        self._metadata = {}
        self._address = address
        self._key = key
        self._sha256 = sha256
        self._manifest: Manifest | None = None

    @property
    def uri(self) -> str:
        """The address of the checkpoint."""
        return join(self._address, self._key)

    @property
    def is_dict(self) -> bool:
        """Whether the checkpoint was made from a dict; reads its manifest only."""
        return self._has(DICT_FILE)

    def get_metadata(self) -> dict[str, Any]:
        """Return the metadata that was set before it was saved; downloads only if there is any."""
        if not self._has(METADATA_FILE):
            return {}
        return Checkpoint(self.path).get_metadata()

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Reject the call: committed checkpoints do not change.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(
            f"the metadata of {without_settings(self.uri)} cannot be set: a checkpoint in a store "
            "never changes. Set it on a copy: "
            "Checkpoint.from_directory(checkpoint.to_directory(path))."
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(uri={self.uri!r})"

    def __reduce__(self) -> tuple[type[StoredCheckpoint], tuple[str, str, str]]:
        return type(self), (self._address, self._key, self._sha256)

    def _identity(self) -> str:
        return self.uri

    def state(self) -> dict[str, Any]:
        """Return the progress that its trial saved with it; reads its manifest only."""
        return self._read_manifest().state

    def _has(self, name: str) -> bool:
        return any(file.name == name for file in self._read_manifest().files)

    def _read_manifest(self) -> Manifest:
        if self._manifest is None:
            with self._store() as store:
                self._manifest = store.read_manifest(self._key, self._sha256)
        return self._manifest

    def _write_to(self, folder: str) -> None:
        """Download into an existing folder, which may hold other files."""
        # On the target's file system, which has space for it, and where moving it is a rename.
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temporary:
            whole = Path(temporary, "files")
            with self._store() as store:
                self._manifest = store.get_checkpoint(self._key, self._sha256, whole)
            _move_into(whole, folder)

    @contextmanager
    def _store(self) -> Iterator[CheckpointStore]:
        with closing(open_store(self._address)) as store:
            yield store


def _move_into(source: Path, target: str) -> None:
    """Move everything below ``source`` to below ``target``, and replace existing files."""
    for path, folders, files in walk(source):
        below = os.path.join(target, os.path.relpath(path, source))
        for name in folders:
            os.makedirs(os.path.join(below, name), exist_ok=True)
        for name in files:
            os.replace(os.path.join(path, name), os.path.join(below, name))
