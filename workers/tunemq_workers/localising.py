"""An order to start a host in terms of the node that obeys it: its paths, its interpreter."""

from __future__ import annotations

import os
import sys
from typing import Final

import msgspec

from tunemq_shared.messages import BlobRef, Environment, HostStart
from tunemq_workers.account import Account
from tunemq_workers.credentials import is_for_trials

#: The folders in a node's.
BLOBS: Final = "blobs"
CODE: Final = "code"
TRIALS: Final = "trials"


def localised(start: HostStart, folder: str, account: Account | None = None) -> HostStart:
    """The order as the host gets it.

    Args:
        start: the order as the scheduler has sent it.
        folder: the node's, where all that the host needs is.
        account: whom trials run as; by default the node's own user.
    """
    bundle = "" if start.bundle is None else os.path.join(folder, CODE, start.bundle.sha256)
    trials = os.path.join(folder, TRIALS)
    return msgspec.structs.replace(
        start,
        # An absolute one stays what it is.
        folder=os.path.join(trials, start.folder),
        code=_here(start.code, folder),
        blobs=tuple(_here(ref, folder) for ref in start.blobs),
        environment=_environment(start.environment, bundle, account),
    )


def _here(ref: BlobRef, folder: str) -> BlobRef:
    if not ref.store:
        return ref
    return BlobRef(ref.sha256, ref.size, os.path.join(folder, BLOBS, ref.sha256))


def _environment(given: Environment, bundle: str, account: Account | None) -> Environment:
    variables = given.variables
    if given.inherits:
        variables = _own_variables(account) | variables
    return Environment(
        python=given.python or sys.executable,
        preload=given.preload,
        variables=variables,
        sys_path=tuple(os.path.join(bundle, entry).rstrip("/") for entry in given.sys_path)
        if bundle
        else given.sys_path,
    )


def _own_variables(account: Account | None) -> dict[str, str]:
    """The variables of this process that trials may have."""
    own = {name: value for name, value in os.environ.items() if is_for_trials(name)}
    return own if account is None else account.variables(own)
