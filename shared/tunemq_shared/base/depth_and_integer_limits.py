"""Limits on the depth of configurations and the size of integers, so that every reader copes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from tunemq_shared.base.failure_text import one_line
from tunemq_shared.base.safe_text import repr_of

#: Far more than any configuration needs, and far less than Python's stack or JSON readers allow.
MOST_LEVELS: Final = 64
#: Integers with more bits cannot become a float, and Python refuses to print very large ones.
MOST_BITS: Final = 1023
#: The greatest integer in a message or a journal, apart from the values of configurations.
MOST_IN_MESSAGES: Final = 2**63 - 1
#: How many steps of a path a message shows.
_SHOWN: Final = 3


def parts_of(value: Any) -> Iterable[tuple[str, Any]]:
    """The direct items of a dict, list or tuple, each with the step that leads to it."""
    if isinstance(value, dict):
        return [(f"[{repr_of(key)}]", part) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return [(f"[{n}]", part) for n, part in enumerate(value)]
    return ()


def beyond_limits(
    value: Any, name: str, parts: Callable[[Any], Iterable[tuple[str, Any]]] = parts_of
) -> str | None:
    """Describe what makes a value unusable: its depth, or an integer of more than `MOST_BITS`.

    A value may be nested `MOST_LEVELS` deep and may not contain itself.

    Args:
        value: Any value; searched depth first, so that one that contains itself is found soon.
        name: How the message calls it.
        parts: Lists the direct items of a value.

    Returns:
        A clause that names the place and the fix, also for a container of a user's class that
        cannot be read; None if the value is usable.
    """
    steps: list[str] = []
    levels = [iter([("", value)])]
    while levels:
        found = next(levels[-1], None)
        if found is None:
            levels.pop()
            del steps[-1:]
            continue
        step, part = found
        where = "".join([*steps[: _SHOWN + 1], step][: _SHOWN + 1])
        try:
            inner = list(parts(part))
        except Exception as error:  # noqa: BLE001  a user's class may raise anything
            return f"{name} cannot be read at {name}{where}: {one_line(error)}; use a plain one"
        if isinstance(part, int) and (bits := int.bit_length(part)) > MOST_BITS:
            return (
                f"{name}{where} is an integer of {bits:,} bits; use one of at most {MOST_BITS:,} "
                "bits, or a string"
            )
        if not inner:
            continue
        if len(levels) > MOST_LEVELS:
            return (
                f"{name} is nested more than {MOST_LEVELS} levels deep, or holds itself, below "
                f"{name}{where}; make it flatter"
            )
        steps.append(step)
        levels.append(iter(inner))
    return None
