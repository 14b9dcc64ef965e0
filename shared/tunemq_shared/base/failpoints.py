"""Places in the code where tests make a process die, fail or wait.

``TUNEMQ_FAILPOINTS`` says which, for each process that has it in its environment:

    upload.before_manifest=kill                  SIGKILL to itself, the first time it comes there
    upload.before_manifest=kill@3                ... the third time that this process comes there
    cache.before_copy=error,written.before_send=delay:0.5

``error`` raises OSError(EIO), ``delay`` sleeps so many seconds. A forked process counts anew.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import time
from collections.abc import Iterator
from typing import Final

VARIABLE: Final = "TUNEMQ_FAILPOINTS"


class _Armed:
    """What happens at one failpoint: the action of each time that has one."""

    def __init__(self) -> None:
        self.actions: dict[int, str] = {}
        self.times: Iterator[int] = itertools.count(1)  # counts without a lock in several threads


#: None until the environment was read; empty where nothing is to fail.
_armed: dict[str, _Armed] | None = None


def failpoint(name: str) -> None:
    """Do here what ``TUNEMQ_FAILPOINTS`` says, if it names this place.

    Raises:
        OSError: it says ``error``.
        ValueError: it cannot be read.
    """
    if _armed is None:
        _arm()
    if _armed and (armed := _armed.get(name)) is not None:
        _perform(name, armed.actions.get(next(armed.times), ""))


def _arm() -> None:
    global _armed
    armed: dict[str, _Armed] = {}
    for part in filter(None, os.environ.get(VARIABLE, "").split(",")):
        name, _, rest = part.partition("=")
        action, _, nth = rest.partition("@")
        armed.setdefault(name, _Armed()).actions[int(nth or 1)] = action
    _armed = armed


def _disarm() -> None:
    """A forked process counts anew, and may have been given another environment."""
    global _armed
    _armed = None


os.register_at_fork(after_in_child=_disarm)


def _perform(name: str, action: str) -> None:
    what, _, seconds = action.partition(":")
    match what:
        case "":
            pass
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "error":
            raise OSError(errno.EIO, f"failpoint {name}")
        case "delay":
            time.sleep(float(seconds))
        case _:
            raise ValueError(f"{VARIABLE} has the unknown action {action!r}")
