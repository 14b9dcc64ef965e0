"""The folders of experiments and trials: their names, and functions that create files.

Names are short and contain no parameters (such paths break at 260 characters on one system and at a
slash on another). They are safe on every system: letters, digits and ``-_.,=+@`` only.
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

#: The most bytes of a name; with additions it stays far below the 255 of file systems.
MAX_NAME_BYTES: Final = 80
#: The environment variable that sets the results folder.
RESULTS_VARIABLE: Final = "TUNEMQ_RESULTS"
#: The farm's own folder among the results, and the file in it that each backup touches.
OWN_FOLDER: Final = ".farm"
BACKUP_NOTE: Final = "last-backup"
#: The files in a trial's folder: its configuration, its results, and its failures.
PARAMS_JSON: Final = "params.json"
PARAMS_PICKLE: Final = "params.pkl"
RESULT_JSON: Final = "result.json"
PROGRESS_CSV: Final = "progress.csv"
ERROR_FILE: Final = "error.txt"

_UNSAFE: Final = re.compile(r"[^\w.,=+@-]+")
#: Device names of Windows, and folder names that the store uses itself.
_RESERVED: Final = re.compile(
    r"((con|prn|aux|nul|com\d|lpt\d)(\..*)?|journal|blobs)", re.IGNORECASE | re.ASCII
)


def safe_name(text: str, fallback: str, limit: int = MAX_NAME_BYTES) -> str:
    """Return ``text`` without characters that some file system rejects, limited in bytes.

    White space becomes an underscore. If nothing is left, the result is ``fallback``.

    Args:
        text: the proposed name.
        fallback: the name to use instead.
        limit: the most bytes.
    """
    joined = "_".join(unicodedata.normalize("NFC", text).split())
    kept = _UNSAFE.sub("", joined).encode(errors="ignore")[:limit].decode(errors="ignore")
    name = kept.lstrip(".-").rstrip(".")
    if _RESERVED.fullmatch(name):
        name = f"_{name}"
    return name or fallback


def experiment_name(trainable: str, at: float) -> str:
    """Return the default name of an experiment: its trainable, and the local time ``at``."""
    when = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(at))
    return f"{safe_name(trainable, 'experiment')}_{when}"


def results_folder(storage_path: str | os.PathLike[str] | None) -> str:
    """Return the results folder; by default ``$TUNEMQ_RESULTS``, else ``~/tunemq_results``.

    Raises:
        ConfigError: it is the address of a store, not a folder of this machine.
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
    """Return a farm's results folder: the store, if that is a folder of all machines.

    Args:
        results: the given results folder, if any.
        store: the given store, if any.

    Raises:
        ConfigError: ``results`` is no folder of this machine, or ``store`` is a different folder.
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
    """Return the experiment's folder, and create it if necessary.

    Args:
        storage: the folder of all experiments.
        name: the experiment's name, made safe here.
        is_new: a folder of this name belongs to another experiment; then ``_2``, ``_3`` and so on
            is added.
        is_taken: whether another experiment uses a name for which there is no folder.

    Raises:
        ConfigError: it cannot be created or written; says where, why and what to do.
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
    """Create a trial's folder unless it exists.

    Raises:
        StoreError: it cannot be created; says where and why.
    """
    try:
        make_folder(path)
    except OSError as error:
        raise StoreError(
            f"the trial's folder {path} cannot be made: {error.strerror}. "
            "Make room or make the results folder writable, then restore the experiment."
        ) from error


def write_file(path: str, content: bytes) -> None:
    """Write a small file that can be recreated.

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
    """Replace a file atomically: at any time either the old or the new content is complete.

    This holds for a power cut, too, which must not destroy an old file that was long on disk.

    Args:
        path: the file.
        content: the new content.
        when_written: called when the new content is on disk and the old file still has its name.

    Raises:
        StoreError: it cannot be written; the old file is unchanged.
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
            tries -= 1  # a trial's code may just have removed its folder
            if not tries:
                raise StoreError(f"{path} cannot be replaced: {error.strerror}.") from error
        except OSError as error:
            with suppress(OSError):  # it would use space on a full disk
                os.unlink(beside)
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"{path} cannot be replaced: {error.strerror}.") from error


def _unusable(path: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"the results folder {path} cannot be used: {error.strerror}. Set "
        f"RunConfig(storage_path=...) or ${RESULTS_VARIABLE} to a folder that you may write."
    )
