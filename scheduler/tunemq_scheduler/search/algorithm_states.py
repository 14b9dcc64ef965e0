"""The saved states of algorithms, and the check whether such a state is complete.

A state is a dict of JSON values. It may contain NaN and infinities, as in Python's `json`.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, Final

from tunemq_shared.base.errors import ConfigError

_OURS: Final = "tunemq_scheduler."


class Stateful:
    """Base class of searchers, trial schedulers and stoppers; it may offer a state."""

    def get_state(self) -> dict[str, Any] | None:
        """Return the state as JSON values, which replaces a replay of the history; or None."""
        return None

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state that `get_state` returned; called after set-up, before any other call."""
        raise NotImplementedError(f"{type(self).__name__} has no state to set.")


class Stateless(Stateful):
    """Base class of algorithms whose answers depend only on the arguments of the call."""

    def get_state(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Do nothing."""


def state_of(algorithm: Stateful) -> dict[str, Any] | None:
    """Return an algorithm's state; None if it offers none, or one that may be incomplete.

    A subclass of one of our classes may have more state than its base knows: its state counts only
    if it overrides ``get_state``.

    Raises:
        ConfigError: a user's algorithm returned a value that JSON cannot represent.
    """
    kind = type(algorithm)
    owner = next(one for one in kind.__mro__ if "get_state" in vars(one))
    if owner is not kind and not kind.__module__.startswith(_OURS):
        return None
    state = algorithm.get_state()
    if state is not None and not kind.__module__.startswith(_OURS):
        pack_state(kind.__name__, state)  # check where the name is known
    return state


def pack_state(who: str, state: dict[str, Any]) -> bytes:
    """Encode a state as JSON.

    Raises:
        ConfigError: ``who`` returned a value that JSON cannot represent.
    """
    try:
        return json.dumps(state).encode()
    except (TypeError, ValueError, RecursionError) as error:
        place = f"{who}.get_state()"
        with suppress(RecursionError):
            place = _unknown_to_json(state, place) or place
        raise ConfigError(
            f"{place} is not a JSON value ({error}); return dicts with text as keys, lists, "
            "numbers, text, booleans and None, or None for no state."
        ) from error


def _unknown_to_json(value: Any, place: str) -> str | None:
    """Return the place and type of the first value that JSON cannot represent."""
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
    """Decode a state that `pack_state` encoded."""
    state: dict[str, Any] = json.loads(packed)
    return state
