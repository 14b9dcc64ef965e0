"""The error message for a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

from tunemq_shared.base.errors import ConfigError

_SUGGESTED: Final = 3
_LISTED: Final = 5


def unknown_name(kind: str, name: str, there_are: Iterable[str]) -> ConfigError:
    """Return the error for an unknown name; suggests similar names, else lists existing ones.

    Args:
        kind: the kind of thing: experiment, trial, node.
        name: the unknown name.
        there_are: all existing names.
    """
    names = list(dict.fromkeys(there_are))
    near = difflib.get_close_matches(name, names, _SUGGESTED, 0.6)
    if near:
        hint = f"; did you mean {' or '.join(near)}?"
    elif names:
        more = " ..." if len(names) > _LISTED else ""
        hint = f"; it can be: {', '.join(names[:_LISTED])}{more}"
    else:
        hint = "; none exist."
    return ConfigError(f"the {kind} {name!r} does not exist{hint}")
