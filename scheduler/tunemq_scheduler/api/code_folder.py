"""Which files a script needs: itself alone, or the folder of the modules that it imports."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tunemq_shared.base.errors import ConfigError

#: The name that a script's Tuner has unless another one is said.
_TUNER: Final = "tuner"


class CodeLocation(NamedTuple):
    """What is bundled (a script alone, or a folder), and the script's path in there, with ``/``."""

    source: Path
    script: str


class ScriptReference(NamedTuple):
    """A script, and the name of its Tuner."""

    path: Path
    tuner: str


def script_name(given: str) -> ScriptReference:
    """What ``SCRIPT`` or ``SCRIPT:NAME`` means.

    Raises:
        ConfigError: there is no such script; or it cannot be one.
    """
    path, colon, name = given.rpartition(":")
    if not colon or os.path.exists(given):
        path, name = given, _TUNER
    if not Path(path).is_file():
        raise ConfigError(f"there is no script {path}.")
    if not path.endswith(".py"):
        raise ConfigError(f"{path} is no Python script; its name must end in .py.")
    if not name.isidentifier():
        raise ConfigError(f"{given!r} is not usable: write SCRIPT:NAME, with the name of a Tuner.")
    return ScriptReference(Path(path).absolute(), name)


def code_place(script: Path, folder: str | None = None) -> CodeLocation:
    """What of a script's surroundings is sent.

    Args:
        folder: what is to be sent; else the script alone, or its own folder if it imports what
            lies there.

    Raises:
        ConfigError: the script is not in the folder.
    """
    if folder is None:
        source = script.parent if _imports_neighbours(script) else script
        return CodeLocation(source, script.name)
    root = Path(folder).absolute()
    if not root.is_dir():
        raise ConfigError(f"--folder {folder} is no folder.")
    try:
        return CodeLocation(root, script.resolve().relative_to(root.resolve()).as_posix())
    except ValueError:
        raise ConfigError(
            f"{script} is not in {root}; give with --folder a folder that holds the script."
        ) from None


def _imports_neighbours(script: Path) -> bool:
    """Whether there is a module or package beside a script that it seems to import."""
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
    """The first parts of the names of all modules that are imported somewhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
