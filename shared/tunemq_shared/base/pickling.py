"""Pickle objects for another process, and name the part of an object that cannot be pickled.

Cloudpickle is imported on first use: a script with plain configurations never needs it.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import io
import pickle
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tunemq_shared.base.errors import TuneError
from tunemq_shared.base.safe_text import repr_of, text_of
from tunemq_shared.base.script_classes import script_pickler

_NOT_PARTS = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "_abc_impl"}


class Unpicklable(TuneError):
    """An object cannot be pickled; callers wrap this in an error that names the object."""

    def __init__(self, value: Any, cause: BaseException) -> None:
        why = f"{type(cause).__name__}: {text_of(cause)}"
        super().__init__(f"{_kind(value)} cannot be pickled: {why}")
        self.value = value
        self.cause = cause

    def explain(self, subject: str, path: str) -> str:
        """Format a clause that says which part of the object cannot be pickled.

        Args:
            subject: How the clause names the object: ``the variable 'data' it uses``.
            path: The expression for the object itself: ``data``.
        """
        if RecursionError in {type(self.cause), type(self.cause.__cause__)}:
            limit = f"more than Python's recursion limit of {sys.getrecursionlimit()} allows"
            return f"{subject} is {_kind(self.value)} that is nested too deeply, {limit}"
        culprit, where = _innermost(self.value, path)
        problem = f"which cannot be pickled ({text_of(self.cause)})"
        if culprit is self.value:
            return f"{subject} is {_kind(culprit)}, {problem}"
        return f"{subject} holds {_kind(culprit)} at {where}, {problem}"


class PickledPart(NamedTuple):
    """A part that is pickled along with an object."""

    #: How a clause names the part: ``the variable 'data' it uses``.
    subject: str
    name: str
    value: Any
    #: The suffix that leads to the part in an expression: ``.model``, ``['model']``.
    step: str = ""


def dump(value: Any) -> bytes:
    """Pickle an object so that another process of this experiment can load it.

    Classes and functions of ``__main__`` are pickled by value: the other process has another
    ``__main__``. Where it has the script's classes, `unpickle` finds them by their names.

    Raises:
        Unpicklable: The object cannot be pickled.
    """
    file = io.BytesIO()
    try:
        script_pickler()(file, protocol=5).dump(value)
        return file.getvalue()
    except Exception as error:  # objects raise anything; every caller names the object
        raise Unpicklable(value, error) from error


def dump_out_of_band(value: Any) -> tuple[list[bytes], list[memoryview]]:
    """Pickle an object in pieces, with its large buffers where they lie in memory.

    Only arrays with gaps between their elements are copied, into a contiguous buffer.

    Raises:
        Unpicklable: The object cannot be pickled.
    """
    pieces = _Pieces()
    buffers: list[pickle.PickleBuffer] = []
    try:
        _sharing_pickler()(pieces, protocol=5, buffer_callback=buffers.append).dump(value)
        return pieces.pieces, [buffer.raw() for buffer in buffers]
    except Exception as error:  # objects raise anything; every caller names the object
        raise Unpicklable(value, error) from error


@functools.cache
def _sharing_pickler() -> Any:
    class SharingPickler(script_pickler()):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            # Numpy writes an array with gaps into the pickle: each process would hold a copy.
            numpy = sys.modules.get("numpy")
            if numpy is not None and type(obj) is numpy.ndarray and not obj.dtype.hasobject:
                flags = obj.flags
                if not (flags.c_contiguous or flags.f_contiguous):
                    return obj.copy().__reduce_ex__(5)
            return super().reducer_override(obj)

    return SharingPickler


def pickled_size(value: Any) -> int:
    """Size of the object's pickle in bytes, without holding the pickle; 0 if pickling fails."""
    counter = _Counter()
    return counter.size if _failure(value, counter) is None else 0


def blame(parts: Iterable[PickledPart]) -> str | None:
    """Format a clause about the first part that cannot be pickled; None if all can."""
    for part in parts:
        failure = _failure(part.value, _Counter())
        if failure is not None:
            return Unpicklable(part.value, failure).explain(part.subject, part.name)
    return None


