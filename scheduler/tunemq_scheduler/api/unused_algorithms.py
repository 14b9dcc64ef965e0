"""`unused`: a search's algorithms begin without the state of an earlier search."""

from __future__ import annotations

import copy
import weakref
from typing import Any, Final, TypeVar

from tunemq_scheduler.schedulers import TrialScheduler
from tunemq_scheduler.search.searcher import Searcher
from tunemq_scheduler.stopping.stopper import Stopper
from tunemq_shared.base.errors import ConfigError

_T = TypeVar("_T")

#: By the id of each algorithm that a search has used: a copy from before, or None if it has none.
_BEFORE: Final[dict[int, Any]] = {}


def unused(given: _T) -> _T:
    """Return an algorithm, or a list of them, as it was before its first search.

    The first search uses the object itself, so that its user can look at it afterwards. Each
    further one uses a copy.

    Args:
        given: a search algorithm, trial scheduler or stopper, or a list of these; anything else is
            returned as it is.

    Raises:
        ConfigError: an earlier search has used it, and it cannot be copied.
    """
    if isinstance(given, list | tuple):
        found = [unused(one) for one in given]
        is_same = all(one is other for one, other in zip(given, found, strict=True))
        return given if is_same else found  # type: ignore[return-value]
    if not isinstance(given, Searcher | TrialScheduler | Stopper):
        return given
    if id(given) not in _BEFORE:
        _BEFORE[id(given)] = _copied(given)
        weakref.finalize(given, _BEFORE.pop, id(given)).atexit = False
        return given
    before: _T | None = _copied(_BEFORE[id(given)])
    if before is None:
        raise ConfigError(
            f"this {type(given).__name__} has the state of an earlier search and cannot be copied; "
            "make another one for each search."
        )
    return before


def _copied(algorithm: _T) -> _T | None:
    try:
        return copy.deepcopy(algorithm)
    except Exception:  # noqa: BLE001  the user's objects in it may raise anything
        return None
