"""`HeadWatch`: polls the scheduler's own machine for its metrics, in separate threads.

A disk or a server may block the thread that polls it; the metrics then keep their last values.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from tunemq_scheduler.farm.monitoring.metrics_snapshot import DiskState, HeadSnapshot
from tunemq_scheduler.security.certificate_expiry import certificates_of
from tunemq_scheduler.storage.folders import BACKUP_NOTE
from tunemq_shared.base.errors import TuneError
from tunemq_shared.objects.store_address import is_remote
from tunemq_shared.system.write_probe import write_probe

_DISKS_EVERY_S: Final = 10.0
_CERTIFICATES_EVERY_S: Final = 600.0
#: The pause before a failed certificate check is repeated.
_AGAIN_S: Final = 60.0


class HeadWatch:
    """Polls disks, certificates and the record of the last backup, until `close`.

    Args:
        url: the Redis address.
        results: the folder of all experiments.
        store: the farm's store.
        own: the farm's own folder.
        environ: the environment that names the store's certificates.
    """

    def __init__(
        self, url: str, results: str, store: str, own: Path, environ: Mapping[str, str]
    ) -> None:
        self._url, self._store, self._environ = url, store, environ
        self._folders = {"results": results}
        if not is_remote(store):
            self._folders["store"] = store
        self._note = own / BACKUP_NOTE
        self._disks: dict[str, DiskState] = {}
        self._backup_at: float | None = None
        self._certificates: dict[str, float] = {}
        self._ended = threading.Event()
        for name, look in (
            ("disk watch", self._look_at_disks),
            ("certificate watch", self._look_at_certificates),
        ):
            threading.Thread(target=self._run, args=(look,), name=name, daemon=True).start()

    def seen(self) -> HeadSnapshot:
        """Return the last values; never waits."""
        return HeadSnapshot(
            disks=self._disks, certificates=self._certificates, backup_at=self._backup_at
        )

    def close(self) -> None:
        """Stop polling."""
        self._ended.set()

    def _run(self, look: Callable[[], float]) -> None:
        while not self._ended.wait(look()):
            pass

    def _look_at_disks(self) -> float:
        self._disks = {what: _disk_of(folder) for what, folder in self._folders.items()}
        try:
            self._backup_at = self._note.stat().st_mtime
        except OSError:
            self._backup_at = None
        return _DISKS_EVERY_S

    def _look_at_certificates(self) -> float:
        found, is_complete = dict(self._certificates), True
        for one in certificates_of(self._url, self._store, self._environ):
            try:
                if (expires := one.expires()) is not None:
                    found[one.name] = expires
            except (OSError, ValueError, TuneError):
                # The previous value stays: an expired certificate is rejected from then on.
                is_complete = False
        self._certificates = found
        return _CERTIFICATES_EVERY_S if is_complete else _AGAIN_S


def _disk_of(folder: str) -> DiskState:
    # A write is tested, because Linux does not report every failed file system as read-only (ext4
    # since 6.12).
    is_writable = False
    with suppress(OSError):
        write_probe(folder)
        is_writable = True
    try:
        disk = os.statvfs(folder)
    except OSError:
        return DiskState(is_writable=is_writable)
    return DiskState(
        free=float(disk.f_bavail * disk.f_frsize),
        size=float(disk.f_blocks * disk.f_frsize),
        free_inodes=float(disk.f_favail) if disk.f_files else None,
        is_writable=is_writable,
    )
