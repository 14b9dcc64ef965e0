"""The one place that unpickles, which runs code of the experiment.

Only an experiment's own processes unpickle: its script, its process on a farm, its trials.
Processes that hold a farm's keys unpickle nothing, and call `never_unpickle` when they start.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tunemq_shared.base.errors import BugError, TrainableError

_is_ruled_out = False


def never_unpickle() -> None:
    """Forbid unpickling in this process and in those that it forks."""
    global _is_ruled_out
    _is_ruled_out = True


def unpickle(pickled: bytes | memoryview, buffers: Iterable[memoryview] = ()) -> Any:
    """Load what `tunemq_shared.base.pickling` pickled; this runs code of the experiment.

    The caller must have checked where the bytes come from. Damaged bytes may raise anything.

    Raises:
        BugError: This process called `never_unpickle`.
    """
    if _is_ruled_out:
        raise BugError("something was to be unpickled in a process that runs nobody's code.")
    import pickle  # not needed in processes that never unpickle

    return pickle.loads(pickled, buffers=buffers)


def load_pickled(
    pickled: bytes | memoryview, subject: str, buffers: Iterable[memoryview] = ()
) -> Any:
    """Unpickle like `unpickle`; ``subject`` begins the sentence of an error.

    Raises:
        TrainableError: The pickle refers to something that cannot be imported here.
        BugError: This process called `never_unpickle`.
    """
    try:
        return unpickle(pickled, buffers)
    except (ImportError, AttributeError) as error:
        raise TrainableError(
            f"{subject} cannot be loaded on this worker: {error}; install what is missing in the "
            "worker's environment, or define it in the script itself."
        ) from error
