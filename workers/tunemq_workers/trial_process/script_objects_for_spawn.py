"""Passes functions and classes of the user's script to processes that a trial spawns.

Python's ``multiprocessing`` pickles functions and classes by module name for processes that it does
not fork. Those of a script or notebook are in ``__main__``, but neither a trial process nor its
children have the script's ``__main__``. So this module pickles them by value, as TuneMQ does for
trials. That works with each start method and for results, too.
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

#: How long child processes may take to end after SIGTERM, all together.
_GRACE_S: Final = 0.5


def give_scripts_objects_by_value() -> None:
    """Pickle the script's objects by value from now on, here and in processes that receive one."""
    setattr(ForkingPickler, "reducer_override", _reduced)  # noqa: B010  no type has it


def _reduced(_pickler: ForkingPickler, given: Any) -> Any:
    """Pickle ``given`` by value if other processes cannot import it; leave the rest to Python."""
    if isinstance(given, FunctionType | type) and _is_of_script(given.__module__):
        return _made, (cloudpickle.dumps(given),)
    return NotImplemented


def _is_of_script(module: str) -> bool:
    """Return whether an object came by value: from ``__main__`` or a module that is not loaded."""
    return module == "__main__" or module not in sys.modules


def _made(pickled: bytes) -> Any:
    give_scripts_objects_by_value()
    return unpickle(pickled)


def end_children() -> None:
    """End all children that ``multiprocessing`` started here; further calls do nothing.

    At its end Python waits for children that are not daemons, however long they run. Children of a
    trial that has ended must not run on.
    """
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    until = time.monotonic() + _GRACE_S
    for child in children:
        child.join(max(0.0, until - time.monotonic()))
        child.kill()
