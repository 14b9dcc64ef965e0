"""Lets a trial's spawned processes have what the user's script defines.

Python's ``multiprocessing`` gives functions and classes to a process that it does not fork by the
names of their modules. What a script, or a notebook, defines is in ``__main__``, and neither a
trial's process nor one that it spawns has the script's. So it is given by value, as TuneMQ gives it
to the trial. It needs no start method of its own, and what comes back arrives in the same way.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any, Final

import cloudpickle

from tunemq_shared.base.unpickling import unpickle

#: How long processes that are asked to end may take, all together.
_GRACE_S: Final = 0.5


def give_scripts_objects_by_value() -> None:
    """From now on, in this process, and in all that get such an object from it."""
    setattr(ForkingPickler, "reducer_override", _reduced)  # noqa: B010  no type has it


def _reduced(_pickler: ForkingPickler, given: Any) -> Any:
    """How to make ``given`` anew, where nobody finds it by its name; the rest is left to Python."""
    if isinstance(given, FunctionType | type) and _is_of_script(given.__module__):
        return _made, (cloudpickle.dumps(given),)
    return NotImplemented


def _is_of_script(module: str) -> bool:
    """Whether it came by value: of the script, or of a module that is only where the script is."""
    return module == "__main__" or module not in sys.modules


def _made(pickled: bytes) -> Any:
    give_scripts_objects_by_value()
    return unpickle(pickled)


def end_children() -> None:
    """End what ``multiprocessing`` has started here; again is allowed.

    At the end of a process Python waits for those that are no daemons, however long they take. A
    trial that is over takes them along.
    """
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    until = time.monotonic() + _GRACE_S
    for child in children:
        child.join(max(0.0, until - time.monotonic()))
        child.kill()
