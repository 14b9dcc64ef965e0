"""Resolves where an experiment's files and checkpoints go: a local folder, and a store if any."""

from __future__ import annotations

import os
import re
from typing import Final, NamedTuple

from tunemq_scheduler.settings.config import RunConfig
from tunemq_scheduler.storage.folders import make_experiment_folder, results_folder
from tunemq_shared.base.errors import ConfigError, StoreError
from tunemq_shared.checkpoints.open_store import check_allowed, open_objects
from tunemq_shared.objects.store_address import canonical_address, is_remote, join

#: An address that `pathlib.Path` damaged: one slash instead of two.
_CRIPPLED: Final = re.compile(r"[a-z0-9]+:/[^/]")


class StorageLocation(NamedTuple):
    """A local folder, and the address of the checkpoint store; empty if that is the folder."""

    folder: str
    store: str


def storage_of(run: RunConfig) -> StorageLocation:
    """Return the location for all experiments with these settings.

    Raises:
        ConfigError: an address is unusable or not allowed, or two settings name different stores.
    """
    sync = run.sync_config
    given = os.fspath(run.storage_path) if run.storage_path is not None else ""
    if _CRIPPLED.match(given):
        raise ConfigError(
            f"RunConfig(storage_path=Path({given!r})) is invalid: a Path cannot hold an "
            "address, which has two slashes; give it as a str."
        )
    if not is_remote(given):
        uploads = sync.upload_dir or ""
        to_store = sync.syncer == "auto" and is_remote(uploads)
        store = canonical_address(uploads) if to_store else ""
        check_allowed(store, "SyncConfig(upload_dir)")
        return StorageLocation(results_folder(given), store)
    if sync.upload_dir is not None:
        raise ConfigError(
            f"RunConfig(storage_path={given!r}) and SyncConfig(upload_dir={sync.upload_dir!r}) "
            "both name the place where files go; leave one of them out."
        )
    store = canonical_address(given)
    check_allowed(store, "RunConfig(storage_path)")
    return StorageLocation(results_folder(None), store)


def make_storage(among: StorageLocation, name: str) -> StorageLocation:
    """Create the location of a new experiment; a name that exists gets a number appended.

    Args:
        among: the location of all experiments.
        name: the experiment's name.

    Raises:
        ConfigError: the folder cannot be created or written.
        StoreError: the store cannot be used; the message says what to do. Nothing was created.
    """
    if not among.store:
        return StorageLocation(make_experiment_folder(among.folder, name, is_new=True), "")
    try:
        open_objects(among.store).probe()
    except StoreError as error:
        # The message contains the client's error; its traceback of a hundred lines adds nothing.
        raise error.with_traceback(None) from None

    def is_taken(name: str) -> bool:
        return next(iter(open_objects(join(among.store, name)).list()), None) is not None

    folder = make_experiment_folder(among.folder, name, is_new=True, is_taken=is_taken)
    return StorageLocation(folder, join(among.store, os.path.basename(folder)))
