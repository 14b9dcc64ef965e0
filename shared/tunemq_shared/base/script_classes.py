"""Give unpickled objects the classes that the script has now.

Cloudpickle pickles a class of ``__main__`` with its content. So an object of an earlier run would
come back with that run's class: an Enum's member that equals no member of the script's, a dataclass
of which nothing is an instance. `pickle` avoids that for classes of modules, which it looks up by
their names. So does this module for the script's classes: their pickles have the name, too, and
only where the script has no class of that name, unpickling makes the one in the pickle.

A class has a name only if its module has it under that name, so not a class within a function.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple, cast
from weakref import WeakKeyDictionary

from tunemq_shared.base.errors import TrainableError

#: The name under which a farm loads a script; elsewhere the script is ``__main__``.
SCRIPT_MODULE: Final = "__tunemq_script__"

#: The functions with which cloudpickle makes a class that it pickled with its content.
MAKERS: Final = ("_make_skeleton_class", "_make_skeleton_enum")

_MAIN: Final = "__main__"
#: Our key in the dict that cloudpickle keeps free for extensions.
_KEY: Final = "tunemq_name"


class _ClassName(NamedTuple):
    """What a class is found by: the file serves if another script imports the module now."""

    module: str
    qualname: str
    file: str


#: The names of classes that were unpickled here, and are in no module.
_names: WeakKeyDictionary[type, _ClassName] = WeakKeyDictionary()
#: The script's classes as they were received; None in the script's own process.
_received: dict[tuple[str, str], type] | None = None


def receive_script_classes() -> None:
    """Take the script's classes from pickles from now on, not from this process's modules.

    Trial processes call it before they load a script's code: their ``__main__`` is another one.
    """
    global _received
    _received = {}


# --- pickling -------------------------------------------------------------------------------------


@functools.cache
def script_pickler() -> Any:
    """Return the class of picklers that add the names of the script's classes."""
    import cloudpickle.cloudpickle as library

    makers = {getattr(library, name) for name in MAKERS}

    class ScriptPickler(library.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            # Its type: an object may claim any class.
            if issubclass(type(obj), enum.Enum) and (reduced := self._member(obj)):
                return reduced
            reduced = super().reducer_override(obj)
            if type(reduced) is tuple and reduced[0] in makers and (name := _name_of(obj)):
                make, arguments, *rest = reduced
                extra = {**(arguments[-1] or {}), _KEY: (*name, _positions(obj))}
                return (make, (*arguments[:-1], extra), *rest)
            return reduced

        def _member(self, member: enum.Enum) -> Any:
            """Reduce a member to its name: the values of ``auto()`` change with other members."""
            cls = type(member)
            if (
                cls.__reduce_ex__ is not enum.Enum.__reduce_ex__
                or _name_of(cls) is None
                or library._should_pickle_by_reference(cls)  # noqa: SLF001
            ):
                return None
            if member.name in cls.__members__:
                return getattr, (cls, member.name)
            flags = tuple(member) if isinstance(member, enum.Flag) else ()
            is_whole = flags and functools.reduce(operator.or_, flags) is member
            return (functools.reduce, (operator.or_, flags)) if is_whole else None

    return ScriptPickler


def _name_of(cls: type) -> _ClassName | None:
    """Return the name by which other processes find the class; None if they cannot."""
    if (name := _names.get(cls)) is not None:
        return name
    home = sys.modules.get(cls.__module__)
    if home is None or _attribute(home, cls.__qualname__) is not cls:
        return None
    module = _MAIN if cls.__module__ == SCRIPT_MODULE else cls.__module__
    return _ClassName(module, cls.__qualname__, _file_of(home))


def _positions(cls: type) -> tuple[str, ...]:
    """Return the fields of which pickled objects have the values in this order, without names."""
    if issubclass(cls, tuple):
        return tuple(getattr(cls, "_fields", ()))
    if getattr(getattr(cls, "__getstate__", None), "__module__", "") == "dataclasses":  # with slots
        return tuple(field.name for field in dataclasses.fields(cast("Any", cls)))
    return ()


# --- unpickling -----------------------------------------------------------------------------------


def find_or_make(
    make: Callable[..., type], arguments: tuple[Any, ...], *, is_current: bool
) -> tuple[type, bool]:
    """Return the class of a pickle, and whether it is one that the script has now.

    Args:
        make: one of `MAKERS`.
        arguments: its arguments in the pickle.
        is_current: see `tunemq_shared.base.unpickling.unpickle`.

    Raises:
        TrainableError: the script's class has other fields, and its objects' values no names.
    """
    named = (arguments[-1] or {}).get(_KEY)
    if named is None:
        return make(*arguments), False
    *parts, fields = named
    name = _ClassName(*parts)
    if (found := _present(name)) is not None:
        now = _positions(found)
        may_grow = issubclass(found, tuple)  # only their new fields get their defaults
        if now != fields and not (may_grow and now[: len(fields)] == fields):
            raise TrainableError(
                f"{name.qualname} had the fields {', '.join(fields) or 'of a dict'} in an earlier "
                f"run, and has {', '.join(now) or 'none'} now; keep "
                + (
                    "the order, and add new ones behind."
                    if may_grow
                    else "the fields as they were."
                )
            )
        return found, True
    made = make(*arguments)
    _names[made] = name
    if is_current and _received is not None:
        _received[name.module, name.qualname] = made
    return made, False


def _present(name: _ClassName) -> type | None:
    """Return the class that the script has under this name."""
    if _received is not None:
        found = _received.get((name.module, name.qualname))
    else:
        home = sys.modules.get(SCRIPT_MODULE) if name.module == _MAIN else None
        found = _attribute(home or sys.modules.get(name.module), name.qualname)
    if not isinstance(found, type) and name.file:
        homes = (one for one in list(sys.modules.values()) if _file_of(one) == name.file)
        found = next((one for home in homes if (one := _attribute(home, name.qualname))), None)
    return found if isinstance(found, type) else None


def _attribute(home: Any, qualname: str) -> Any:
    for part in qualname.split("."):
        home = getattr(home, "__dict__", {}).get(part)
    return home


def _file_of(module: Any) -> str:
    file = getattr(module, "__dict__", {}).get("__file__")
    return file if isinstance(file, str) else ""
