"""`unused`: a search's algorithms begin without the state of an earlier search."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any, Final, TypeVar

from tunemq_scheduler.schedulers import TrialScheduler
from tunemq_scheduler.search.concurrency import ConcurrencyLimiter
from tunemq_scheduler.search.searcher import Searcher
from tunemq_scheduler.stopping.stopper import CombinedStopper, Stopper
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
    parts = list(_parts(given))
    used = [one for one in parts if id(one) in _BEFORE]
    if not used:
        for one in parts:
            _BEFORE[id(one)] = _copied(one)
            weakref.finalize(one, _BEFORE.pop, id(one)).atexit = False
        return given
    memo = {id(one): _copied(_BEFORE[id(one)]) for one in used}
    again: _T | None = memo.get(id(given)) or _copied(given, memo)
    if again is None or None in memo.values():
        raise ConfigError(
            f"this {type(used[0]).__name__} has the state of an earlier search and cannot be "
            "copied; make another one for each search."
        )
    return again


def _parts(algorithm: Any) -> Iterator[Any]:
    """Yield an algorithm and those that it wraps."""
    yield algorithm
    if isinstance(algorithm, ConcurrencyLimiter):
        yield from _parts(algorithm.searcher)
    elif isinstance(algorithm, CombinedStopper):
        for one in algorithm.stoppers:
            yield from _parts(one)


def _copied(algorithm: _T, memo: dict[int, Any] | None = None) -> _T | None:
    """Return a copy, or None; with ``memo``, its parts with these ids are replaced by others."""
    try:
        return copy.deepcopy(algorithm, memo)
    except Exception:  # noqa: BLE001  whatever the user's objects raise: `unused` says it
        return None
