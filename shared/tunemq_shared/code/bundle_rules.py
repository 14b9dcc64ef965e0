"""Select the files of a bundle: by the folder's `.tunemqignore`, and by default rules.

The patterns are git's; without a `.tunemqignore`, a `.gitignore` counts. A folder's file applies
below that folder, and a later line overrides an earlier one, so that ``!name`` includes what an
earlier line excludes. Files in the folders above, up to the top of a repository, only exclude: the
user may not have them in mind, nor even have written them.

Files with secrets (`tunemq_shared.code.farm_secrets`) are left out unless such a line has their
name: one with wildcards, or with a folder, may include more than its writer thought of.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.code.farm_secrets import SecretFile, why_secret_file

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
#: At the top of a git repository: a folder, or in a worktree a file.
_REPOSITORY: Final = ".git"
#: Lines that have git look into all folders, after one that excludes everything.
_ALL_FOLDERS: Final = frozenset({"!*/", "!**/"})
#: A name that only patterns for any name match.
_ANY: Final = "\1"
_ESCAPED: Final = re.compile(r"\\(.)")
#: More files than this are a data set, not code.
MAX_FILES: Final = 20_000


class BundleFile(NamedTuple):
    """A file of a bundle: its name below the folder, with ``/``; its path; its size in bytes."""

    name: str
    path: Path
    size: int


class SelectedFiles(NamedTuple):
    """The files of a bundle, and those that are left out because they seem to hold secrets."""

    files: list[BundleFile]
    left_out: list[SecretFile]


class _Rules:
    """The patterns of one folder.

    Args:
        lines: Of its file.
        below: The prefix that names of the bundle have more than patterns.
        above: The prefix that patterns have more than names of the bundle.
    """

    def __init__(self, lines: Iterable[str], *, below: str = "", above: str = "") -> None:
        from pathspec import GitIgnoreSpec

        self._below, self._above = below, above
        self._lines = [line for line in lines if line]
        self._spec = GitIgnoreSpec.from_lines(self._lines)

    def verdict(self, name: str) -> bool | None:
        """Whether to exclude a name; None if no pattern matches it."""
        include, at = self._check(name)
        # pathspec prefers any line before it, unlike git.
        if include and name.endswith("/") and not _ALL_FOLDERS.isdisjoint(self._lines[at:]):
            return False
        return include

    def includes_by_name(self, name: str) -> bool:
        """Whether the line that includes a file has the file's name, not only a folder's."""
        include, at = self._check(name)
        line = _ESCAPED.sub(r"\1", self._lines[at].rstrip())[1:]
        return include is False and line.rpartition("/")[2] == name.rpartition("/")[2]

    def _check(self, name: str) -> tuple[bool | None, int]:
        found = self._spec.check_file(self._above + name.removeprefix(self._below))
        return found.include, found.index or 0


class _Selection:
    """Walks through a folder.

    Args:
        root: The folder, without links.
        own: See `tunemq_shared.code.farm_secrets.own_secrets`.
    """

    def __init__(self, root: Path, own: Collection[bytes]) -> None:
        self._root, self._own = root, own
        self._defaults = _Rules(DEFAULTS)
        self._above = [*_rules_above(root)]
        self.secrets: list[SecretFile] = []

    def files(
        self,
        folder: Path,
        prefix: str = "",
        rules: Sequence[_Rules] = (),
        parents: Sequence[Path] = (),
    ) -> Iterator[BundleFile]:
        """Yield the files below a folder, and list those with secrets in `secrets`."""
        rules, parents = [*rules, *_rules_in(folder, prefix)], [*parents, folder]
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            name, is_folder = prefix + entry.name, entry.is_dir()
            shown = f"{name}/" if is_folder else name
            deciding = _deciding(shown, rules)
            if self._is_ignored(shown, deciding):
                continue
            if is_folder and os.path.exists(os.path.join(entry.path, _VIRTUAL_ENVIRONMENT)):
                continue
            path = Path(entry.path)
            if entry.is_symlink():
                path = _followed(path, self._root)
            if is_folder and path not in parents:
                yield from self.files(path, f"{name}/", rules, parents)
            elif path.is_file():
                is_chosen = deciding is not None and deciding.includes_by_name(name)
                if not is_chosen and (why := why_secret_file(entry.name, path, self._own)):
                    self.secrets.append(SecretFile(name, why))
                else:
                    yield BundleFile(name, path, path.stat().st_size)

    def _is_ignored(self, name: str, deciding: _Rules | None) -> bool:
        if deciding is not None:
            return bool(deciding.verdict(name))
        above = _deciding(name, self._above)
        return bool((above and above.verdict(name)) or self._defaults.verdict(name))


def files_of(root: Path, own: Collection[bytes] = ()) -> SelectedFiles:
    """Find the files below ``root`` that belong to the bundle, sorted by name.

    Links to files below ``root`` are followed; others are rejected.

    Args:
        root: The folder.
        own: See `tunemq_shared.code.farm_secrets.own_secrets`.

    Raises:
        ConfigError: A link leads out, a file cannot be read, or there are too many; says which.
    """
    found: list[BundleFile] = []
    try:
        selection = _Selection(root.resolve(), own)
        for one in selection.files(root.resolve()):
            found.append(one)
            if len(found) > MAX_FILES:
                raise ConfigError(
                    f"{root} has more than {MAX_FILES} files, too many for a code package; "
                    f"list the files that are no code in {root / FILES[0]}."
                )
    except OSError as error:
        raise ConfigError(f"{error.filename or root} cannot be read: {error.strerror}.") from error
    return SelectedFiles(sorted(found), selection.secrets)


def _rules_in(folder: Path, prefix: str) -> Iterator[_Rules]:
    for name in FILES:
        path = folder / name
        if path.is_file():
            yield _Rules(_lines(path), below=prefix)
            return


def _rules_above(root: Path) -> Iterator[_Rules]:
    """Yield the rules of the folders above, outermost first, if ``root`` is in a repository."""
    inside = [root, *root.parents]
    top = next((at for at, one in enumerate(inside) if os.path.lexists(one / _REPOSITORY)), 0)
    for folder in reversed(inside[1 : top + 1]):
        path = next((folder / name for name in FILES if _is_trusted(folder / name)), None)
        if path is not None:
            place = f"{root.relative_to(folder).as_posix()}/"
            yield _Rules(_without_folder(_lines(path), place), above=place)


def _is_trusted(path: Path) -> bool:
    """Whether a file is there, and no other user decides by it which files are sent."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid in {0, os.geteuid()}


def _without_folder(lines: list[str], place: str) -> list[str]:
    """Drop the lines that exclude all of a folder: the user chose to send it."""

    def excludes(line: str, name: str) -> bool:
        return bool(_Rules([line]).verdict(name))

    is_excluded = _Rules(lines).verdict(place)
    return [
        line
        for line in lines
        if not (is_excluded and excludes(line, place))
        and not (excludes(line, place + _ANY) and not excludes(line, _ANY))
    ]


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text().splitlines()
        _Rules(lines)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be understood: {error}.") from error
    return lines


def _deciding(name: str, rules: Sequence[_Rules]) -> _Rules | None:
    """Return the rules of the innermost folder that has a pattern for the name."""
    return next((one for one in reversed(rules) if one.verdict(name) is not None), None)


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
