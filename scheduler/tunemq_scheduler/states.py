"""The states of algorithms: who offers one, and whether it can be believed to be all of it.

A state is a dict of JSON values. It may hold NaN and infinities, as Python's `json` does.
"""

from __future__ import annotations

import json
from typing import Any, Final, Protocol

from tunemq_shared.errors import TuneError

_OURS: Final = "tunemq_scheduler."


class HasState(Protocol):
    """A search algorithm, searcher, trial scheduler or stopper."""

    def get_state(self) -> dict[str, Any] | None:
        """The state; None if it offers none."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Take what `get_state` gave."""


def state_of(algorithm: HasState) -> dict[str, Any] | None:
    """The state that an algorithm offers; None if there is none that holds all of it.

    A subclass of one of ours may remember more than the base knows of: it is believed only if it
    has a ``get_state`` of its own.
    """
    kind = type(algorithm)
    owner = next(one for one in kind.__mro__ if "get_state" in vars(one))
    if owner is not kind and not kind.__module__.startswith(_OURS):
        return None
    return algorithm.get_state()


def pack_state(who: str, state: dict[str, Any]) -> bytes:
    """The state as JSON.

    Raises:
        TuneError: it holds what JSON does not know; ``who`` gave it.
    """
    try:
        return json.dumps(state).encode()
    except (TypeError, ValueError) as error:
        raise TuneError(
            f"{who}.get_state() gave what is no JSON value ({error}); return dicts with text as "
            "keys, lists, numbers, text, booleans and None, or None for no state."
        ) from error


def unpack_state(packed: bytes) -> dict[str, Any]:
    """The state that `pack_state` packed."""
    state: dict[str, Any] = json.loads(packed)
    return state
