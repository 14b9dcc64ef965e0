"""Which files of a folder travel with a bundle: by its `.tunemqignore`, and by rules of ours.

The patterns are git's; where there is no `.tunemqignore` a `.gitignore` counts. A folder's own file
counts for what is below it, and a later line beats an earlier one, so that ``!name`` takes along
what would be left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tunemq_shared.base.errors import ConfigError

#: What is no code of the user's, however it came there.
DEFAULTS: Final = (
    ".git/",
    ".hg/",
    ".svn/",
    "__pycache__/",
    "*.py[cod]",
    ".venv/",
    "venv/",
    ".tox/",
    ".nox/",
    ".eggs/",
    "*.egg-info/",
    "node_modules/",
    ".mypy_cache/",
    ".pytest_cache/",
    ".ruff_cache/",
    ".ipynb_checkpoints/",
    ".DS_Store",
    "tunemq_results/",
)
#: The first of these that is in a folder counts there.
FILES: Final = (".tunemqignore", ".gitignore")
#: More files than this are a data set, and no code.
MAX_FILES: Final = 20_000


class BundleFile(NamedTuple):
    """A file of a bundle: its name below the folder, with ``/``; where it is; its bytes."""

    name: str
    path: Path
    size: int


class _Rules:
    """The patterns of one folder; names are matched below ``prefix``."""

    def __init__(self, prefix: str, lines: Iterable[str]) -> None:
        from pathspec import GitIgnoreSpec

        self._prefix = prefix
        self._spec = GitIgnoreSpec.from_lines(lines)

    def verdict(self, name: str) -> bool | None:
        """Whether a name is to be left out; None where nothing is said about it."""
        return self._spec.check_file(name.removeprefix(self._prefix)).include


def files_of(root: Path) -> list[BundleFile]:
    """The files below ``root`` that are to travel, in the order of their names.

    Links are followed where they lead to what is below ``root``; others are refused.

    Raises:
        ConfigError: a link leads out, a file cannot be read, or there are too many; says which.
    """
    found: list[BundleFile] = []
    top = _Rules("", DEFAULTS)
    try:
        for one in _walk(root.resolve(), root.resolve(), "", [top], ()):
            found.append(one)
            if len(found) > MAX_FILES:
                raise ConfigError(
                    f"{root} has more than {MAX_FILES} files, too many for code that travels; "
                    f"list what is not code in {root / FILES[0]}."
                )
    except OSError as error:
        raise ConfigError(f"{error.filename or root} cannot be read: {error.strerror}.") from error
    return sorted(found)


def _walk(
    root: Path, folder: Path, prefix: str, rules: list[_Rules], above: tuple[Path, ...]
) -> Iterator[BundleFile]:
    rules = [*rules, *_rules_in(folder, prefix)]
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        name, is_folder = prefix + entry.name, entry.is_dir()
        if _is_ignored(f"{name}/" if is_folder else name, rules):
            continue
        path = _followed(Path(entry.path), root) if entry.is_symlink() else Path(entry.path)
        if is_folder and path not in (*above, folder):
            yield from _walk(root, path, f"{name}/", rules, (*above, folder))
        elif path.is_file():
            yield BundleFile(name, path, path.stat().st_size)


def _rules_in(folder: Path, prefix: str) -> Iterator[_Rules]:
    for name in FILES:
        path = folder / name
        if path.is_file():
            try:
                yield _Rules(prefix, path.read_text().splitlines())
            except ValueError as error:
                raise ConfigError(f"{path} cannot be understood: {error}.") from error
            return


def _is_ignored(name: str, rules: list[_Rules]) -> bool:
    """The innermost folder that has something to say about it decides."""
    for one in reversed(rules):
        verdict = one.verdict(name)
        if verdict is not None:
            return verdict
    return False


def _followed(link: Path, root: Path) -> Path:
    target = link.resolve()
    if not target.is_relative_to(root):
        raise ConfigError(
            f"{link} is a link to {target}, which does not travel with {root}; copy it there, or "
            f"list the link in {root / FILES[0]}."
        )
    if not target.exists():
        raise ConfigError(
            f"{link} is a link to {target}, which is not there; remove it, or list it in "
            f"{root / FILES[0]}."
        )
    return target
