"""User values whose methods raise, or return invalid results."""

from __future__ import annotations

from typing import Any, NoReturn


def _raises(*_: Any) -> NoReturn:
    raise ValueError("this value does not like to be looked at")


class Silent:
    """Raises in every method."""

    __repr__ = __str__ = __format__ = __eq__ = __hash__ = __bool__ = _raises
    __len__ = __iter__ = __float__ = __int__ = _raises


class Item:
    """Resembles a scalar of an array library."""

    ndim = 0
    item = tolist = __repr__ = _raises


class NoText:
    """Returns a value that is no text."""

    def __repr__(self) -> Any:
        return 3


class Text(str):
    """A text whose methods raise."""

    __slots__ = ()

    __repr__ = __str__ = __format__ = _raises


class Real(float):
    """A number whose methods raise."""

    __repr__ = __str__ = __format__ = __float__ = _raises


class Whole(int):
    """An integer whose methods raise."""

    __repr__ = __str__ = __format__ = __int__ = __lt__ = __abs__ = _raises


class Endless:
    """A value whose text contains its own text."""

    def __repr__(self) -> str:
        return repr(self)


class Leaves:
    """Exits the process that prints it."""

    def __repr__(self) -> NoReturn:
        raise SystemExit(3)


class Closed(dict[str, Any]):
    """A dict that cannot be read."""

    items = __iter__ = keys = _raises


def all_hostile() -> list[Any]:
    """Return one of each, except those that no configuration may hold."""
    return [Silent(), Item(), NoText(), Text("t"), Real(2.5), Whole(7), Endless(), Leaves()]
