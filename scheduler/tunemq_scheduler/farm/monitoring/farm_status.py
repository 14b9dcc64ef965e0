"""What a farm's scheduler says of the farm: to all that it is there, and more to who asks."""

from __future__ import annotations

import importlib.metadata
import sys

import msgspec

from tunemq_scheduler.api.farm_answers import FarmAnnouncement, FarmDescription
from tunemq_scheduler.transport.redis.redis_connection import RedisCommand
from tunemq_shared.broker import redis_keys


def announcing(term: int) -> RedisCommand:
    """The command that says that there is a scheduler; again after each reset of the wire.

    Args:
        term: of the scheduler.
    """
    announced = FarmAnnouncement(tunemq=importlib.metadata.version("tunemq"), term=term)
    return ("SET", redis_keys.FARM, msgspec.json.encode(announced))


def described(store: str, scheduler: str, results: str) -> FarmDescription:
    """What submitters need to know.

    Args:
        store: the address of the farm's store, as everybody can use it.
        scheduler: who it is, for people.
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
