"""Loads the `Tuner` that a script defines, without running what is only for the script itself."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any, Final

from tunemq_scheduler.tuner import Tuner
from tunemq_shared.errors import ConfigError

#: The name that a script's Tuner has unless another one is said.
DEFAULT_NAME: Final = "tuner"
#: What the script's module is called; not ``__main__``, so that its main part does not run.
_MODULE: Final = "__tunemq_script__"


def load_tuner(given: str) -> Tuner:
    """Run a script and return its Tuner.

    The script sees itself as if it was started with ``python``: its folder is where modules are
    looked for first, and it is ``sys.argv[0]``. What its functions need travels to the workers with
    them, since nobody can import it there.

    Args:
        given: ``SCRIPT`` or ``SCRIPT:NAME``.

    Raises:
        ConfigError: there is no such script, or it defines no such Tuner; says what it defines.
    """
    path, name = _parts(given)
    folder = os.path.dirname(os.path.abspath(path))
    sys.argv[:] = [path]
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]
    spec = importlib.util.spec_from_file_location(_MODULE, os.path.abspath(path))
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python script; its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses and type hints look their module up
    spec.loader.exec_module(module)  # what it raises is the script's own, traceback and all
    return _tuner_of(vars(module), path, name)


def _parts(given: str) -> tuple[str, str]:
    path, colon, name = given.rpartition(":")
    if not colon or os.path.exists(given):
        path, name = given, DEFAULT_NAME
    if not Path(path).is_file():
        raise ConfigError(f"there is no script {path}.")
    if not name.isidentifier():
        raise ConfigError(f"{given!r} is not usable: write SCRIPT:NAME, with the name of a Tuner.")
    return path, name


def _tuner_of(defined: dict[str, Any], path: str, name: str) -> Tuner:
    found = defined.get(name)
    if isinstance(found, Tuner):
        return found
    others = sorted(key for key, value in defined.items() if isinstance(value, Tuner))
    if name in defined:
        what = f"{name} in {path} is a {type(found).__name__} and no Tuner"
    else:
        what = f"{path} defines no {name} (what stands under `if __name__` does not run)"
    fix = (
        f"write {path}:{others[0]}"
        if others
        else f"write `{DEFAULT_NAME} = tune.Tuner(...)` in it, and leave `.fit()` to this command"
    )
    raise ConfigError(f"{what}; {fix}.")
