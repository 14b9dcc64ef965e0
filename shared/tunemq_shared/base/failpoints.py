"""Failpoints: places in the code where a test makes a process die, fail or wait.

``TUNEMQ_FAILPOINTS`` arms them in each process whose environment has it:

    upload.before_manifest=kill                  SIGKILL itself, the first time it gets there
    upload.before_manifest=kill@3                ... the third time that this process gets there
    cache.before_copy=error,written.before_send=delay:0.5

``error`` raises OSError(EIO), ``delay`` sleeps that many seconds. A forked process counts from 1.
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
    """One failpoint: which action happens at which pass."""

    def __init__(self) -> None:
        self.actions: dict[int, str] = {}
        self.times: Iterator[int] = itertools.count(1)  # counts without a lock in several threads


#: None until the environment is read; empty if no failpoint is armed.
_armed: dict[str, _Armed] | None = None


def failpoint(name: str) -> None:
    """Perform the action that ``TUNEMQ_FAILPOINTS`` names for this place, if any.

    Raises:
        OSError: The action is ``error``.
        ValueError: The variable has an unknown action.
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
    """Forget the actions: a forked process counts from 1 and may have another environment."""
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
