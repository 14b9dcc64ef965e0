"""Starting an ear, and the frames that it sends; apart from `ear`, which imports Celery.

Imported before everything else of a node, so it imports next to nothing.
"""

from __future__ import annotations

from typing import Final

from tunemq_workers.child_process import ChildProcess, start_child
from tunemq_workers.redis_address import REDIS_VARIABLE

#: The ear consumes the queue; sent once.
READY: Final = ord("R")
#: A task's argument: base64 of a msgpack Assignment.
MAIL: Final = ord("A")


def start_ear(redis_url: str, incarnation: str, log_path: str) -> ChildProcess:
    """Start an ear; see `start_child`."""
    redis = {REDIS_VARIABLE: redis_url}  # on a command line all could read its password
    return start_child("tunemq_workers.ear", ["--incarnation", incarnation], log_path, redis)
