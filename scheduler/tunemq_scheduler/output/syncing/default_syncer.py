"""`DefaultSyncer`: copies to and from object stores, ``file://`` addresses and paths."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

from tunemq_scheduler.output.syncing.background_syncer import BackgroundSyncer, SyncCommand
from tunemq_scheduler.output.syncing.mirroring import (
    MirroredFiles,
    delete_folder,
    download_folder,
    upload_folder,
)
from tunemq_scheduler.output.syncing.syncer import Syncer
from tunemq_shared.base.errors import ConfigError

#: The supported address schemes, besides paths.
_KNOWN: Final = ("s3://", "file://")


class DefaultSyncer(BackgroundSyncer):
    """Copy between local folders and an object store, or another (NFS) folder.

    It copies only files that changed since their last copy; each appears atomically. If a store
    does not answer, it retries with growing pauses until ``sync_timeout``.
    """

    @cached_property
    def _copied(self) -> MirroredFiles:
        return MirroredFiles()

    def _sync_up_command(self, local_path: str, uri: str, exclude: Sequence[str]) -> SyncCommand:
        arguments = {"local_path": local_path, "uri": uri, "exclude": tuple(exclude)}
        return upload_folder, {**arguments, "copied": self._copied}

    def _sync_down_command(self, uri: str, local_path: str, exclude: Sequence[str]) -> SyncCommand:
        arguments = {"uri": uri, "local_path": local_path, "exclude": tuple(exclude)}
        return download_folder, {**arguments, "copied": self._copied}

    def _delete_command(self, uri: str) -> SyncCommand:
        return delete_folder, {"uri": uri, "copied": self._copied}

    @classmethod
    def validate_upload_dir(cls, upload_dir: str | None) -> bool:
        """See `Syncer.validate_upload_dir`.

        Raises:
            ConfigError: it is not a path and has a scheme other than ``s3``, ``http(s)`` and
                ``file``.
        """
        if upload_dir and "://" in upload_dir and not upload_dir.startswith(_KNOWN):
            scheme = upload_dir.partition("://")[0]
            raise ConfigError(
                f"upload_dir={upload_dir!r}: the scheme {scheme}:// is unknown; use "
                "s3://bucket/prefix, file:///folder or /folder, or your own syncer with "
                "SyncConfig(syncer=...)."
            )
        return Syncer.validate_upload_dir(upload_dir)

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings: another process copies everything once."""
        state = super().__getstate__()
        state.pop("_copied", None)
        return state
