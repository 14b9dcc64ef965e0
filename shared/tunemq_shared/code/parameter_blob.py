"""Parameter blobs: objects whose large buffers processes map instead of reading.

    magic | size of the index | index (msgpack) | pickle | buffers, each aligned

The pickle has protocol 5 with out-of-band buffers. The writer writes the buffers from where they
lie in memory, and the reader's arrays are views of the read-only mapping: neither side copies them.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

from tunemq_shared.base.errors import StoreError, TrainableError
from tunemq_shared.base.pickling import PickledPart, Unpicklable, blame, dump_out_of_band
from tunemq_shared.base.unpickling import load_pickled
from tunemq_shared.code.blob_folder import BlobFolder, check_blob
from tunemq_shared.code.code_by_value import modules_of
from tunemq_shared.protocol.messages import BlobRef

_MAGIC: Final = b"TMQPAR01"
#: Buffers of a page or more are page-aligned; smaller ones are aligned for vector instructions.
_PAGE: Final = 4096
_VECTOR: Final = 64


class _Index(msgspec.Struct, frozen=True, array_like=True):
    """The places of pickle and buffers: (offset in the part after the index, size), in bytes."""

    pickle: tuple[int, int]
    buffers: tuple[tuple[int, int], ...]


class DumpedParameters(NamedTuple):
    """Objects as a pickle in pieces, and their large buffers where they lie in memory."""

    chunks: list[bytes]
    buffers: list[memoryview]


def dump_parameters(objects: dict[str, Any]) -> DumpedParameters:
    """Pickle the objects without copying their large buffers.

    Raises:
        TrainableError: One of them cannot be pickled; the message names it.
    """
    try:
        return DumpedParameters(*dump_out_of_band(objects))
    except Unpicklable as error:
        why = blame(PickledPart(f"{name!r}", name, value) for name, value in objects.items())
        raise TrainableError(
            f"with_parameters cannot send this to a worker: {why or error}; "
            "bind what describes it and create it in the trainable."
        ) from error


def write_parameters(dumped: DumpedParameters, blobs: BlobFolder) -> BlobRef:
    """Write the objects as one blob.

    Raises:
        StoreError: The blob cannot be written.
    """
    return blobs.put(_laid_out(dumped.chunks, dumped.buffers))


def map_parameters(ref: BlobRef) -> dict[str, Any]:
    """Load the objects of a blob; their buffers are read-only views of it, shared by all processes.

    Raises:
        TrainableError: A class in it cannot be imported here.
        StoreError: The blob is missing or damaged.
    """
    index, body = _mapped(ref)
    buffers = [body[at : at + length] for at, length in index.buffers]
    objects = load_pickled(_pickle(index, body), "the objects of with_parameters", buffers)
    if not isinstance(objects, dict):
        raise StoreError(f"the blob {ref.path} does not hold parameters.")
    return objects


def modules_of_parameters(ref: BlobRef) -> tuple[str, ...]:
    """List the installed modules that `map_parameters` would import."""
    index, body = _mapped(ref)
    return modules_of(_pickle(index, body))


def _mapped(ref: BlobRef) -> tuple[_Index, memoryview]:
    """Map the blob; returns its index, and the bytes after the index."""
    start = len(_MAGIC) + 8
    with check_blob(ref).open("rb") as file:
        if ref.size < start:  # mmap rejects an empty file
            raise StoreError(f"the blob {ref.path} does not hold parameters.")
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if mapped[: len(_MAGIC)].tobytes() != _MAGIC:
        raise StoreError(f"the blob {ref.path} does not hold parameters.")
    end = start + int.from_bytes(mapped[len(_MAGIC) : start], "big")
    try:
        index = msgspec.msgpack.decode(mapped[start:end], type=_Index)
    except msgspec.DecodeError as error:
        raise StoreError(f"the parameters in {ref.path} are damaged: {error}.") from error
    return index, mapped[_round_up(end, _PAGE) :]


def _pickle(index: _Index, body: memoryview) -> memoryview:
    offset, size = index.pickle
    return body[offset : offset + size]


def _laid_out(chunks: list[bytes], buffers: list[memoryview]) -> Iterator[bytes | memoryview]:
    """Iterate over the blob's content in order, in pieces that are not copied."""
    size = sum(len(chunk) for chunk in chunks)
    places: list[tuple[int, int]] = []
    end = size
    for buffer in buffers:
        start = _round_up(end, _PAGE if len(buffer) >= _PAGE else _VECTOR)
        end = start + len(buffer)
        places.append((start, len(buffer)))

    index = msgspec.msgpack.encode(_Index(pickle=(0, size), buffers=tuple(places)))
    head = _MAGIC + len(index).to_bytes(8, "big") + index
    yield head.ljust(_round_up(len(head), _PAGE), b"\0")
    yield from chunks
    end = size
    for (start, length), buffer in zip(places, buffers, strict=True):
        yield bytes(start - end)
        yield buffer
        end = start + length


def _round_up(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
