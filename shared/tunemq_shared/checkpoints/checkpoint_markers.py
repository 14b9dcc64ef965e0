"""Mark files and notes inside checkpoint folders: their form, and the trial's progress.

A *null* checkpoint means "saved before there was state to save": a trial restored from it starts
from the beginning.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tunemq_shared.base.decoding_errors import NO_JSON
from tunemq_shared.base.errors import CheckpointError
from tunemq_shared.checkpoints.checkpoint import Checkpoint
from tunemq_shared.system.folder_trees import remove_tree

_MARK: Final = ".is_checkpoint"
_NULL_MARK: Final = ".null_marker"
_NOTES: Final = ".tune_metadata.json"
#: The name of a null checkpoint, and the prefix of temporary checkpoint folders.
NULL_NAME: Final = "checkpoint_-00001"
TEMPORARY_PREFIX: Final = "checkpoint_tmp"
#: Patterns for folders below a trial's folder that are never copied: committed checkpoints have
#: other names, so these hold an unfinished save, or one that a kill interrupted.
NEVER_COPIED_CHECKPOINTS: Final = (
    f"{TEMPORARY_PREFIX}*",
    NULL_NAME,
    f"checkpoint_{'[0-9]' * 6}*",
)

_AS_DICT, _RELATIVE = "as_dict", "relative"


@dataclass(frozen=True, slots=True)
class CheckpointForm:
    """The form in which the trainable returned its checkpoint, and in which it gets it back.

    Args:
        as_dict: It was a dict.
        relative: It was a path inside the folder, this one; empty for the folder itself.
    """

    as_dict: bool = False
    relative: str = ""

    @classmethod
    def noted(cls, notes: Mapping[str, Any], folder: str | Path) -> CheckpointForm:
        """The form in the notes of `state`; without notes, the form that fits the folder."""
        if _AS_DICT not in notes:
            return cls(as_dict=Checkpoint.from_directory(folder).is_dict)
        return cls(as_dict=notes[_AS_DICT], relative=notes[_RELATIVE])

    def state(self) -> dict[str, Any]:
        """The form as plain values, to be stored with the checkpoint."""
        return {_AS_DICT: self.as_dict, _RELATIVE: self.relative}

    def given_back(self, folder: str | Path) -> str | dict[str, Any]:
        """Make the trainable's restore argument from the files below ``folder``."""
        if self.as_dict:
            return Checkpoint.from_directory(str(folder)).to_dict()
        return os.path.join(folder, self.relative) if self.relative else str(folder)


AS_FOLDER: Final = CheckpointForm()


def make_checkpoint_folder(parent: str, step: int, kept: Container[str] | None = None) -> str:
    """Make the checkpoint folder of ``step`` below ``parent``, unless it exists.

    Args:
        kept: The folders that may exist: another is what a killed attempt left, and is made anew.
    """
    folder = os.path.join(parent, f"checkpoint_{step:06d}")
    if kept is not None and folder not in kept and os.path.exists(os.path.join(folder, _MARK)):
        remove(folder)
    return _marked(folder)


def make_null_checkpoint(parent: str) -> str:
    """Make a null checkpoint below ``parent``."""
    folder = _marked(os.path.join(parent, NULL_NAME))
    Path(folder, _NULL_MARK).touch()
    return folder


def is_null(folder: str | Path) -> bool:
    """Whether ``folder`` is a null checkpoint."""
    return os.path.exists(os.path.join(folder, _NULL_MARK))


def find_checkpoint_folder(path: str) -> str:
    """Find the marked folder that is ``path`` or contains it.

    Raises:
        CheckpointError: There is none.
    """
    absolute = os.path.abspath(path)
    folder = absolute
    while not os.path.exists(os.path.join(folder, _MARK)):
        above = os.path.dirname(folder)
        if above == folder:
            raise CheckpointError(
                f"{absolute} is not in a checkpoint folder. Write the checkpoint below the path "
                f"that make_checkpoint_dir(step) or checkpoint_dir(step) gives."
            )
        folder = above
    return folder


def form_within(folder: str, path: str) -> CheckpointForm:
    """The form of a checkpoint in ``folder`` for which the trainable returned ``path``.

    Raises:
        CheckpointError: ``path`` does not exist, or is outside ``folder``.
    """
    relative = os.path.relpath(path, folder)
    if relative.split(os.sep, 1)[0] == os.pardir or not os.path.exists(path):
        raise CheckpointError(
            f"The checkpoint was said to be {path!r}, which is not in {folder!r}. Write below that "
            f"folder, and return a path in it, a dict, or nothing."
        )
    return CheckpointForm(relative="" if relative == os.curdir else relative)


def write_notes(folder: str, notes: Mapping[str, Any]) -> None:
    """Write ``notes`` (plain values) beside the files of the checkpoint."""
    with open(os.path.join(folder, _NOTES), "w", encoding="utf-8") as file:
        json.dump(dict(notes), file)


def read_notes(folder: str) -> dict[str, Any]:
    """Read a checkpoint's notes; empty for a folder that TuneMQ did not write.

    Raises:
        CheckpointError: The notes are damaged.
    """
    try:
        with open(os.path.join(folder, _NOTES), encoding="utf-8") as file:
            notes = json.load(file)
    except FileNotFoundError:
        return {}
    except NO_JSON as error:
        raise CheckpointError(f"{os.path.join(folder, _NOTES)} is damaged: {error}.") from error
    if not isinstance(notes, dict):
        raise CheckpointError(f"{os.path.join(folder, _NOTES)} is damaged: not a table.")
    return notes


def remove(folder: str | Path) -> None:
    """Remove a temporary folder; files that cannot be removed stay."""
    remove_tree(folder)


def remove_leftovers(parent: str | Path) -> None:
    """Remove the temporary folders below ``parent`` that killed processes left."""
    for name in os.listdir(parent):
        if name.startswith(TEMPORARY_PREFIX):
            remove(os.path.join(parent, name))


def make_copy_folder(parent: str, attempt: int) -> str:
    """Make a temporary folder below ``parent`` for the copy of a checkpoint that an attempt reads.

    The trial's code may write there: the checkpoint itself is also for other trials and attempts.
    """
    return tempfile.mkdtemp(prefix=_of_attempt(attempt), dir=parent)


def remove_copies(parent: str, attempt: int) -> None:
    """Remove what `make_copy_folder` made for an attempt that has ended, if it is possible."""
    # A list of the names may not fit in memory.
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(_of_attempt(attempt)):
                remove(entry.path)


def _of_attempt(attempt: int) -> str:
    return f"{TEMPORARY_PREFIX}_{attempt}_"


def _marked(folder: str) -> str:
    os.makedirs(folder, exist_ok=True)
    Path(folder, _MARK).touch()
    return folder
