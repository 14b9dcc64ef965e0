"""Upload the files of a trial's folder to a store after the trial's process has ended."""

from __future__ import annotations

import errno
import fnmatch
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from tunemq_shared.base.byte_sizes import show_bytes
from tunemq_shared.base.errors import CheckpointCorrupt, StoreError
from tunemq_shared.base.retrying import CancelToken, ignore
from tunemq_shared.base.safe_text import encodable
from tunemq_shared.checkpoints.checkpoint_markers import NEVER_COPIED_CHECKPOINTS
from tunemq_shared.objects.object_store import InvalidObjectName, ObjectStore
from tunemq_shared.system.folder_trees import entries
from tunemq_shared.system.plain_files import opened_below, sha256_of

#: The most bytes of a trial's files in the store together; files beyond that stay out.
LIMIT_BYTES: Final = 2**30
#: The most files and folders that are listed, and characters of their paths together: hard links
#: cost a trial no disk space, but this process memory.
MAX_NAMES: Final = 100_000
MAX_NAME_CHARS: Final = 2**24
#: The prefix of the folder of an attempt's files in the store.
ATTEMPT: Final = "attempt_"
#: Files that are not sent if they are empty.
_OUTPUTS: Final = frozenset({"stdout", "stderr"})
#: Names that a worker may not write in the store: see ``deploy/minio/worker-policy.json``.
_SCHEDULERS_FOLDER, _SCHEDULERS_FILE = "journal", "tuner.pkl"
#: How many characters of a name a message shows.
_SHOWN_CHARS: Final = 100


def send_folder(
    objects: ObjectStore,
    folder: Path,
    key: str,
    attempt: int,
    cancel: CancelToken,
    on_trouble: Callable[[str], None] = ignore,
    *,
    limit_bytes: int = LIMIT_BYTES,
) -> None:
    """Upload each file below ``folder``, under its name below ``key`` and the attempt's folder.

    So no attempt replaces files of another, however late its node is, nor what the scheduler and
    checkpoints have beside that folder. It skips empty output, files that a process writes (they
    are sent after it ends), checkpoints of unfinished saves, names that are reserved for the
    scheduler, and names that are invalid in the store, for instance too long.

    Args:
        objects: The store.
        folder: The trial's folder.
        key: The trial's key.
        attempt: The attempt that ended.
        cancel: Ends the upload early.
        on_trouble: Called with the problem before each retry; see `retried`.
        limit_bytes: The most bytes of all files together.

    Raises:
        StoreError: Some files could not be sent; all others were. Names the limit, the largest that
            exceeded it, or one that was skipped.
    """
    left = limit_bytes
    too_much: list[tuple[int, str]] = []
    reserved: list[str] = []
    unnamed: list[str] = []
    invalid: list[str] = []
    found, are_all = _files(folder, cancel)
    for size, name in sorted(found):
        cancel.check()
        parts = name.split(os.sep)
        if _SCHEDULERS_FOLDER in parts[:-1] or _SCHEDULERS_FILE in parts:
            reserved.append(name)
            continue
        if encodable(name) != name:
            unnamed.append(encodable(name))
            continue
        if size > left:
            too_much.append((size, name))
            continue
        left -= size
        if name in _OUTPUTS and size == 0:
            continue
        try:
            target = f"{key}/{ATTEMPT}{attempt}/{name}"
            _send(objects, folder, name, size, target, cancel, on_trouble)
        except InvalidObjectName:
            invalid.append(name)
    if not are_all:
        raise StoreError(
            f"the folder has more than {MAX_NAMES} files and folders, or their paths have more than"
            f" {MAX_NAME_CHARS} characters; have the trial pack them into an archive."
        )
    if unnamed:
        raise StoreError(
            f"{len(unnamed)} files were not sent, such as {min(unnamed)}: their names are not "
            "UTF-8, as names in a store must be; have the trial rename them."
        )
    if invalid:
        raise StoreError(
            f"{len(invalid)} files were not sent, such as {_shortened(min(invalid))}: the store "
            "rejects this name, or its key has more than 1024 bytes; have the trial use "
            "shorter names."
        )
    if reserved:
        raise StoreError(
            f"{len(reserved)} files were not sent, such as {min(reserved)}: in the store, "
            f"folders called {_SCHEDULERS_FOLDER}, and files and folders called "
            f"{_SCHEDULERS_FILE}, are the scheduler's; have the trial rename them."
        )
    if too_much:
        size, name = max(too_much)
        raise StoreError(
            f"{len(too_much)} files were not sent, because a trial's may take "
            f"{show_bytes(limit_bytes)} together; the largest is {name} ({show_bytes(size)})."
        )


def _send(
    objects: ObjectStore,
    folder: Path,
    name: str,
    size: int,
    key: str,
    cancel: CancelToken,
    on_trouble: Callable[[str], None],
) -> None:
    """Send a file, unless the trial extends, removes, replaces or leases it meanwhile."""
    try:
        with opened_below(folder, name) as file:
            with file.open("rb") as opened:
                sha256, hashed = sha256_of(opened, size)
            if hashed <= size:
                objects.put_file(
                    key, file, size=hashed, sha256=sha256, cancel=cancel, on_trouble=on_trouble
                )
    except (CheckpointCorrupt, FileNotFoundError):
        pass
    except OSError as error:
        # The trial, or another one of the same user, replaced the file or has a lease on it.
        if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EAGAIN):
            raise


def _shortened(name: str) -> str:
    return name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}..."


def _is_never_copied(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in NEVER_COPIED_CHECKPOINTS)


def _files(folder: Path, cancel: CancelToken) -> tuple[list[tuple[int, str]], bool]:
    """Return files as (size, relative path), and whether these are all; stop at the limits."""
    found: list[tuple[int, str]] = []
    chars = 0
    below = entries(folder, lambda path, name: path == str(folder) and _is_never_copied(name))
    for names, (path, entry) in enumerate(below, 1):
        cancel.check()
        name = os.path.relpath(os.path.join(path, entry.name), folder)
        chars += len(name)
        if names > MAX_NAMES or chars > MAX_NAME_CHARS:
            return found, False
        with suppress(OSError):  # the trial removed it, or its folder's permissions
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                found.append((status.st_size, name))
    return found, True
