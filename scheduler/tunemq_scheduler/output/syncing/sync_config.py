"""`SyncConfig`: what is copied to the store besides checkpoints, how often, and by whom."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tunemq_scheduler.output.syncing.syncer import DEFAULT_SYNC_PERIOD, DEFAULT_SYNC_TIMEOUT, Syncer
from tunemq_shared.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """What reaches the store, and when.

    Four things do: the experiment's own files; each trial's results and artifacts; checkpoints,
    which nodes upload by themselves to a ``storage_path`` (or ``upload_dir``) of ``s3://...``; or,
    with a custom syncer, checkpoints that were written to the local results folder and are copied
    with the trial's other files.

    Attributes:
        upload_dir: where to, if not to ``storage_path``: an address or a path that the syncer
            knows. An ``s3://`` address with ``syncer="auto"`` is the same as that ``storage_path``.
        syncer: who copies: ``"auto"``, a `Syncer` of yours (which needs ``upload_dir``), or None
            for nobody.
        sync_period: seconds at least between two syncs of one folder, unless it has to be synced
            (at a trial's end, and on checkpoints).
        sync_timeout: seconds after which any transfer is cancelled, and a trial that waits for an
            upload fails.
        sync_artifacts: copy what trials write into their folders too, and their output; without it
            only what the scheduler writes there (results, parameters, errors).
        sync_on_checkpoint: a trial's checkpoint syncs its folder, whenever that was done last.
            Checkpoints that a custom syncer carries are never left out.
        uploads_waiting: how many checkpoints of a trial may wait behind the one that is uploaded,
            before its `report` waits too.
    """

    upload_dir: str | None = None
    syncer: Syncer | Literal["auto"] | None = "auto"
    sync_period: float = DEFAULT_SYNC_PERIOD
    sync_timeout: float = DEFAULT_SYNC_TIMEOUT
    sync_artifacts: bool = True
    sync_on_checkpoint: bool = True
    uploads_waiting: int = 1

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: naming the field, its value and what it may be.
        """
        if not (self.upload_dir is None or _is_text(self.upload_dir)):
            raise _bad("upload_dir", self.upload_dir, "give an address or a path, or None")
        if not (self.syncer in (None, "auto") or isinstance(self.syncer, Syncer)):
            fix = (
                "give 'auto', None, or an object whose class derives from tune.syncer.Syncer;"
                " functions and command templates are not taken"
            )
            raise _bad("syncer", self.syncer, fix)
        if self.upload_dir and self.syncer is None:
            fix = f"upload_dir={self.upload_dir!r} needs one; give 'auto', or leave upload_dir out"
            raise _bad("syncer", None, fix)
        if not self.upload_dir and isinstance(self.syncer, Syncer):
            raise _bad("upload_dir", None, "a syncer of your own needs to be told where to")
        if not _is_number(self.sync_period) or not 0 <= self.sync_period < math.inf:
            raise _bad("sync_period", self.sync_period, "give seconds, 0 for no pause")
        if not _is_number(self.sync_timeout) or not 0 < self.sync_timeout < math.inf:
            raise _bad("sync_timeout", self.sync_timeout, "give seconds above 0")
        for name in ("sync_artifacts", "sync_on_checkpoint"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, getattr(self, name), "give True or False")
        waiting = self.uploads_waiting
        if not isinstance(waiting, int) or isinstance(waiting, bool) or waiting < 0:
            raise _bad("uploads_waiting", waiting, "give a whole number from 0")

    def validate_upload_dir(self) -> bool:
        """Say that the syncer knows this kind of destination.

        Raises:
            ConfigError: it does not; says what would do.
        """
        if isinstance(self.syncer, Syncer):
            return self.syncer.validate_upload_dir(self.upload_dir)
        from tunemq_scheduler.output.syncing.default_syncer import DefaultSyncer

        return DefaultSyncer.validate_upload_dir(self.upload_dir)


def _bad(name: str, value: object, fix: str) -> ConfigError:
    return ConfigError(f"SyncConfig({name}={value!r}) is not usable: {fix}.")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
