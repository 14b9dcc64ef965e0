"""The folders of experiments and trials: their names, and how they and their files are made.

Names are short and hold no parameters (a path with parameters in it breaks at 260 characters on one
system and at a slash on another), and are safe on every system: letters, digits and ``-_.,=+@``
only.
"""

from __future__ import annotations

import os
import re
import time
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from tunemq_shared.base.errors import ConfigError, StoreError
from tunemq_shared.objects.store_address import canonical_address, is_remote
from tunemq_shared.system.plain_files import (
    TRIES,
    make_folder,
    move_aside,
    open_to_read,
    open_to_write,
)

#: The longest name, in bytes; with what is added to it, it stays far below the 255 of file systems.
MAX_NAME_BYTES: Final = 80
#: The variable that moves the results folder.
RESULTS_VARIABLE: Final = "TUNEMQ_RESULTS"
#: The farm's own folder among the results, and the file there that whoever makes a backup touches.
OWN_FOLDER: Final = ".farm"
BACKUP_NOTE: Final = "last-backup"
#: The files in a trial's folder: its configuration, its results, and all failures of the trial.
PARAMS_JSON: Final = "params.json"
PARAMS_PICKLE: Final = "params.pkl"
RESULT_JSON: Final = "result.json"
PROGRESS_CSV: Final = "progress.csv"
ERROR_FILE: Final = "error.txt"

_UNSAFE: Final = re.compile(r"[^\w.,=+@-]+")
#: Windows' devices, and the folders of a store that no search may be.
_RESERVED: Final = re.compile(
    r"((con|prn|aux|nul|com\d|lpt\d)(\..*)?|journal|blobs)", re.IGNORECASE | re.ASCII
)


def safe_name(text: str, fallback: str, limit: int = MAX_NAME_BYTES) -> str:
    """``text`` without what a file name cannot hold somewhere, at most ``limit`` bytes long.

    White space becomes an underscore; ``fallback`` is the name if nothing is left.
    """
    joined = "_".join(unicodedata.normalize("NFC", text).split())
    kept = _UNSAFE.sub("", joined).encode(errors="ignore")[:limit].decode(errors="ignore")
    name = kept.lstrip(".-").rstrip(".")
    if _RESERVED.fullmatch(name):
        name = f"_{name}"
    return name or fallback


def experiment_name(trainable: str, at: float) -> str:
    """The name of an experiment that was given none: what it runs, and the local time ``at``."""
    when = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(at))
    return f"{safe_name(trainable, 'experiment')}_{when}"


def results_folder(storage_path: str | os.PathLike[str] | None) -> str:
    """Where experiments go; by default ``$TUNEMQ_RESULTS``, else ``~/tunemq_results``.

    Raises:
        ConfigError: it is an address, but none of this machine's folders.
    """
    given = storage_path or os.environ.get(RESULTS_VARIABLE) or "~/tunemq_results"
    chosen = os.fspath(given)
    if is_remote(chosen):
        raise ConfigError(
            f"${RESULTS_VARIABLE}={chosen!r} is no folder of this machine; give that address as "
            "RunConfig(storage_path=...)."
        )
    return canonical_address(chosen)


def farm_results_folder(results: str | None, store: str | None) -> str:
    """Where a farm's experiments go: into the store, where that is a folder of all machines.

    Args:
        results: the folder that was given, if one was.
        store: the store that was given, if one was.

    Raises:
        ConfigError: the one is no folder of this machine, or the other is another folder.
    """
    if results is not None and is_remote(results):
        raise ConfigError(
            f"--results {results} is no folder of this machine; what all machines reach is --store."
        )
    if store is None or is_remote(store):
        return results_folder(results)
    shared = canonical_address(store)
    if not os.path.isabs(os.path.expanduser(store.removeprefix("file://"))):
        raise ConfigError(
            f"--store {store} is a folder only as seen from where this command runs; give the whole"
            f" path of a folder that all machines mount, such as {shared}, or s3://bucket/prefix."
        )
    if results is not None and canonical_address(results) != shared:
        raise ConfigError(
            f"--store {store} is a folder, into which results go, too, and --results {results} is"
            " another one; leave one of them out."
        )
    return shared


def make_experiment_folder(
    storage: str, name: str, *, is_new: bool, is_taken: Callable[[str], bool] = lambda _name: False
) -> str:
    """The experiment's folder, made if need be.

    Args:
        storage: the folder of all experiments.
        name: the experiment's name, made safe here.
        is_new: the name was made up, so that a folder of that name is somebody else's; then ``_2``,
            ``_3`` and so on is added.
        is_taken: whether a name that is free among the folders is somebody else's all the same.

    Raises:
        ConfigError: it cannot be made or written; says where, why and what to do.
    """
    base = path = os.path.join(storage, safe_name(name, "experiment"))
    number = 1
    try:
        os.makedirs(storage, exist_ok=True)
        while True:
            try:
                if not is_taken(os.path.basename(path)):
                    os.mkdir(path)
                    break
            except FileExistsError:
                if not is_new and os.path.isdir(path):
                    break
                if not is_new:
                    raise
            number += 1
            path = f"{base}_{number}"
    except OSError as error:
        raise _unusable(path, error) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise _unusable(path, PermissionError(None, "no permission to write"))
    return path


def make_trial_folder(path: str) -> None:
    """Make a trial's folder unless it is there.

    Raises:
        StoreError: it cannot be made; says where and why.
    """
    try:
        make_folder(path)
    except OSError as error:
        raise StoreError(
            f"the trial's folder {path} cannot be made: {error.strerror}. "
            "Make room or make the results folder writable, then restore the experiment."
        ) from error


def write_file(path: str, content: bytes) -> None:
    """Write a small file that can be made again.

    Raises:
        StoreError: it cannot be written; says where and why.
    """
    try:
        descriptor = open_to_write(path, os.O_WRONLY | os.O_TRUNC)
        try:
            left = memoryview(content)
            while left:
                left = left[os.write(descriptor, left) :]
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}.") from error


def replace_file(
    path: str, content: bytes, *, when_written: Callable[[], None] = lambda: None
) -> None:
    """Write a file so that there is always either the old one or the new one, whole.

    That holds for a power cut, too: the old one may have been on the disk for long.

    Args:
        when_written: called when the disk has the new one, and the old one still has its name.

    Raises:
        StoreError: it cannot be written; the old one stands.
    """
    beside = f"{path}.new"
    tries = TRIES
    while True:
        try:
            write_file(beside, content)
            with open_to_read(beside) as written:
                os.fsync(written.fileno())
            when_written()
            if os.path.isdir(path):
                move_aside(path)
            os.replace(beside, path)
            return
        except (FileNotFoundError, NotADirectoryError) as error:
            tries -= 1  # a trial's code may have removed its folder in this moment
            if not tries:
                raise StoreError(f"{path} cannot be replaced: {error.strerror}.") from error
        except OSError as error:
            with suppress(OSError):  # it would take up room on a full disk
                os.unlink(beside)
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"{path} cannot be replaced: {error.strerror}.") from error


def _unusable(path: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"the results folder {path} cannot be used: {error.strerror}. Set "
        f"RunConfig(storage_path=...) or ${RESULTS_VARIABLE} to a folder that you may write."
    )
