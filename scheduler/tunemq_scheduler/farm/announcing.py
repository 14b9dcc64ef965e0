"""What a farm's scheduler tells submitters of the farm."""

from __future__ import annotations

import importlib.metadata
import sys

import msgspec

from tunemq_scheduler.executors.redis_line import Command
from tunemq_shared import wire
from tunemq_shared.answers import FarmAnnouncement


def announcing(term: int, store: str, scheduler: str) -> Command:
    """The command that announces a farm; after each start, and each reset of the wire.

    Args:
        term: of the scheduler.
        store: the address of the farm's store, as everybody can use it.
        scheduler: who it is, for people.
    """
    import cloudpickle

    announced = FarmAnnouncement(
        tunemq=importlib.metadata.version("tunemq"),
        term=term,
        store=store,
        scheduler=scheduler,
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        cloudpickle=str(cloudpickle.__version__),
    )
    return ("SET", wire.FARM, msgspec.json.encode(announced))
