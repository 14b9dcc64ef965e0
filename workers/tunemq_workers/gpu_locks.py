"""A GPU belongs to one worker: a lock file for each, which is free when its process is gone.

Workers of one machine find each other by it. Those in containers do where they share the folder.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from tunemq_shared.errors import ConfigError
from tunemq_shared.messages import Gpu

_RUN: Final = "/run/lock"
_UNSAFE: Final = re.compile(r"[^\w.-]+")
#: Workers of other users have to be able to lock it, too.
_MODE: Final = 0o666


def take_gpus(gpus: Iterable[Gpu], me: str, folder: str | None = None) -> list[int]:
    """Keep other workers away from these GPUs for as long as this process lives.

    Args:
        me: what the others are told of us, beside the process.
        folder: for the files; by default ``/run/lock``, or that for temporary files.

    Returns:
        Descriptors, which this process and nobody else holds open; closing one gives its GPU back.

    Raises:
        ConfigError: another process has one of them, or the file cannot be made.
    """
    folder = folder or (_RUN if os.access(_RUN, os.W_OK) else tempfile.gettempdir())
    held: list[int] = []
    try:
        for gpu in gpus:
            path = os.path.join(folder, f"tunemq-gpu-{_UNSAFE.sub('_', gpu.uuid)}.lock")
            held.append(_take(path, gpu, me))
    except ConfigError:
        for descriptor in held:
            os.close(descriptor)
        raise
    return held


def _take(path: str, gpu: Gpu, me: str) -> int:
    try:
        descriptor = _open(path)
    except OSError as problem:
        raise ConfigError(
            f"GPU {gpu.uuid} cannot be locked: {path}: {problem.strerror}."
        ) from problem
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        holder = os.read(descriptor, 200).decode(errors="replace")
        os.close(descriptor)
        shown = "".join(filter(str.isprintable, holder.strip())) or "a process that is not known"
        raise ConfigError(
            f"GPU {gpu.uuid} is offered by another worker already: {shown}. Stop that one, or name"
            " the GPUs of each with --gpus."
        ) from problem
    with suppress(OSError):  # who may not write may lock all the same
        os.truncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} ({me})\n".encode())
    return descriptor


def _open(path: str) -> int:
    """The file, made where it is not there; no link of somebody's to elsewhere is followed."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    # Where it is there it is not "created": in a folder for all, the kernel refuses others that.
    while True:
        try:
            return os.open(path, os.O_RDWR | flags)
        except FileNotFoundError:
            with suppress(FileExistsError):  # somebody was faster
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, _MODE)
                os.fchmod(descriptor, _MODE)
                return descriptor
        except PermissionError:
            return os.open(path, os.O_RDONLY | flags)
