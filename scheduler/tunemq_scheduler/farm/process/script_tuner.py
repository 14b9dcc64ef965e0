"""Loads the `Tuner` that a script defines, without running the script's main part."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from tunemq_scheduler.api.tuner import Tuner
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.base.script_classes import SCRIPT_MODULE
from tunemq_shared.executables.executable import Executable
from tunemq_shared.executables.run_executable import FOLDER_HINT


def load_tuner(path: Path, name: str) -> Tuner:
    """Run a script and return its Tuner.

    The script runs as if it was started with ``python``: its folder is first in ``sys.path``, and
    its path is ``sys.argv[0]``. Its functions are pickled by value for the workers, which cannot
    import the script.

    Args:
        path: the script.
        name: the variable with its Tuner.

    Raises:
        ConfigError: it is not a script; it does not define this Tuner (lists those it defines); or
            it calls `Tuner.fit`.
    """
    import cloudpickle

    folder = str(path.parent)
    sys.argv[:] = [str(path)]
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]
    spec = importlib.util.spec_from_file_location(SCRIPT_MODULE, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python script; its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT_MODULE] = module  # dataclasses and type hints look their module up
    cloudpickle.register_pickle_by_value(module)  # also of values in configurations
    Tuner.may_fit, Executable.script_folder = False, folder
    try:
        spec.loader.exec_module(module)  # its exceptions are the script's own, with their traceback
    except FileNotFoundError as error:
        if str(error.filename).startswith(f"{folder}/"):
            error.add_note(FOLDER_HINT)
        raise
    finally:
        Tuner.may_fit, Executable.script_folder = True, None
    return _tuner_of(vars(module), path, name)


def _tuner_of(defined: dict[str, Any], path: Path, name: str) -> Tuner:
    found = defined.get(name)
    if isinstance(found, Tuner):
        return found
    others = sorted(key for key, value in defined.items() if isinstance(value, Tuner))
    if name in defined:
        what = f"{name} in {path} is a {type(found).__name__}, not a Tuner"
    else:
        what = f"{path} does not define {name} (code below `if __name__` does not run)"
    fix = (
        f"write {path}:{others[0]}"
        if others
        else f"write `{name} = tune.Tuner(...)` in it, without `.fit()`"
    )
    raise ConfigError(f"{what}; {fix}.")
