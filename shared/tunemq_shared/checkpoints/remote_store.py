"""A `CheckpointStore` in an object store, for programs without a node's cache."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tunemq_shared.base.errors import CheckpointCorrupt, StoreError
from tunemq_shared.base.retrying import CancelToken, retried
from tunemq_shared.checkpoints import object_checkpoints
from tunemq_shared.checkpoints.local_store import LocalCheckpointStore
from tunemq_shared.checkpoints.manifest import (
    FILES,
    MANIFEST,
    MAX_MANIFEST,
    CheckpointInfo,
    Manifest,
)
from tunemq_shared.checkpoints.store import (
    CheckpointStore,
    CollectedGarbage,
    CommittedCheckpoint,
    OpenedCheckpoint,
    check_key,
)
from tunemq_shared.objects.object_store import NoSuchObject, ObjectStore
from tunemq_shared.system.folder_trees import remove_tree


class RemoteCheckpointStore(CheckpointStore):
    """The checkpoints of one experiment in an object store.

    `open_checkpoint` downloads into a temporary folder, which `close` removes.

    Args:
        objects: The object store; closed with this store.
        timeout_s: Seconds that one transfer may take.
    """

    def __init__(self, objects: ObjectStore, *, timeout_s: float = 1800.0) -> None:
        self.objects = objects
        self._timeout_s = timeout_s
        self._temporary: Path | None = None

    def put_checkpoint(self, key: str, source: Path, info: CheckpointInfo) -> CommittedCheckpoint:
        """See `CheckpointStore.put_checkpoint`."""
        check_key(key)
        cancel = CancelToken(self._timeout_s)
        if retried(lambda: self._is_there(key), cancel):
            raise StoreError(f"checkpoint {key} is there already; a key is never written twice.")
        with tempfile.TemporaryDirectory(dir=self._folder()) as copies:
            LocalCheckpointStore(copies, durable=False).put_checkpoint(key, source, info)
            uploaded = object_checkpoints.upload(self.objects, key, Path(copies, key), None, cancel)
        return CommittedCheckpoint(key, uploaded.sha256, uploaded.size)

    def open_checkpoint(self, key: str, sha256: str) -> OpenedCheckpoint:
        """See `CheckpointStore.open_checkpoint`."""
        folder = Path(tempfile.mkdtemp(dir=self._folder()), key)
        manifest = object_checkpoints.download(
            self.objects, key, sha256, folder, CancelToken(self._timeout_s)
        )
        return OpenedCheckpoint(folder / FILES, manifest)

    def get_checkpoint(self, key: str, sha256: str, target: Path) -> Manifest:
        """See `CheckpointStore.get_checkpoint`."""
        cancel = CancelToken(self._timeout_s)
        manifest = self.read_manifest(key, sha256)
        if os.path.lexists(target):
            raise StoreError(f"checkpoint {key} cannot be put into {target}: it is there already.")
        built = target.with_name(f".{target.name}.{os.urandom(6).hex()}")
        try:
            object_checkpoints.fetch_files(self.objects, key, manifest, built, cancel)
            built.rename(target)
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(
                f"checkpoint {key} cannot be put into {target}: "
                f"{error.filename or target}: {error.strerror}."
            ) from error
        finally:
            remove_tree(built)
        return manifest

    def read_manifest(self, key: str, sha256: str) -> Manifest:
        """See `CheckpointStore.read_manifest`."""
        return object_checkpoints.read_manifest(self.objects, key, sha256)

    def delete_checkpoint(self, key: str, keep: Iterable[str] = ()) -> None:
        """See `CheckpointStore.delete_checkpoint`."""
        object_checkpoints.delete_checkpoint(self.objects, key, keep)

    def delete_objects(self, keys: Iterable[str]) -> None:
        """See `CheckpointStore.delete_objects`."""
        object_checkpoints.delete_objects(self.objects, keys)

    def list_checkpoints(self) -> list[str]:
        """See `CheckpointStore.list_checkpoints`."""
        return object_checkpoints.list_checkpoints(self.objects)

    def collect(
        self,
        live: Mapping[str, str],
        is_busy: Callable[[str], bool],
        cancel: CancelToken | None = None,
    ) -> CollectedGarbage:
        """See `CheckpointStore.collect`."""
        return object_checkpoints.collect(self.objects, live, is_busy, cancel)

    def close(self) -> None:
        """See `CheckpointStore.close`."""
        self.objects.close()
        if self._temporary is not None:
            remove_tree(self._temporary)
            self._temporary = None

    def _folder(self) -> Path:
        if self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="tunemq-"))
        return self._temporary

    def _is_there(self, key: str) -> bool:
        try:
            self.objects.get_bytes(f"{key}/{MANIFEST}", limit=MAX_MANIFEST)
        except NoSuchObject:
            return False
        except CheckpointCorrupt:
            return True
        return True
