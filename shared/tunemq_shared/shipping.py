"""Puts a trainable into blobs on the script's side, and takes it out again in a trial's host.

Its code is one small blob. What `with_parameters` bound to it is another, which the first refers to
by hash and path, so that the code stays small and the parameters are mapped, not read.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import msgspec

from tunemq_shared.attached import Parameters, attach, attached_to
from tunemq_shared.blobs import BlobFolder, read_blob
from tunemq_shared.code import load_trainable, modules_of, pickle_trainable
from tunemq_shared.errors import StoreError, TrainableError
from tunemq_shared.messages import BlobRef
from tunemq_shared.parameter_blob import map_parameters, modules_of_parameters, write_parameters

_VERSION: Final = 1


class _Shipment(msgspec.Struct, frozen=True, array_like=True):
    """The content of a code blob."""

    version: int
    python: str
    cloudpickle: str
    code: bytes
    parameters: BlobRef | None


_decode = msgspec.msgpack.Decoder(_Shipment).decode


def pickle_code(trainable: Any) -> bytes:
    """The trainable's own code, without what `with_parameters` bound to it.

    Raises:
        TrainableError: it cannot be pickled; the message names what.
    """
    return pickle_trainable(attached_to(trainable).original)


def ship(trainable: Any, blobs: BlobFolder, *, code: bytes | None = None) -> BlobRef:
    """Write the trainable to the folder; what workers need to `load` it is in the reference.

    The objects of `with_parameters` are written with the first call for a wrapper; later calls link
    to what was written then.

    Args:
        trainable: what `with_parameters` bound to it is written too.
        blobs: the folder.
        code: its `pickle_code`, where that was made before.

    Raises:
        TrainableError: it, or an object bound to it, cannot be pickled; the message names what.
        StoreError: the folder cannot be written.
    """
    shipment = _Shipment(
        version=_VERSION,
        python=_python(),
        cloudpickle=_cloudpickle(),
        code=pickle_code(trainable) if code is None else code,
        parameters=_shipped(attached_to(trainable).parameters, blobs),
    )
    return blobs.put(msgspec.msgpack.encode(shipment))


def load(ref: BlobRef) -> Any:
    """The trainable of a code blob, with its parameters bound; runs code of the experiment.

    Raises:
        TrainableError: it was made by another version, or needs what is not installed here.
        StoreError: a blob is missing or damaged.
    """
    shipment = _opened(ref)
    for what, theirs, ours in (
        ("Python", shipment.python, _python()),
        ("cloudpickle", shipment.cloudpickle, _cloudpickle()),
    ):
        if theirs != ours:
            raise TrainableError(
                f"the trainable was pickled with {what} {theirs} and this worker has {ours}; "
                "install the same on both sides."
            )
    trainable = load_trainable(shipment.code)
    if shipment.parameters is None:
        return trainable
    return attach(trainable, parameters=Parameters(map_parameters(shipment.parameters)))


def preload_of(ref: BlobRef) -> tuple[str, ...]:
    """The installed modules that loading a code blob imports, found without loading it."""
    shipment = _opened(ref)
    modules = set(modules_of(shipment.code))
    if shipment.parameters is not None:
        modules.update(modules_of_parameters(shipment.parameters))
    return tuple(sorted(modules))


def _opened(ref: BlobRef) -> _Shipment:
    try:
        shipment = _decode(read_blob(ref))
    except msgspec.DecodeError as error:
        raise StoreError(f"the blob {ref.path} does not hold a trainable: {error}.") from error
    if shipment.version != _VERSION:
        raise TrainableError(
            f"the blob {ref.path} is of version {shipment.version}, this TuneMQ reads {_VERSION}."
        )
    return shipment


def _shipped(parameters: Parameters | None, blobs: BlobFolder) -> BlobRef | None:
    if parameters is None or not parameters.objects:
        return None
    try:
        parameters.blob = blobs.adopt(parameters.blob) if parameters.blob is not None else None
    except StoreError:
        parameters.blob = None  # an earlier experiment's folder is gone: written anew below
    if parameters.blob is None:
        parameters.blob = write_parameters(parameters.objects, blobs)
    return parameters.blob


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _cloudpickle() -> str:
    import cloudpickle

    return str(cloudpickle.__version__)
