"""Finds the files that a script needs: the script alone, or the folder of its modules."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tunemq_shared.base.errors import ConfigError

#: The default variable name of a script's Tuner.
_TUNER: Final = "tuner"


class CodeLocation(NamedTuple):
    """What to bundle (a script or a folder), and the script's path inside it, with ``/``."""

    source: Path
    script: str


class ScriptReference(NamedTuple):
    """A script's path, and the variable name of its Tuner."""

    path: Path
    tuner: str


def script_name(given: str) -> ScriptReference:
    """Parse ``SCRIPT`` or ``SCRIPT:NAME``.

    Raises:
        ConfigError: the script does not exist, or is not a script.
    """
    path, colon, name = given.rpartition(":")
    if not colon or os.path.exists(given):
        path, name = given, _TUNER
    if not Path(path).is_file():
        raise ConfigError(f"the script {path} does not exist.")
    if not path.endswith(".py"):
        raise ConfigError(f"{path} is not a Python script; its name must end in .py.")
    if not name.isidentifier():
        raise ConfigError(f"{given!r} is invalid: write SCRIPT:NAME, with the name of a Tuner.")
    return ScriptReference(Path(path).absolute(), name)


def code_place(script: Path, folder: str | None = None) -> CodeLocation:
    """Return which files to send for a script.

    Args:
        script: the script's path.
        folder: the folder to send. Default: the script's folder if the script imports modules from
            there, else the script alone.

    Raises:
        ConfigError: the script is not in the folder.
    """
    if folder is None:
        source = script.parent if _imports_neighbours(script) else script
        return CodeLocation(source, script.name)
    root = Path(folder).absolute()
    if not root.is_dir():
        raise ConfigError(f"--folder {folder} is not a folder.")
    try:
        return CodeLocation(root, script.resolve().relative_to(root.resolve()).as_posix())
    except ValueError:
        raise ConfigError(
            f"{script} is not in {root}; pass with --folder a folder that contains the script."
        ) from None


def _imports_neighbours(script: Path) -> bool:
    """Return whether the script seems to import a module or package from its own folder."""
    try:
        tree = ast.parse(script.read_bytes(), str(script))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{script} cannot be read as Python: {error}.") from error
    except OSError as error:
        raise ConfigError(f"{script} cannot be read: {error.strerror}.") from error
    beside = script.parent
    return any(
        (beside / f"{name}.py").is_file() or any((beside / name).glob("*.py"))
        for name in _imported(tree)
        if name != script.stem
    )


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the top-level names of all modules that the script imports anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
