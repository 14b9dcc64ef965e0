"""An order to start a host in terms of the node that obeys it: its paths, its interpreter."""

from __future__ import annotations

import os
import sys
from typing import Final

import msgspec

from tunemq_shared.messages import BlobRef, Environment, HostStart

#: The folders in a node's.
BLOBS: Final = "blobs"
CODE: Final = "code"
TRIALS: Final = "trials"

#: What a node needs for itself and trials must not have: the farm's keys.
_OURS: Final = "TUNEMQ_"
_KEYS: Final = frozenset({"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"})


def localised(start: HostStart, folder: str) -> HostStart:
    """The order as the host gets it; ``folder`` is the node's, where all that it needs is."""
    bundle = "" if start.bundle is None else os.path.join(folder, CODE, start.bundle.sha256)
    trials = os.path.join(folder, TRIALS)
    return msgspec.structs.replace(
        start,
        # An absolute one stays what it is.
        folder=os.path.join(trials, start.folder),
        code=_here(start.code, folder),
        blobs=tuple(_here(ref, folder) for ref in start.blobs),
        environment=_environment(start.environment, bundle),
    )


def _here(ref: BlobRef, folder: str) -> BlobRef:
    if not ref.store:
        return ref
    return BlobRef(ref.sha256, ref.size, os.path.join(folder, BLOBS, ref.sha256))


def _environment(given: Environment, bundle: str) -> Environment:
    variables = given.variables
    if given.inherits:
        variables = own_variables() | variables
    return Environment(
        python=given.python or sys.executable,
        preload=given.preload,
        variables=variables,
        sys_path=tuple(os.path.join(bundle, entry).rstrip("/") for entry in given.sys_path)
        if bundle
        else given.sys_path,
    )


def own_variables() -> dict[str, str]:
    """The variables of this process that trials may have."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OURS) and name not in _KEYS
    }
