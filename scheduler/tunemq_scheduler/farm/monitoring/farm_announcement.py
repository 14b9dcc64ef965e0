"""The announcement of a farm's scheduler, and its description of the farm."""

from __future__ import annotations

import importlib.metadata
import sys

import msgspec

from tunemq_scheduler.api.farm_answer_types import FarmAnnouncement, FarmDescription
from tunemq_scheduler.transport.redis.redis_connection import RedisCommand
from tunemq_shared.broker import redis_keys


def announcing(term: int) -> RedisCommand:
    """Return the command that announces the scheduler; repeated after each reset of Redis.

    Args:
        term: the term of the scheduler.
    """
    announced = FarmAnnouncement(tunemq=importlib.metadata.version("tunemq"), term=term)
    return ("SET", redis_keys.FARM, msgspec.json.encode(announced))


def described(store: str, scheduler: str, results: str) -> FarmDescription:
    """Describe the farm for submitters.

    Args:
        store: the address of the farm's store, in a form that all users can use.
        scheduler: the scheduler's name, for people.
        results: the folder of all experiments.
    """
    import cloudpickle

    return FarmDescription(
        store=store,
        scheduler=scheduler,
        results=results,
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        cloudpickle=str(cloudpickle.__version__),
    )
