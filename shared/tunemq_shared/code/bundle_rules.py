"""Select the files of a bundle: by the folder's `.tunemqignore`, and by default rules.

The patterns are git's; without a `.tunemqignore`, a `.gitignore` counts. A folder's file applies
below that folder, and a later line overrides an earlier one, so that ``!name`` includes what an
earlier line excludes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tunemq_shared.base.errors import ConfigError

#: Excluded by default: never the user's code, and the keys in a home folder.
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
    ".aws/",
    ".config/",
    ".docker/",
    ".gnupg/",
    ".kube/",
    ".ssh/",
    ".netrc",
    ".pgpass",
)
#: The first of these in a folder counts there.
FILES: Final = (".tunemqignore", ".gitignore")
#: In the folder of a virtual environment, whatever its name; its programs are links elsewhere.
_VIRTUAL_ENVIRONMENT: Final = "pyvenv.cfg"
#: More files than this are a data set, not code.
MAX_FILES: Final = 20_000


class BundleFile(NamedTuple):
    """A file of a bundle: its name below the folder, with ``/``; its path; its size in bytes."""

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
        """Whether to exclude a name; None if no pattern matches it."""
        return self._spec.check_file(name.removeprefix(self._prefix)).include


def files_of(root: Path) -> list[BundleFile]:
    """List the files below ``root`` that belong to the bundle, sorted by name.

    Links to files below ``root`` are followed; others are rejected.

    Raises:
        ConfigError: A link leads out, a file cannot be read, or there are too many; says which.
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
        if is_folder and os.path.exists(os.path.join(entry.path, _VIRTUAL_ENVIRONMENT)):
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
    """Whether the innermost folder with a matching pattern excludes the name."""
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
