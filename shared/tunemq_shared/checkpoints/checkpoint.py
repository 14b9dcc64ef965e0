"""`Checkpoint`: a folder of files, or a dict, from which a trial can continue.

A checkpoint made from a dict holds the pickled bytes until a caller asks for a folder. In a folder
the dict is one file, whose name marks the folder as a dict's. Nothing is unpickled before
`to_dict`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Self

from tunemq_shared.base.decoding_errors import NO_JSON
from tunemq_shared.base.errors import CheckpointError
from tunemq_shared.base.pickling import Unpicklable, dump
from tunemq_shared.base.unpickling import load_pickled

#: The one file of a checkpoint made from a dict.
DICT_FILE: Final = "checkpoint_dict.pkl"
#: Where `Checkpoint.set_metadata` stores the metadata; people may change it later.
METADATA_FILE: Final = ".metadata.json"


class Checkpoint:
    """The state of a trial at one moment; make one with `from_directory` or `from_dict`.

    Raises:
        CheckpointError: The path is not a folder.

    Example:
        >>> from tunemq import Checkpoint
        >>> Checkpoint.from_dict({"epoch": 3}).to_dict()
        {'epoch': 3}
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        folder = os.path.abspath(os.fspath(path))
        if not os.path.isdir(folder):
            raise CheckpointError(f"a checkpoint must be a folder, and {folder!r} is none.")
        self._path: str | None = folder
        self._pickled: bytes | None = None
        self._metadata: dict[str, Any] = {}

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Self:
        """Make a checkpoint of the files below ``path``, which stay where they are."""
        return cls(path)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Make a checkpoint of a dict, as it is now.

        Raises:
            CheckpointError: It is not a dict, or holds an object that cannot be pickled.
        """
        if not isinstance(data, dict):
            raise CheckpointError(
                f"Checkpoint.from_dict needs a dict, not {type(data).__qualname__}; "
                'wrap the value: {"model": value}.'
            )
        self = cls.__new__(cls)
        self._path = None
        self._metadata = {}
        try:
            self._pickled = dump(data)
        except Unpicklable as error:
            raise CheckpointError(
                f"the checkpoint cannot be saved: {error.explain('the dict', 'dict')}; "
                "leave that out."
            ) from error
        return self

    @property
    def path(self) -> str:
        """The folder with the files; a dict's folder is temporary and ends with this object."""
        if self._path is None:
            folder = tempfile.mkdtemp(prefix="checkpoint_")
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            self._write_to(folder)
            self._path = folder
        return self._path

    @property
    def is_dict(self) -> bool:
        """Whether the checkpoint was made from a dict."""
        return self._pickled is not None or os.path.isfile(os.path.join(self.path, DICT_FILE))

    def to_dict(self) -> dict[str, Any]:
        """Unpickle and return the dict; this runs code, so the checkpoint's source must be trusted.

        Raises:
            CheckpointError: The checkpoint was made from a directory.
        """
        pickled = self._pickled
        if pickled is None:
            if not self.is_dict:
                raise CheckpointError(
                    f"the checkpoint {self.path} was made from a directory; read its files with "
                    "as_directory()."
                )
            pickled = Path(self.path, DICT_FILE).read_bytes()
        data: dict[str, Any] = load_pickled(pickled, "the checkpoint's dict", is_current=False)
        return data

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """Yield the folder with the files; a dict's folder is removed at the end of the block."""
        if self._path is not None:
            yield self._path
            return
        with tempfile.TemporaryDirectory(prefix="checkpoint_") as folder:
            self._write_to(folder)
            yield folder

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy the files into ``path``, by default a new temporary folder; returns the folder."""
        folder = tempfile.mkdtemp(prefix="checkpoint_") if path is None else os.fspath(path)
        folder = os.path.abspath(folder)
        if self._path is None:
            os.makedirs(folder, exist_ok=True)
            self._write_to(folder)
        elif folder != self._path:
            shutil.copytree(self._path, folder, copy_function=_copy_writable, dirs_exist_ok=True)
        return folder

    def get_metadata(self) -> dict[str, Any]:
        """Return what `set_metadata` stored; an empty dict if there is nothing."""
        if self._path is None:
            return dict(self._metadata)
        file = Path(self._path, METADATA_FILE)
        try:
            found = json.loads(file.read_bytes())
        except FileNotFoundError:
            return {}
        except NO_JSON as error:
            raise CheckpointError(f"{file} is not JSON: {error}.") from error
        if not isinstance(found, dict):
            raise CheckpointError(f"{file} does not hold a JSON object.")
        return found

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Store metadata with the checkpoint, replacing the earlier metadata.

        Raises:
            CheckpointError: JSON cannot represent it.
        """
        try:
            text = json.dumps(dict(metadata))
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"a checkpoint's metadata must be what JSON can hold: {error}."
            ) from error
        if self._path is None:
            self._metadata = json.loads(text)
        else:
            _replace(Path(self._path, METADATA_FILE), text)

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Merge this into the metadata, replacing values of equal keys."""
        self.set_metadata({**self.get_metadata(), **metadata})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        if self._pickled is not None:
            return f"{type(self).__name__}(dict of {len(self._pickled)} bytes)"
        return f"{type(self).__name__}(path={self._path!r})"

    def __getstate__(self) -> dict[str, Any]:
        # The temporary folder of a dict is removed with this object: other processes make theirs.
        if self._pickled is None:
            return vars(self)
        return {"_path": None, "_pickled": self._pickled, "_metadata": self.get_metadata()}

    def _identity(self) -> str | bytes:
        if self._pickled is not None:
            return self._pickled
        return os.path.realpath(self.path)

    def _write_to(self, folder: str) -> None:
        if self._pickled is not None:
            Path(folder, DICT_FILE).write_bytes(self._pickled)
        if self._metadata:
            _replace(Path(folder, METADATA_FILE), json.dumps(self._metadata))


class RecordedCheckpoint(Checkpoint):
    """A checkpoint that a journal names, whose folder may have been removed since.

    Then only methods that read its files raise `CheckpointError`; the trial's results stay
    readable.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.path.abspath(os.fspath(path))
        self._pickled = None
        self._metadata = {}

    @property
    def path(self) -> str:
        """The folder with the files.

        Raises:
            CheckpointError: The folder no longer exists.
        """
        return self._present()

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """Yield the folder with the files."""
        yield self._present()

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy the files into ``path``, by default a new temporary folder; returns the folder."""
        self._present()
        return super().to_directory(path)

    def get_metadata(self) -> dict[str, Any]:
        """Return what `set_metadata` stored; an empty dict if there is nothing."""
        self._present()
        return super().get_metadata()

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Store metadata with the checkpoint, replacing the earlier metadata."""
        self._present()
        super().set_metadata(metadata)

    def __reduce__(self) -> tuple[type[Checkpoint], tuple[str]]:
        return Checkpoint, (self._present(),)

    def _identity(self) -> str:
        return os.path.realpath(str(self._path))

    def _present(self) -> str:
        folder = str(self._path)
        if not os.path.isdir(folder):
            raise CheckpointError(
                f"the checkpoint {folder} is gone: its folder was removed after the trial saved it."
            )
        return folder


def _copy_writable(source: str, target: str) -> None:
    """Copy a file and make the copy writable; a shared original may be read-only."""
    shutil.copy2(source, target)
    os.chmod(target, os.stat(target).st_mode | stat.S_IWUSR)


def _replace(file: Path, text: str) -> None:
    """Write the file so that a reader sees either the old or the new content."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)
