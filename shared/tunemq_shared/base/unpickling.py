"""The one place where something is unpickled, which runs code of whoever pickled it.

An experiment's own processes do so: its script, its process on a farm, its trials. Processes that
hold a farm's keys have nothing to unpickle, and rule it out by `never_unpickle` at their start.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tunemq_shared.base.errors import BugError, TrainableError

_is_ruled_out = False


def never_unpickle() -> None:
    """From now on nothing is unpickled in this process, nor in those that it forks."""
    global _is_ruled_out
    _is_ruled_out = True


def unpickle(pickled: bytes | memoryview, buffers: Iterable[memoryview] = ()) -> Any:
    """What was pickled by `tunemq_shared.base.pickling`; runs code of the experiment.

    Where the bytes come from must have been checked before. Damaged ones may raise anything.

    Raises:
        BugError: this process is one that is never to do so.
    """
    if _is_ruled_out:
        raise BugError("something was to be unpickled in a process that runs nobody's code.")
    import pickle  # which those others need not have

    return pickle.loads(pickled, buffers=buffers)


def load_pickled(
    pickled: bytes | memoryview, subject: str, buffers: Iterable[memoryview] = ()
) -> Any:
    """The same; ``subject`` begins the sentence of an error.

    Raises:
        TrainableError: something that it refers to cannot be imported here.
        BugError: this process is one that is never to do so.
    """
    try:
        return unpickle(pickled, buffers)
    except (ImportError, AttributeError) as error:
        raise TrainableError(
            f"{subject} cannot be loaded on this worker: {error}; install what is missing in the "
            "worker's environment, or define it in the script itself."
        ) from error
