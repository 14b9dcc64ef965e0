"""Pickle a trainable's code for the workers: the script's by value, installed code by name.

A function or class of ``__main__``, or of a module that a fresh interpreter would not find, is
pickled whole; importable ones are pickled as their names. A trainable that cannot be pickled is
rejected before anything starts, and the error names the responsible variable.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import pickletools
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from tunemq_shared.base.errors import TrainableError
from tunemq_shared.base.pickling import (
    PickledPart,
    Unpicklable,
    blame,
    dump,
    parts_of,
    pickled_size,
)
from tunemq_shared.base.unpickling import load_pickled

#: A pickled trainable of more bytes probably contains data by mistake.
LARGE_TRAINABLE: Final = 50 * 2**20

#: Preloading is an optimisation: of a longer pickle, only the beginning is read.
_OPCODES_READ: Final = 500_000

_STRINGS: Final = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"})
_GETS: Final = frozenset({"BINGET", "LONG_BINGET", "GET"})
_PUTS: Final = frozenset({"BINPUT", "LONG_BINPUT", "PUT"})
#: Modules that trial processes have anyway, or must not have.
_NOT_THEIRS: Final = frozenset(
    {"tunemq", "tunemq_shared", "tunemq_scheduler", "tunemq_workers", "__main__"}
)
_SUBIMPORT: Final = ("cloudpickle.cloudpickle", "subimport")


def trainable_name(trainable: Any) -> str:
    """The name of a trainable function, class or callable object, for folders and messages."""
    trainable = _without_partials(trainable)
    name = getattr(trainable, "__name__", None)
    return name if isinstance(name, str) else type(trainable).__name__


def pickle_trainable(trainable: Any) -> bytes:
    """Pickle the trainable's code for `load_trainable` in another process.

    Warns above `LARGE_TRAINABLE` bytes, naming the largest part.

    Raises:
        TrainableError: It uses an object that cannot be pickled; the message names it.
    """
    home = getattr(_without_partials(trainable), "__module__", None)
    with _carried_whole(sys.modules.get(home or "")):
        try:
            pickled = dump(trainable)
        except Unpicklable as error:
            raise TrainableError(_why_not(trainable, error)) from error
        if len(pickled) > LARGE_TRAINABLE:
            warnings.warn(_too_large(trainable, len(pickled)), stacklevel=2)
    return pickled


def load_trainable(pickled: bytes | memoryview) -> Any:
    """Load the result of `pickle_trainable`; imports modules and runs code of the experiment.

    Raises:
        TrainableError: It refers to something that cannot be imported here.
    """
    return load_pickled(pickled, "the trainable's code")


def modules_of(pickled: bytes | memoryview) -> tuple[str, ...]:
    """List the installed modules that loading the pickle would import, without loading it.

    Only modules of packages in a site-packages or dist-packages folder count: the standard library
    costs little, and the user's own modules may change between two runs. The modules that the
    user's modules use count, if this process has imported them. Full names are given
    (``sklearn.svm``, not ``sklearn``), because importing a package does not import all of it.
    """
    installed: set[str] = set()
    seen: set[str] = set()
    waiting: list[str] = []
    with contextlib.suppress(ValueError):  # a damaged pickle will not be loaded either
        waiting += _modules_named(pickled)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        top = name.partition(".")[0]
        if _is_installed(top):
            installed.add(name)
        elif top not in _NOT_THEIRS and top not in sys.stdlib_module_names:
            # The user's own module: pickled by name, so the pickle does not show its imports.
            waiting += _used_by(sys.modules.get(name))
    return tuple(sorted(installed))


def _used_by(module: ModuleType | None) -> Iterator[str]:
    """Iterate over the modules that a module's globals are, or come from."""
    for value in list(vars(module).values()) if module is not None else ():
        name = value.__name__ if isinstance(value, ModuleType) else _home_of(value)
        if isinstance(name, str):
            yield name


