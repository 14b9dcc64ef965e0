"""The states of algorithms: who offers one, and whether it can be believed to be all of it.

A state is a dict of JSON values. It may hold NaN and infinities, as Python's `json` does.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, Final

from tunemq_shared.base.errors import ConfigError

_OURS: Final = "tunemq_scheduler."


class Stateful:
    """A searcher, trial scheduler or stopper; it may offer a state."""

    def get_state(self) -> dict[str, Any] | None:
        """The state as JSON values, which saves telling it the history; None if it offers none."""
        return None

    def set_state(self, state: dict[str, Any]) -> None:
        """Take a state that `get_state` gave; called once it is set up, before it is told more."""
        raise NotImplementedError(f"{type(self).__name__} has no state to set.")


class Stateless(Stateful):
    """One whose answers depend on nothing but what it is asked about."""

    def get_state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take nothing."""


def state_of(algorithm: Stateful) -> dict[str, Any] | None:
    """The state that an algorithm offers; None if there is none that holds all of it.

    A subclass of one of ours may remember more than the base knows of: it is believed only if it
    has a ``get_state`` of its own.

    Raises:
        ConfigError: somebody else's algorithm gave what JSON does not know.
    """
    kind = type(algorithm)
    owner = next(one for one in kind.__mro__ if "get_state" in vars(one))
    if owner is not kind and not kind.__module__.startswith(_OURS):
        return None
    state = algorithm.get_state()
    if state is not None and not kind.__module__.startswith(_OURS):
        pack_state(kind.__name__, state)  # here, where its name is known: ours may wrap it
    return state


def pack_state(who: str, state: dict[str, Any]) -> bytes:
    """The state as JSON.

    Raises:
        ConfigError: it holds what JSON does not know; ``who`` gave it.
    """
    try:
        return json.dumps(state).encode()
    except (TypeError, ValueError, RecursionError) as error:
        place = f"{who}.get_state()"
        with suppress(RecursionError):
            place = _unknown_to_json(state, place) or place
        raise ConfigError(
            f"{place} is no JSON value ({error}); return dicts with text as keys, lists, numbers, "
            "text, booleans and None, or None for no state."
        ) from error


def _unknown_to_json(value: Any, place: str) -> str | None:
    """Where the first thing is that JSON does not know, and of which type it is."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    parts: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        for key in value:
            if not (key is None or isinstance(key, str | int | float)):
                return f"{place} has the key {key!r} of the type {type(key).__qualname__}, and so"
        parts = [(f"{place}[{key!r}]", one) for key, one in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"{place}[{number}]", one) for number, one in enumerate(value)]
    elif not (value is None or isinstance(value, str | int | float)):
        return f"{place}, of the type {kind},"
    return next(filter(None, (_unknown_to_json(one, where) for where, one in parts)), None)


def unpack_state(packed: bytes) -> dict[str, Any]:
    """The state that `pack_state` packed."""
    state: dict[str, Any] = json.loads(packed)
    return state
