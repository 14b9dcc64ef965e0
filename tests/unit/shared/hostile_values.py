"""Values of users whose methods raise, or return what they must not."""

from __future__ import annotations

from typing import Any, NoReturn


def _raises(*_: Any) -> NoReturn:
    raise ValueError("this value does not like to be looked at")


class Silent:
    """Raises whatever it is asked."""

    __repr__ = __str__ = __format__ = __eq__ = __hash__ = __bool__ = _raises
    __len__ = __iter__ = __float__ = __int__ = _raises


class Item:
    """Looks like a scalar of an array library."""

    ndim = 0
    item = tolist = __repr__ = _raises


class NoText:
    """Returns what is no text."""

    def __repr__(self) -> Any:
        return 3


class Text(str):
    """A text with methods that raise."""

    __slots__ = ()

    __repr__ = __str__ = __format__ = _raises


class Real(float):
    """A number with methods that raise."""

    __repr__ = __str__ = __format__ = __float__ = _raises


class Whole(int):
    """A whole number with methods that raise."""

    __repr__ = __str__ = __format__ = __int__ = __lt__ = __abs__ = _raises


class Endless:
    """Its text holds its text."""

    def __repr__(self) -> str:
        return repr(self)


class Leaves:
    """Ends the process of whoever shows it."""

    def __repr__(self) -> NoReturn:
        raise SystemExit(3)


class Closed(dict[str, Any]):
    """A dict that cannot be read."""

    items = __iter__ = keys = _raises


def all_hostile() -> list[Any]:
    """One of each, but for what a configuration may not hold at all."""
    return [Silent(), Item(), NoText(), Text("t"), Real(2.5), Whole(7), Endless(), Leaves()]
