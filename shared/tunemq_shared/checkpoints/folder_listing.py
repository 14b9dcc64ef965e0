"""List the files of a folder for a checkpoint, rejecting those that it cannot hold by name."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

from tunemq_shared.base.errors import CheckpointError
from tunemq_shared.checkpoints.manifest import MAX_FILES


class FolderListing(NamedTuple):
    """Files and empty folders below a folder, by relative names with ``/``."""

    files: dict[str, Path]
    folders: list[str]


def list_folder(source: Path) -> FolderListing:
    """List what to copy, following links that stay below ``source``.

    Raises:
        CheckpointError: ``source`` is not a folder, or holds a link that leaves it, a loop, a
            device or the like, or more files than `MAX_FILES`.
    """
    if not source.is_dir():
        raise CheckpointError(f"a checkpoint must be a folder, and {str(source)!r} is none.")
    root = source.resolve()
    listing = FolderListing({}, [])
    _collect(root, root, "", (root,), listing)
    return listing


def _collect(
    folder: Path, root: Path, prefix: str, ancestors: tuple[Path, ...], listing: FolderListing
) -> None:
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    if len(listing.files) + len(listing.folders) + len(entries) > MAX_FILES:
        raise CheckpointError(
            f"{str(root)!r} has more than {MAX_FILES} files, too many for a checkpoint; pack them "
            "into an archive."
        )
    if prefix and not entries:
        listing.folders.append(prefix.removesuffix("/"))
    for entry in entries:
        name = prefix + entry.name
        path = _followed(entry.path, root) if entry.is_symlink() else Path(entry.path)
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            listing.files[name] = path
        elif not stat.S_ISDIR(mode):
            raise CheckpointError(
                f"a checkpoint holds files and folders only, and {entry.path!r} is neither."
            )
        elif path in ancestors:
            raise CheckpointError(f"{entry.path!r} in a checkpoint is a link to a folder it is in.")
        else:
            _collect(path, root, f"{name}/", (*ancestors, path), listing)


def _followed(link: str, root: Path) -> Path:
    try:
        path = Path(link).resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise CheckpointError(f"{link!r} in a checkpoint is a link that leads nowhere.") from error
    if not path.is_relative_to(root):
        raise CheckpointError(
            f"{link!r} in a checkpoint is a link to {str(path)!r} outside of it; "
            "put a copy of the file there."
        )
    return path
