"""A farm whose scheduler, workers and submitters are different users of a `secured_redis`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.farms.farm_service import FarmService
from tests.support.farms.secured_redis import SecuredRedis

#: The role of each home; each worker has a separate home.
_ROLES = {"head": "scheduler", "laptop": "submitter", "one": "worker", "two": "worker"}


@contextmanager
def secured_farm(
    folder: Path,
    redis: SecuredRedis,
    *options: str,
    starts: bool = True,
    shows_certificate: bool = False,
    variables: Mapping[str, Mapping[str, str]] | None = None,
) -> Iterator[FarmService]:
    """One with its scheduler, unless that is to be started later; workers are called one and two.

    Args:
        redis: of all of them.
        options: of the scheduler.
        shows_certificate: whether they show one to Redis.
        variables: by role, for its environment.
    """
    folder.mkdir()
    urls = {
        role: redis.url(role, shows_certificate=shows_certificate) for role in set(_ROLES.values())
    }
    farm = FarmService(folder, urls["submitter"])
    for home, role in _ROLES.items():
        farm.of_home[home] = {"TUNEMQ_REDIS": urls[role], **(variables or {}).get(role, {})}
    try:
        if starts:
            farm.start_scheduler(*options)
        yield farm
    finally:
        farm.close()
