"""`FarmSettings`: how a farm is shared, as whoever runs its scheduler wrote it down.

A file in TOML; everything in it may be left out::

    max_running = 16            # experiments that run at once; the others wait in the queue
    preempts = true             # whether trials are paused for others that come first
    preempt_grace_s = 60        # how long they get to save

    stores = ["s3://data/tune"] # beside the farm's own, searches may use these with its credentials

    [shares]                    # of owners; 1 where nothing is said
    ada = 2

    [quotas.ben]                # what an owner's experiments hold together, at most
    gpu = 4
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Final

import msgspec

from tunemq_scheduler.farm.allotting.settings import AllotterSettings
from tunemq_shared.errors import ConfigError
from tunemq_shared.store_address import canonical_address, is_remote

#: More processes than this need more memory than most heads have.
MAX_RUNNING: Final = 16


class FarmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a farm is shared.

    Attributes:
        max_running: so many experiments have a process at once.
        preempts: whether trials are paused for others that come first.
        preempt_grace_s: how long they get to save; seconds.
        stores: addresses to which the farm's credentials may be sent, beside its own store.
        shares: of owners; 1 where nothing is said.
        quotas: what an owner's experiments hold together at most: resource to amount, by owner.
    """

    max_running: int = MAX_RUNNING
    preempts: bool = True
    preempt_grace_s: float = 60.0
    stores: tuple[str, ...] = ()
    shares: dict[str, float] = {}
    quotas: dict[str, dict[str, float]] = {}

    def for_allotter(self) -> AllotterSettings:
        """Those about who gets what."""
        return AllotterSettings(
            shares=self.shares,
            quotas=self.quotas,
            preempts=self.preempts,
            preempt_grace_s=self.preempt_grace_s,
        )


def read_settings(path: str | None) -> FarmSettings:
    """Those of a file; what holds by itself where there is none.

    Raises:
        ConfigError: it cannot be read, or says something that is of no use; names the field.
    """
    if path is None:
        return FarmSettings()
    try:
        text = Path(path).read_text(encoding="utf-8")
        found = msgspec.convert(tomllib.loads(text), FarmSettings)
    except OSError as error:
        raise ConfigError(f"--settings {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--settings {path} is no text: {error}.") from error
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"--settings {path} is not usable: {error}.") from error
    _check(found, path)
    return msgspec.structs.replace(found, stores=tuple(map(canonical_address, found.stores)))


def _check(settings: FarmSettings, path: str) -> None:
    for store in settings.stores:
        if not is_remote(store):
            raise ConfigError(
                f"{path}: stores has {store!r}, which is no address of a store; give"
                " s3://bucket/prefix?endpoint=... or http://host:port/prefix."
            )
    if settings.max_running < 1:
        raise ConfigError(f"{path}: max_running={settings.max_running} must be 1 or more.")
    if not (math.isfinite(settings.preempt_grace_s) and settings.preempt_grace_s >= 0):
        raise ConfigError(
            f"{path}: preempt_grace_s={settings.preempt_grace_s!r} must be 0 or more seconds."
        )
    for owner, share in settings.shares.items():
        if not (math.isfinite(share) and share > 0):
            raise ConfigError(f"{path}: shares.{owner}={share!r} must be a number above 0.")
    for owner, quota in settings.quotas.items():
        for resource, amount in quota.items():
            if not (math.isfinite(amount) and amount >= 0):
                raise ConfigError(
                    f"{path}: quotas.{owner}.{resource}={amount!r} must be a number of 0 or more."
                )