def _home_of(value: Any) -> Any:
    try:
        return getattr(value, "__module__", None)
    except Exception:  # noqa: BLE001  an object of the user's; its module is only a hint
        return None


def _without_partials(trainable: Any) -> Any:
    while isinstance(trainable, functools.partial):
        trainable = trainable.func
    return trainable


@contextlib.contextmanager
def _carried_whole(module: ModuleType | None) -> Iterator[None]:
    """Pickle the module by value meanwhile, if another process could not import it."""
    import cloudpickle

    if (
        module is None
        or module.__name__ == "__main__"
        or module.__name__ in cloudpickle.list_registry_pickle_by_value()
        or _can_be_found(module)
    ):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _can_be_found(module: ModuleType) -> bool:
    """Whether a fresh import under the module's name would run the file that it came from.

    It asks the finders: `importlib.util.find_spec` would trust the entry in `sys.modules`, which a
    test runner or notebook may have put there by hand.
    """
    path: Any = None
    spec = None
    parts = module.__name__.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        specs = (finder.find_spec(name, path) for finder in sys.meta_path)
        spec = next((found for found in specs if found is not None), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    file = getattr(module, "__file__", None)
    if spec is None or file is None or spec.origin is None:
        return spec is not None and file is None
    return Path(spec.origin).resolve() == Path(file).resolve()


def _is_installed(top: str) -> bool:
    if top.startswith("tunemq") or top in sys.stdlib_module_names:
        return False
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # ValueError: a module without a spec, such as __main__
        return False
    if spec is None:
        return False
    places = [*(spec.submodule_search_locations or ()), spec.origin or ""]
    return any({"site-packages", "dist-packages"} & set(Path(place).parts) for place in places)


def _modules_named(pickled: bytes | memoryview) -> Iterator[str]:
    """Iterate over the modules that the pickle imports: of globals, and as modules."""
    memo: dict[Any, Any] = {}
    strings: list[str] = []
    top: Any = None  # the top of the stack, if it matters: a string or a global
    imports_next = False
    for opcode, argument, _ in itertools.islice(pickletools.genops(bytes(pickled)), _OPCODES_READ):
        name = opcode.name
        if name == "MEMOIZE":
            memo[len(memo)] = top
            continue
        if name in _PUTS:
            memo[argument] = top
            continue
        top = None
        if name in _STRINGS or name in _GETS:
            top = argument if name in _STRINGS else memo.get(argument)
            if isinstance(top, str):
                strings = [*strings[-1:], top]
                if imports_next:
                    yield top
                imports_next = False
        elif name == "STACK_GLOBAL" and len(strings) == 2:
            top = (strings[0], strings[1])
            yield strings[0]
        elif name == "GLOBAL":
            top = tuple(str(argument).split(" ", 1))
            yield top[0]
        imports_next = imports_next or top == _SUBIMPORT


def _why_not(trainable: Any, error: Unpicklable) -> str:
    place = "setup()" if isinstance(trainable, type) else "the function"
    why = blame(parts_of(trainable))
    reason = f"{why}; create it inside {place}" if why else str(error)
    return f"{trainable_name(trainable)} cannot be sent to a worker: {reason}."


def _too_large(trainable: Any, size: int) -> str:
    largest: tuple[int, PickledPart] | None = None
    for part in parts_of(trainable):
        if not isinstance(part.value, ModuleType):
            found = pickled_size(part.value)
            largest = (found, part) if largest is None or found > largest[0] else largest
    culprit = ""
    if largest is not None:
        bytes_of_it, part = largest
        culprit = f" The largest is {part.subject}: {bytes_of_it / 2**20:.0f} MiB."
    return (
        f"{trainable_name(trainable)} takes {size / 2**20:.0f} MiB of data along to every worker."
        f"{culprit} Hand large objects over with tune.with_parameters, which ships them once."
    )