def parts_of(value: Any) -> Iterator[PickledPart]:
    """Iterate over the parts that are pickled along with an object."""
    if isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, types.MethodType):
        yield from parts_of(value.__func__)
        yield PickledPart("the object it is a method of", "self", value.__self__, ".__self__")
    elif isinstance(value, functools.partial):
        yield PickledPart("the function it calls", "func", value.func, ".func")
        for n, argument in enumerate(value.args):
            yield PickledPart(f"its argument {n}", f"args[{n}]", argument, f".args[{n}]")
        for name, argument in value.keywords.items():
            yield PickledPart(f"its argument {name!r}", name, argument, f".keywords[{name!r}]")
    elif isinstance(value, type):
        yield from _parts_of_class(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            shown = repr_of(key)
            yield PickledPart(f"its value {shown}", text_of(key), item, f"[{shown}]")
    elif isinstance(value, list | tuple | set | frozenset):
        for n, item in enumerate(value):
            yield PickledPart(f"its item {n}", str(n), item, f"[{n}]")
    else:
        yield from _parts_of_object(value)


def _parts_of_function(function: types.FunctionType) -> Iterator[PickledPart]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # an empty cell: the variable is not assigned yet
            yield PickledPart(
                f"the variable {name!r} it uses", name, cell.cell_contents, f" -> {name}"
            )
    for name in _globals_used(function.__code__):
        if name in function.__globals__:
            yield PickledPart(
                f"the variable {name!r} it uses", name, function.__globals__[name], f" -> {name}"
            )
    for name, parameter in inspect.signature(function, follow_wrapped=False).parameters.items():
        if parameter.default is not parameter.empty:
            yield PickledPart(
                f"the default of its argument {name!r}", name, parameter.default, f" -> {name}"
            )
    for name, item in vars(function).items():
        yield PickledPart(f"its attribute {name!r}", name, item, f".{name}")


def _globals_used(code: types.CodeType) -> list[str]:
    names = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(_globals_used(constant))
    return sorted(names)


def _parts_of_class(cls: type) -> Iterator[PickledPart]:
    for base in cls.__bases__:
        yield PickledPart(
            f"its base class {base.__name__!r}", base.__name__, base, f" -> {base.__name__}"
        )
    for name, item in vars(cls).items():
        if name in _NOT_PARTS or isinstance(item, types.GetSetDescriptorType):
            continue
        inner = item.fget if isinstance(item, property) else getattr(item, "__func__", item)
        kind = "method" if inspect.isfunction(inner) else "attribute"
        yield PickledPart(f"its {kind} {name!r}", name, inner, f".{name}")


def _parts_of_object(value: Any) -> Iterator[PickledPart]:
    for name, item in getattr(value, "__dict__", {}).items():
        yield PickledPart(f"its attribute {name!r}", name, item, f".{name}")
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield PickledPart(f"its attribute {name!r}", name, getattr(value, name), f".{name}")
    if type(value).__module__ == "__main__":
        yield PickledPart("its class", type(value).__name__, type(value), ".__class__")


def _innermost(value: Any, path: str) -> tuple[Any, str]:
    """Find the deepest part that cannot be pickled although all its parts can, and its path."""
    seen = {id(value)}
    while True:
        for part in parts_of(value):
            if id(part.value) not in seen and _failure(part.value, _Counter()) is not None:
                seen.add(id(part.value))
                value, path = part.value, path + part.step
                break
        else:
            return value, path


def _failure(value: Any, counter: _Counter) -> Exception | None:
    """The exception that pickling the value raises, or None; bytes are counted, not kept."""
    import cloudpickle

    try:
        cloudpickle.CloudPickler(counter, protocol=5).dump(value)
    except Exception as error:  # noqa: BLE001 - the question is whether it raises, whatever it is
        return error
    return None


def _kind(value: Any) -> str:
    cls = type(value)
    name = (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


class _Counter:
    """A file that only counts the bytes written to it."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, data: Any) -> int:
        length = memoryview(data).nbytes
        self.size += length
        return length


class _Pieces:
    """A file that keeps the pieces written to it as they are: large ones are not copied."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def write(self, data: bytes) -> int:
        self.pieces.append(data)
        return len(data)
