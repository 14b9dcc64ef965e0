"""`SyncConfig`: which files are copied to the store besides checkpoints, how often, and how."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tunemq_scheduler.output.syncing.syncer import DEFAULT_SYNC_PERIOD, DEFAULT_SYNC_TIMEOUT, Syncer
from tunemq_shared.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Settings of copying files to the store.

    Three kinds of files reach the store: the experiment's own files, each trial's results and
    artifacts, and checkpoints. Nodes upload checkpoints themselves if ``storage_path`` (or
    ``upload_dir``) is ``s3://...``. With a custom syncer, trials write checkpoints into the local
    results folder, and the syncer copies them with the trial's other files.

    Attributes:
        upload_dir (str): the destination if it is not ``storage_path``: an address or path that the
            syncer understands. With ``syncer="auto"``, an ``s3://`` address has the same effect as
            in ``storage_path``.
        syncer (Syncer or str): ``"auto"``, a custom `Syncer` (which needs ``upload_dir``), or None
            to copy nothing.
        sync_period (float): the least seconds between two syncs of one folder. Syncs at a trial's
            end and at checkpoints ignore it.
        sync_timeout (float): seconds after which a transfer is cancelled, and after which a trial
            that waits for an upload fails.
        sync_artifacts (bool): also copy the files that trials write into their folders, and their
            output. False copies only the scheduler's files: results, parameters, errors.
        sync_on_checkpoint (bool): sync a trial's folder at each of its checkpoints, regardless of
            ``sync_period``. Checkpoints that a custom syncer copies are always synced.
        uploads_waiting (int): how many checkpoints of a trial may wait behind the one in upload,
            before `report` waits too.

    Raises:
        ConfigError: a field is invalid; the message names the field, its value and valid values.

    Example:
        >>> from tunemq import RunConfig, SyncConfig
        >>> sync_config = SyncConfig(sync_artifacts=False, sync_timeout=600)
        >>> RunConfig(storage_path="s3://bucket/mnist", sync_config=sync_config).sync_config.syncer
        'auto'
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
        """Check that the syncer supports the destination; return True.

        Raises:
            ConfigError: it does not; the message names supported destinations.
        """
        if isinstance(self.syncer, Syncer):
            return self.syncer.validate_upload_dir(self.upload_dir)
        from tunemq_scheduler.output.syncing.default_syncer import DefaultSyncer

        return DefaultSyncer.validate_upload_dir(self.upload_dir)


def _bad(name: str, value: object, fix: str) -> ConfigError:
    return ConfigError(f"SyncConfig({name}={value!r}) is invalid: {fix}.")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
