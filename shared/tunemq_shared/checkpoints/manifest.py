"""Manifests: a checkpoint's names, sizes, hashes and trial state, as JSON beside its files.

The journal holds a manifest's own hash, which thus covers every byte of a checkpoint. Names in a
manifest are untrusted all the same: a store joins them to its own paths.

A checkpoint on a disk is a folder ``files`` with a manifest beside it: ``manifest.json``, as its
writer made it, or ``committed.json``, as it is in an object store, with the key of the object that
holds each content. A node's copy may have both.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Any, Final

import msgspec

from tunemq_shared.base.errors import CheckpointCorrupt, CheckpointError
from tunemq_shared.base.safe_names import is_safe_name

MANIFEST_VERSION: Final = 1
#: Names in a checkpoint's folder.
FILES: Final = "files"
MANIFEST: Final = "manifest.json"
COMMITTED: Final = "committed.json"
#: The most files and empty folders in one checkpoint, on writing and reading.
MAX_FILES: Final = 100_000
#: The longest manifest, in bytes.
MAX_MANIFEST: Final = 64 * 2**20
#: The most commas, brackets and braces in one: a few bytes of JSON become a value of 64.
MAX_MANIFEST_VALUES: Final = 2_000_000

#: The most characters of a name in a message.
_SHOWN: Final = 200
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_NO_OBJECTS: Final[Mapping[str, str]] = MappingProxyType({})


class FileEntry(msgspec.Struct, frozen=True):
    """One file: its path below the checkpoint's folder, with ``/``; its size in bytes; its hash."""

    name: str
    size: int
    sha256: str


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint's trial and step; ``n`` counts a trial's checkpoints in one attempt, from 1.

    ``metrics`` is the result that it contains, ``state`` the counters that a restored trial needs.
    """

    trial: str
    attempt: int
    n: int
    step: int
    metrics: dict[str, Any]
    state: dict[str, Any]


class Manifest(CheckpointInfo, frozen=True, kw_only=True):
    """The complete contents of a checkpoint; ``folders`` are the empty ones.

    ``objects`` is empty outside of object stores. There it maps the hash of each file to the key of
    the object with its bytes, ``<key of the checkpoint that first had it>/<hash>``.
    """

    version: int
    files: tuple[FileEntry, ...]
    folders: tuple[str, ...] = ()
    objects: dict[str, str] = {}

    @property
    def size(self) -> int:
        """The size of all files together, in bytes."""
        return sum(file.size for file in self.files)


# msgspec examines a type at its first use, and crashes if several threads do that at once.
msgspec.json.Decoder(Manifest)


def make_manifest(
    info: CheckpointInfo,
    files: tuple[FileEntry, ...],
    folders: tuple[str, ...],
    objects: Mapping[str, str] = _NO_OBJECTS,
) -> bytes:
    """Encode the manifest of these files; the journal records the SHA-256 of the bytes.

    Args:
        info: The checkpoint's trial, step, metrics and state; may be an existing manifest.
        files: The files.
        folders: The names of empty folders.
        objects: Where an object store has the files' contents: hash to key.

    Raises:
        CheckpointError: Metrics or state hold values that JSON cannot represent, or the manifest
            exceeds a limit that readers enforce.
    """
    content = {
        "version": MANIFEST_VERSION,
        **msgspec.structs.asdict(info),
        "files": [msgspec.structs.asdict(file) for file in files],
        "folders": folders,
    }
    content.pop("objects", None)
    if objects:
        content["objects"] = dict(objects)
    try:
        # The standard library's JSON keeps NaN and infinities, which metrics may be.
        data = json.dumps(content, indent=1).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the checkpoint's metrics and state must be plain values: {error}."
        ) from error
    if len(files) + len(folders) > MAX_FILES:
        raise CheckpointError(
            f"the checkpoint has {len(files) + len(folders)} files and empty folders; {MAX_FILES} "
            "is the most. Pack them into an archive."
        )
    if len(data) > MAX_MANIFEST:
        raise CheckpointError(
            f"the checkpoint's manifest has {len(data)} bytes; {MAX_MANIFEST} is the most. Keep "
            "large metrics and state in files."
        )
    if _values(data) > MAX_MANIFEST_VALUES:
        raise CheckpointError(
            f"the checkpoint's metrics and state have more than {MAX_MANIFEST_VALUES} values. Keep "
            "them in files."
        )
    return data


def read_manifest(key: str, data: bytes, sha256: str) -> Manifest:
    """Verify the hash of checkpoint ``key``'s manifest, parse it and check its content.

    Raises:
        CheckpointCorrupt: The hash differs, or the manifest is invalid; see `parse_manifest`.
    """
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise CheckpointCorrupt(
            f"checkpoint {key}: manifest.json is damaged: expected SHA-256 {sha256}, got {found}."
        )
    return parse_manifest(key, data)


def parse_manifest(key: str, data: bytes) -> Manifest:
    """Parse and check the manifest of checkpoint ``key``, without verifying its hash.

    Raises:
        CheckpointCorrupt: It is malformed, too long, of another version, has a name that would
            leave the checkpoint's folder, or has other content that no writer produces.
    """
    if len(data) > MAX_MANIFEST:
        raise CheckpointCorrupt(
            f"checkpoint {key}: manifest.json has {len(data)} bytes; {MAX_MANIFEST} is the most."
        )
    if _values(data) > MAX_MANIFEST_VALUES:
        raise CheckpointCorrupt(
            f"checkpoint {key}: manifest.json has more than {MAX_MANIFEST_VALUES} values."
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
    for wrong in _defects(manifest):
        raise CheckpointCorrupt(f"checkpoint {key}: {wrong}.")
    return manifest


def is_object_key(key: str, sha256: str) -> bool:
    """Whether ``key`` can belong to an object with this hash: ``<trial>/<checkpoint>/<hash>``."""
    parts = key.split("/")
    return (
        is_safe_name(key)
        and len(parts) == 3
        and not any(part.startswith(".") for part in parts)
        and parts[-1] == sha256
    )


def _values(data: bytes) -> int:
    """Return a number that is at least that of the values in JSON, without parsing it."""
    return sum(map(data.count, (b",", b"[", b"{")))


def _defects(manifest: Manifest) -> Iterator[str]:
    """Iterate over what makes a manifest unusable, cheapest checks first."""
    count = len(manifest.files) + len(manifest.folders)
    if max(count, len(manifest.objects)) > MAX_FILES:
        yield f"it lists {max(count, len(manifest.objects))} files; {MAX_FILES} is the most"
    for name in chain((file.name for file in manifest.files), manifest.folders):
        if not is_safe_name(name):
            yield f"{_shown(name)} is not the name of a file below it"
    yield from _clashes(manifest)
    for file in manifest.files:
        if file.size < 0:
            yield f"the file {_shown(file.name)} has {file.size} bytes"
        if not _SHA256.fullmatch(file.sha256):
            yield f"the file {_shown(file.name)} has {_shown(file.sha256)} for a SHA-256"
        if manifest.objects and file.sha256 not in manifest.objects:
            yield f"no object holds the file {_shown(file.name)}"
    for sha256, object_key in manifest.objects.items():
        if not (_SHA256.fullmatch(sha256) and is_object_key(object_key, sha256)):
            key, of = _shown(object_key), _shown(sha256)
            yield f"{key} is not the key of an object with the SHA-256 {of}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


def _clashes(manifest: Manifest) -> Iterator[str]:
    files = {file.name for file in manifest.files}
    names = [*(file.name for file in manifest.files), *manifest.folders]
    # In this order, the names below a folder follow it directly.
    for name, following in pairwise(sorted(names, key=lambda name: name.replace("/", "\0"))):
        if name == following:
            yield f"the file {_shown(name)} is listed twice"
        if name in files and following.startswith(f"{name}/"):
            yield f"{_shown(name)} is listed as a file, and {_shown(following)} is below it"
