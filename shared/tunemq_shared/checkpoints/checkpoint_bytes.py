"""Checkpoints as bytes, and the temporary folders into which they are unpacked.

A temporary checkpoint stays in its trial's folder until the trial ends, because the trainable may
read it at any time; to outlast the trial, it is copied into a permanent one.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from tunemq_shared.base.errors import CheckpointError
from tunemq_shared.base.safe_names import is_safe_name
from tunemq_shared.checkpoints.checkpoint_markers import TEMPORARY_PREFIX, make_checkpoint_folder

logger = logging.getLogger(__name__)

_TEMPORARY_MARK: Final = ".temp_marker"
#: A checkpoint in memory of this size or more causes a warning.
LARGE_BYTES: Final = 10_000_000


def folder_to_bytes(folder: str) -> bytes:
    """Pack all files below ``folder`` into bytes; warns if they are large."""
    root = Path(folder)
    files = {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path != root / _TEMPORARY_MARK
    }
    packed = msgspec.msgpack.encode(files)
    if len(packed) >= LARGE_BYTES:
        logger.warning(
            "A checkpoint of %.1f MB is held in memory; save() writes it to a folder instead.",
            len(packed) / 1e6,
        )
    return packed


def bytes_to_folder(packed: bytes, parent: str) -> str:
    """Unpack the result of `folder_to_bytes` into a new temporary checkpoint below ``parent``.

    Raises:
        CheckpointError: The bytes are not such a result.
    """
    try:
        files = msgspec.msgpack.decode(packed, type=dict[str, bytes])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"the bytes are no checkpoint ({error}); give what save_to_object() returned."
        ) from error
    for name in files:
        if not is_safe_name(name):
            raise CheckpointError(
                f"the bytes are no checkpoint: {name!r} is not the name of a file below it."
            )
    folder = tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=parent)
    for name, content in files.items():
        file = Path(folder, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    Path(folder, _TEMPORARY_MARK).touch()
    return folder


def is_temporary(folder: str | Path) -> bool:
    """Whether ``folder`` is a temporary checkpoint."""
    return os.path.exists(os.path.join(folder, _TEMPORARY_MARK))


def make_permanent(folder: str | Path, parent: str, step: int) -> str:
    """Copy a temporary checkpoint into the permanent one of ``step`` below ``parent``.

    Raises:
        CheckpointError: ``folder`` is not a temporary checkpoint.
    """
    if not is_temporary(folder):
        raise CheckpointError(f"{folder} is no temporary checkpoint: it is permanent already.")
    permanent = make_checkpoint_folder(parent, step)
    ignore = shutil.ignore_patterns(_TEMPORARY_MARK)
    shutil.copytree(folder, permanent, dirs_exist_ok=True, ignore=ignore)
    return permanent
