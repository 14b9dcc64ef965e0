"""What a checkpoint consists of, as JSON beside its files: names, sizes, hashes, a trial's state.

A manifest's own hash is in the journal; with it every byte of a checkpoint is accounted for. Names
in a manifest are untrusted all the same: a store joins them to a path of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import PurePosixPath
from typing import Any, Final

import msgspec

from tunemq_shared.errors import CheckpointCorrupt, CheckpointError

MANIFEST_VERSION: Final = 1


class FileEntry(msgspec.Struct, frozen=True):
    """One file: its path below the checkpoint's folder, with ``/``; its size in bytes; its hash."""

    name: str
    size: int
    sha256: str


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint is of: ``n`` counts a trial's checkpoints in one epoch, from 1.

    ``metrics`` is the result that it contains, ``state`` what a trial needs to go on counting.
    """

    trial: str
    epoch: int
    n: int
    step: int
    metrics: dict[str, Any]
    state: dict[str, Any]


class Manifest(CheckpointInfo, frozen=True, kw_only=True):
    """The complete contents of a checkpoint; ``folders`` are the empty ones."""

    version: int
    files: tuple[FileEntry, ...]
    folders: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The size of all files together, in bytes."""
        return sum(file.size for file in self.files)


def make_manifest(
    info: CheckpointInfo, files: tuple[FileEntry, ...], folders: tuple[str, ...]
) -> bytes:
    """The manifest of these files as bytes; its SHA-256 is what the journal records.

    Raises:
        CheckpointError: metrics or state hold what JSON cannot.
    """
    content = {
        "version": MANIFEST_VERSION,
        **msgspec.structs.asdict(info),
        "files": [msgspec.structs.asdict(file) for file in files],
        "folders": folders,
    }
    try:
        # The standard library's JSON keeps NaN and infinities, which metrics have.
        return json.dumps(content, indent=1).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint's metrics and state must be plain values: {error}."
        ) from error


def read_manifest(key: str, data: bytes, sha256: str) -> Manifest:
    """The manifest of checkpoint ``key``, once its hash and every name in it are checked.

    Raises:
        CheckpointCorrupt: it has another hash, is no manifest, is of another version, or has a name
            that would leave the checkpoint's folder.
    """
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise CheckpointCorrupt(
            f"checkpoint {key}: manifest.json is damaged: expected SHA-256 {sha256}, got {found}."
        )
    try:
        manifest = msgspec.convert(json.loads(data), Manifest)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"checkpoint {key}: manifest.json is not one: {error}.") from error
    if manifest.version != MANIFEST_VERSION:
        raise CheckpointCorrupt(
            f"checkpoint {key} is of version {manifest.version}; "
            f"this TuneMQ reads {MANIFEST_VERSION}."
        )
    for name in chain((file.name for file in manifest.files), manifest.folders):
        if not is_safe_name(name):
            raise CheckpointCorrupt(
                f"checkpoint {key}: {name!r} is not the name of a file below it."
            )
    for name in _repeated(manifest):
        raise CheckpointCorrupt(f"checkpoint {key}: the file {name!r} is listed twice.")
    return manifest


def is_safe_name(name: str) -> bool:
    """Whether the relative path, joined to a folder, stays below it: no ``..``, root, or NUL."""
    return (
        bool(name)
        and "\0" not in name
        and str(PurePosixPath(name)) == name
        and not name.startswith("/")
        and not {"..", "."} & set(name.split("/"))
    )


def _repeated(manifest: Manifest) -> Iterator[str]:
    seen: set[str] = set()
    for file in manifest.files:
        if file.name in seen:
            yield file.name
        seen.add(file.name)
