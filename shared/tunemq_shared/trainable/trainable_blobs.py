"""Pack a trainable into blobs in the script, and unpack it in a trial process.

Its code is one small blob. The objects bound by `with_parameters` are another, which the first
refers to by hash, so that the code stays small and the parameters are mapped, not read. Both lie in
the same folder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.base.errors import StoreError, TrainableError
from tunemq_shared.code.blob_folder import BlobFolder, check_blob, is_blob_name, read_blob
from tunemq_shared.code.code_by_value import load_trainable, modules_of, pickle_trainable
from tunemq_shared.code.parameter_blob import (
    DumpedParameters,
    dump_parameters,
    map_parameters,
    modules_of_parameters,
    write_parameters,
)
from tunemq_shared.protocol.messages import BlobRef
from tunemq_shared.trainable.attached import BoundParameters, attach, attached_to

_VERSION: Final = 1


class _CodeBlob(msgspec.Struct, frozen=True, array_like=True):
    """The content of a code blob; the parameters' blob lies beside it."""

    version: int
    python: str
    cloudpickle: str
    code: bytes
    parameters: BlobRef | None


_decode = msgspec.msgpack.Decoder(_CodeBlob).decode


class PickledTrainable(NamedTuple):
    """A trainable's own code, and the objects that `with_parameters` bound to it."""

    code: bytes
    parameters: DumpedParameters | None


def pickle_parts(trainable: Any) -> PickledTrainable:
    """Pickle the trainable and its parameters; writes nothing.

    Raises:
        TrainableError: The trainable, or an object bound to it, cannot be pickled; names the part.
    """
    attached = attached_to(trainable)
    bound = attached.parameters.objects if attached.parameters is not None else {}
    dumped = dump_parameters(bound) if bound else None
    return PickledTrainable(pickle_trainable(attached.original), dumped)


def ship(trainable: Any, blobs: BlobFolder, *, pickled: PickledTrainable | None = None) -> BlobRef:
    """Write the trainable to the folder; the returned reference is enough to `load` it.

    The first call for a wrapper writes the objects of `with_parameters`; later calls link to them.

    Args:
        trainable: With the objects that `with_parameters` bound to it.
        blobs: The folder.
        pickled: Its `pickle_parts`, if the caller has them already.

    Raises:
        TrainableError: The trainable, or an object bound to it, cannot be pickled; names the part.
        StoreError: The folder cannot be written.
    """
    pickled = pickled or pickle_parts(trainable)
    bound = attached_to(trainable).parameters
    parameters = _shipped(bound, pickled.parameters, blobs) if bound is not None else None
    shipment = _CodeBlob(
        version=_VERSION,
        python=_python(),
        cloudpickle=_cloudpickle(),
        code=pickled.code,
        # Without its path: the same code gives the same blob wherever it is written.
        parameters=parameters and msgspec.structs.replace(parameters, path=""),
    )
    return blobs.put(msgspec.msgpack.encode(shipment))


def blobs_of(ref: BlobRef) -> tuple[BlobRef, ...]:
    """The other blobs that a code blob needs.

    Raises:
        StoreError: The code blob is missing or damaged.
    """
    parameters = _opened(ref).parameters
    return () if parameters is None else (parameters,)


def is_loadable_here(ref: BlobRef) -> bool:
    """Whether this version of TuneMQ, Python and cloudpickle can load a code blob, which is whole.

    Raises:
        StoreError: A blob is missing or damaged.
    """
    try:
        shipment = _opened(ref)
    except TrainableError:
        return False
    if shipment.parameters is not None:
        check_blob(shipment.parameters)
    return (shipment.python, shipment.cloudpickle) == (_python(), _cloudpickle())


def load(ref: BlobRef) -> Any:
    """Load the trainable of a code blob and bind its parameters; runs code of the experiment.

    Raises:
        TrainableError: Another version made it, or it needs a package that is not installed here.
        StoreError: A blob is missing or damaged.
    """
    shipment = _opened(ref)
    for what, theirs, ours in (
        ("Python", shipment.python, _python()),
        ("cloudpickle", shipment.cloudpickle, _cloudpickle()),
    ):
        if theirs != ours:
            raise TrainableError(
                f"the trainable was pickled with {what} {theirs} and {sys.executable} on this "
                f"worker has {ours}; install the same on both sides, or name another interpreter "
                "with RunConfig(python=...)."
            )
    trainable = load_trainable(shipment.code)
    if shipment.parameters is None:
        return trainable
    return attach(trainable, parameters=BoundParameters(map_parameters(shipment.parameters)))


def preload_of(ref: BlobRef) -> tuple[str, ...]:
    """List the installed modules that loading a code blob imports, without loading it."""
    shipment = _opened(ref)
    modules = set(modules_of(shipment.code))
    if shipment.parameters is not None:
        modules.update(modules_of_parameters(shipment.parameters))
    return tuple(sorted(modules))


def _opened(ref: BlobRef) -> _CodeBlob:
    try:
        shipment = _decode(read_blob(ref))
    except UNDECODABLE as error:
        raise StoreError(f"the blob {ref.path} does not hold a trainable: {error}.") from error
    if shipment.version != _VERSION:
        raise TrainableError(
            f"the blob {ref.path} is of version {shipment.version}, this TuneMQ reads {_VERSION}."
        )
    parameters = shipment.parameters
    if parameters is not None:
        if not is_blob_name(parameters.sha256):
            raise StoreError(f"the blob {ref.path} names parameters that are no blob.")
        beside = str(Path(ref.path).with_name(parameters.sha256))
        parameters = msgspec.structs.replace(parameters, path=beside)
    return msgspec.structs.replace(shipment, parameters=parameters)


def _shipped(
    bound: BoundParameters, dumped: DumpedParameters | None, blobs: BlobFolder
) -> BlobRef | None:
    if dumped is None:
        return None
    try:
        bound.blob = blobs.adopt(bound.blob) if bound.blob is not None else None
    except StoreError:
        bound.blob = None  # an earlier experiment's folder is gone: written again below
    if bound.blob is None:
        bound.blob = write_parameters(dumped, blobs)
    return bound.blob


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _cloudpickle() -> str:
    import cloudpickle

    return str(cloudpickle.__version__)
