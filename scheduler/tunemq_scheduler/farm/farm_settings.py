"""`FarmSettings`: how a farm is shared, from the TOML file of its operator.

All settings are optional::

    max_running = 16            # experiments that run at once; the others wait in the queue
    preempts = true             # whether trials are paused for others that come first
    preempt_grace_s = 60        # how long paused trials get to save

    stores = ["s3://data/tune"] # further stores that searches may use; see `AllowedStore`

    [shares]                    # of owners; the default is 1
    ada = 2

    [quotas.ben]                # the most that an owner's experiments hold together
    gpu = 4
"""

from __future__ import annotations

import math
import os
import tomllib
from pathlib import Path
from typing import Final

import msgspec

from tunemq_scheduler.farm.allocation.members import FairShareSettings
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.objects.allowed_stores import why_not_allowed
from tunemq_shared.objects.store_address import canonical_address, is_remote, without_settings
from tunemq_shared.signing.key_files import SUBMITTER_NAME

#: More processes than this need more memory than most head machines have.
MAX_RUNNING: Final = 16
#: Common misspellings of the resources that every node has.
_MISSPELT: Final = {"gpus": "gpu", "gpu": "gpu", "cpus": "cpu", "cpu": "cpu", "memory": "memory"}


class AllowedStore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A store that searches may use beside the farm's own.

    Attributes:
        address: the address; everything below it is included. A store on another server than the
            farm's store needs a profile, because the farm's own keys are not sent there.
        owners: whose searches may use it; None for all owners.
    """

    address: str
    owners: tuple[str, ...] | None = None


class FarmSettings(FairShareSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a farm is shared; `FairShareSettings` has the other fields.

    Attributes:
        max_running: how many experiments have a process at once.
        unresponsive_after_s: a search whose own code (callbacks, loggers, stoppers, search
            algorithm) has not returned for this long is restarted; seconds.
        stores: stores that searches may use beside the farm's own; a plain address is for all
            owners.
    """

    max_running: int = MAX_RUNNING
    unresponsive_after_s: float = 600.0
    stores: tuple[AllowedStore | str, ...] = ()

    def stores_of(self, owner: str | None) -> tuple[str, ...]:
        """Return the further stores of an owner's searches; for None, those of any owner."""
        return tuple(
            one.address
            for one in map(_allowed, self.stores)
            if owner is None or one.owners is None or owner in one.owners
        )


def read_settings(path: str | None, store: str = "") -> FarmSettings:
    """Read the settings from a file, or return the defaults without one.

    Args:
        path: the TOML file; None for the defaults.
        store: the farm's own store.

    Raises:
        ConfigError: the file cannot be read, or a value is invalid; names the field.
    """
    if path is None:
        return FarmSettings()
    try:
        text = Path(path).read_text(encoding="utf-8")
        given = tomllib.loads(text)
        found = msgspec.convert(given, FarmSettings)
    except OSError as error:
        raise ConfigError(f"--settings {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--settings {path} is not text: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--settings {path} is invalid: {error}.") from error
    except msgspec.ValidationError as error:
        there_are = FarmSettings.__struct_fields__
        unknown = [name for name in given if name not in there_are]
        fix = f" Valid names: {', '.join(there_are)}." if unknown else ""
        raise ConfigError(f"--settings {path} is invalid: {error}.{fix}") from error
    _check(found, path)
    stores = tuple(_checked(one, path, store) for one in map(_allowed, found.stores))
    return msgspec.structs.replace(found, stores=stores)


def _allowed(given: AllowedStore | str) -> AllowedStore:
    return AllowedStore(address=given) if isinstance(given, str) else given


def _checked(given: AllowedStore, path: str, own: str) -> AllowedStore:
    if not is_remote(given.address):
        raise ConfigError(
            f"{path}: stores has {given.address!r}, which is not the address of a store; write "
            "s3://bucket/prefix?endpoint=...&profile=NAME."
        )
    owners = given.owners
    if owners is not None and not (owners and all(map(SUBMITTER_NAME.fullmatch, owners))):
        raise ConfigError(
            f"{path}: stores: owners={list(owners)!r} of {without_settings(given.address)!r} "
            "must be names of submitters; remove owners to allow that store to all."
        )
    try:
        address = canonical_address(given.address)
    except ConfigError as error:
        raise ConfigError(f"{path}: stores: {error}") from None
    if why := why_not_allowed(address, own, os.environ):
        raise ConfigError(f"{path}: stores has {without_settings(address)!r}, which {why}.")
    return msgspec.structs.replace(given, address=address)


def _check(settings: FarmSettings, path: str) -> None:
    if settings.max_running < 1:
        raise ConfigError(f"{path}: max_running={settings.max_running} must be 1 or more.")
    if not (math.isfinite(settings.preempt_grace_s) and settings.preempt_grace_s >= 0):
        raise ConfigError(
            f"{path}: preempt_grace_s={settings.preempt_grace_s!r} must be 0 or more seconds."
        )
    if not (math.isfinite(settings.unresponsive_after_s) and settings.unresponsive_after_s > 0):
        raise ConfigError(
            f"{path}: unresponsive_after_s={settings.unresponsive_after_s!r} must be more than 0"
            " seconds."
        )
    for owner, share in settings.shares.items():
        if not (math.isfinite(share) and share > 0):
            raise ConfigError(f"{path}: shares.{owner}={share!r} must be a number above 0.")
    for owner, quota in settings.quotas.items():
        for resource, amount in quota.items():
            if (meant := _MISSPELT.get(resource.lower(), resource)) != resource:
                raise ConfigError(f"{path}: quotas.{owner}.{resource} is invalid: use {meant!r}.")
            if not (math.isfinite(amount) and amount >= 0):
                raise ConfigError(
                    f"{path}: quotas.{owner}.{resource}={amount!r} must be a number of 0 or more."
                )
