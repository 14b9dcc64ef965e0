"""The one place that unpickles, which runs code of the experiment.

Only an experiment's own processes unpickle: its script, its process on a farm, its trials.
Processes that hold a farm's keys unpickle nothing, and call `never_unpickle` when they start.
"""

from __future__ import annotations

import enum
import functools
import io
import pickle
import pickletools
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

from tunemq_shared.base.errors import BugError, TrainableError
from tunemq_shared.base.script_classes import MAKERS, find_or_make

_is_ruled_out = False

_NUMBERED_MEMOS: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})


def never_unpickle() -> None:
    """Forbid unpickling in this process and in those that it forks."""
    global _is_ruled_out
    _is_ruled_out = True


def unpickle(
    pickled: bytes | memoryview, buffers: Iterable[memoryview] = (), *, is_current: bool = True
) -> Any:
    """Load what `tunemq_shared.base.pickling` pickled; this runs code of the experiment.

    The caller must have checked where the bytes come from. Damaged bytes may raise anything.

    Args:
        pickled: the pickle.
        buffers: its buffers out of band.
        is_current: whether the present script pickled it, not perhaps an earlier run's: see
            `tunemq_shared.base.script_classes`.

    Raises:
        TrainableError: The script's classes have changed and do not fit.
        BugError: This process called `never_unpickle`.
    """
    if _is_ruled_out:
        raise BugError("This process called `never_unpickle` and must not unpickle.")
    if not re.search(b"_make_skeleton_", pickled):  # no class: no copy of a large pickle
        return pickle.loads(pickled, buffers=buffers)
    return _ScriptUnpickler(pickled, buffers, is_current=is_current).load()


def load_pickled(
    pickled: bytes | memoryview,
    subject: str,
    buffers: Iterable[memoryview] = (),
    *,
    is_current: bool = True,
) -> Any:
    """Unpickle like `unpickle`; ``subject`` begins the sentence of an error.

    Raises:
        TrainableError: The pickle refers to something that cannot be imported here.
        BugError: This process called `never_unpickle`.
    """
    try:
        return unpickle(pickled, buffers, is_current=is_current)
    except (ImportError, AttributeError) as error:
        raise TrainableError(
            f"{subject} cannot be loaded on this worker: {error}; install the missing module "
            "in the worker's environment, or define the name in the script itself."
        ) from error


class UnsafePickle(Exception):
    """A pickle has more than plain values, so loading it could run code."""


def load_plain(pickled: bytes | memoryview) -> Any:
    """Load a pickle of tuples, sets, bytes, numbers and the like, which runs no code.

    Numbers of numpy are loaded, too, if it is installed.

    Raises:
        UnsafePickle: it has other values, or is damaged.
    """
    try:
        # Our pickles have none of these, with which a few bytes fill any memory.
        if any(code.name in _NUMBERED_MEMOS for code, _, _ in pickletools.genops(bytes(pickled))):
            raise UnsafePickle("it numbers its memo itself")
        return _PlainUnpickler(io.BytesIO(pickled)).load()
    except UnsafePickle:
        raise
    except Exception as error:  # the content is foreign, and damaged bytes may raise anything
        raise UnsafePickle(f"{type(error).__name__}: {error}") from error


class _PlainUnpickler(pickle.Unpickler):
    """Finds nothing but the names of harmless constructors."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) == ("numpy", "dtype"):
            return _NumpyType
        if name == "scalar" and module in {"numpy.core.multiarray", "numpy._core.multiarray"}:
            return _numpy_number
        if module == "builtins" and name in {"complex", "range", "slice"}:
            return {"complex": complex, "range": range, "slice": slice}[name]
        raise UnsafePickle(f"{module}.{name}")


class _NumpyType:
    """The type of a number of numpy, of which only size and byte order are read."""

    def __init__(self, code: object, *_: object) -> None:
        if not (isinstance(code, str) and re.fullmatch("[biufc][0-9]{1,2}", code)):
            raise UnsafePickle(f"numpy.dtype({code!r})")
        self.code, self.order = code, "<"

    def __setstate__(self, state: tuple[object, ...]) -> None:
        order = state[1]
        if order not in ("<", ">", "|", "="):
            raise UnsafePickle(f"numpy.dtype with the byte order {order!r}")
        self.order = str(order)


def _numpy_number(kind: object, data: object) -> Any:
    import numpy as np

    if not isinstance(kind, _NumpyType) or not isinstance(data, bytes):
        raise UnsafePickle("a number of numpy of an unknown type")
    (number,) = np.frombuffer(data, np.dtype(f"{kind.order}{kind.code}"))
    return number


class _ScriptUnpickler(pickle.Unpickler):
    """Unpickles with the classes that the script has now: `tunemq_shared.base.script_classes`."""

    def __init__(
        self, pickled: bytes | memoryview, buffers: Iterable[memoryview], *, is_current: bool
    ) -> None:
        super().__init__(io.BytesIO(pickled), buffers=buffers)
        self._is_current = is_current
        self._found: dict[int, type] = {}

    def load(self) -> Any:
        try:
            return super().load()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if not self._found:
                raise
            names = ", ".join(sorted({cls.__qualname__ for cls in self._found.values()}))
            raise TrainableError(
                f"objects of the script's classes ({names}) cannot be loaded: {error}; if the "
                "classes have changed since an earlier run, give them back what its objects need."
            ) from error

    def find_class(self, module: str, name: str, /) -> Any:
        found = super().find_class(module, name)
        if found is getattr:
            return _attribute
        if module != "cloudpickle.cloudpickle":
            return found
        if name in MAKERS:
            return functools.partial(self._class, found)
        return functools.partial(self._fill, found) if name == "_class_setstate" else found

    def _class(self, make: Callable[..., type], *arguments: Any) -> type:
        cls, is_found = find_or_make(make, arguments, is_current=self._is_current)
        if is_found:
            self._found[id(cls)] = cls
        return cls

    def _fill(self, fill: Callable[[type, Any], type], cls: type, content: Any) -> type:
        """Give the class its pickled content, unless the script has it."""
        return cls if id(cls) in self._found else fill(cls, content)


def _attribute(owner: Any, name: str, *default: Any) -> Any:
    """Return the attribute; an Enum's own error for a missing member is only the name."""
    try:
        return getattr(owner, name, *default)
    except AttributeError:
        if isinstance(owner, enum.EnumType):
            text = f"the Enum {owner.__qualname__} has no member {name}"
            raise AttributeError(text) from None  # noqa: TRY004  as of getattr
        raise
