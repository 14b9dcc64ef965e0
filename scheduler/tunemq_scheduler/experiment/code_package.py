"""Packages the code of an experiment for the nodes that run its trials.

Nodes on this machine read the code where it was written. On a farm with a store, nodes fetch it
from there and share no files with the scheduler: they use their own interpreter and environment
variables. A bundle contains what the script imports from its folder; a notebook has none.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from pathlib import PurePosixPath
from typing import Final

import msgspec

from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.experiment.start_checks import PreparedSearch
from tunemq_scheduler.journal.journal_files import write_durably
from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.base.errors import StoreError
from tunemq_shared.code.blob_folder import BlobFolder, is_blob_name
from tunemq_shared.code.code_by_value import modules_of
from tunemq_shared.objects.store_address import is_remote
from tunemq_shared.protocol.messages import BlobRef, Environment
from tunemq_shared.trainable.trainable_blobs import (
    blobs_of,
    is_loadable_here,
    preload_of,
    ship,
)

#: The prefix of TuneMQ's own environment variables, which trials do not inherit.
_OURS: Final = "TUNEMQ_"
#: The file beside the blobs that refers to the trainable of the first run.
_FIRST: Final = "first-run"


class CodePackage(msgspec.Struct, frozen=True, kw_only=True):
    """How code gets to the nodes.

    Attributes:
        blobs: the folder on this machine where it is written.
        store: the address of the farm's store, which also receives it; empty if nodes read
            ``blobs``.
        bundle: what the script imports from its folder; None if it has no folder, or nodes read
            that directly.
        script: the script's name in the bundle.
        keeps_first: all runs use the trainable of the first one, which stays in ``blobs``: a
            submitted script runs again in each process of its search, and may make other data.
    """

    blobs: BlobFolder
    store: str = ""
    bundle: BlobRef | None = None
    script: str = ""
    keeps_first: bool = False

    @property
    def is_apart(self) -> bool:
        """Whether nodes need no files of this machine."""
        return is_remote(self.store)


def package_code(
    outline: ExperimentPlan, prepared: PreparedSearch, code_package: CodePackage
) -> ExperimentPlan:
    """Write the code where nodes find it; return the plan with all references to it.

    Raises:
        StoreError: it cannot be written.
    """
    code = _shipped(prepared, code_package)
    environment = environment_of(prepared, code, code_package)
    blobs = blobs_of(code)
    if code_package.store:
        from tunemq_shared.code.blob_store import open_blobs  # its libraries import slowly

        with open_blobs(code_package.store) as store:
            blobs = tuple(store.put_blob(ref) for ref in blobs)
            code = store.put_blob(code)
    return msgspec.structs.replace(
        outline,
        code=code,
        blobs=blobs,
        bundle=code_package.bundle,
        environment=environment,
        is_apart=code_package.is_apart,
        is_shared=code_package.keeps_first and not code_package.is_apart,
    )


def _shipped(prepared: PreparedSearch, code_package: CodePackage) -> BlobRef:
    blobs = code_package.blobs
    if code_package.keeps_first and (first := _of_first_run(blobs)) is not None:
        return first
    code = ship(prepared.trainable, blobs, pickled=prepared.pickled)
    if code_package.keeps_first:
        noted = blobs.root / _FIRST
        try:
            write_durably(noted, msgspec.json.encode(code))
        except OSError as error:
            raise StoreError(f"{noted} cannot be written: {error.strerror}.") from error
    return code


def _of_first_run(blobs: BlobFolder) -> BlobRef | None:
    """Return the trainable of the first run; None if it is not there, or cannot be loaded here."""
    try:
        first = msgspec.json.decode((blobs.root / _FIRST).read_bytes(), type=BlobRef)
        code = msgspec.structs.replace(first, path=str(blobs.root / first.sha256))
        return code if is_blob_name(code.sha256) and is_loadable_here(code) else None
    except (OSError, StoreError, *UNDECODABLE):
        return None


def environment_of(
    prepared: PreparedSearch, code: BlobRef | None = None, code_package: CodePackage | None = None
) -> Environment:
    """Return the environment of the forkserver that forks trial processes.

    Args:
        prepared: the search.
        code: the trainable's blob; without it the modules of bound objects are unknown.
        code_package: how the code gets to the nodes; by default they are on this machine.
    """
    run = prepared.run
    given = dict(run.env_vars or {})
    if run.preload is not None:
        preload = tuple(run.preload)
    else:
        preload = modules_of(prepared.pickled.code) if code is None else preload_of(code)
    if code_package is not None and (code_package.bundle is not None or code_package.is_apart):
        path = () if code_package.bundle is None else search_path(code_package.script)
        return Environment(run.python or "", preload, given, path, inherits=True)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    path = tuple(os.path.abspath(entry) if entry == "" else entry for entry in sys.path)
    if run.python is not None:
        path = tuple(entry for entry in path if not _is_interpreters(entry))
    return Environment(run.python or sys.executable, preload, variables | given, path)


def search_path(script: str) -> tuple[str, ...]:
    """Return the first entries of Python's search path for a script in a bundle.

    In the form of `Environment`: the script's own folder, as for ``python script``, then the
    bundle's root, as for ``python -m``.
    """
    folder = str(PurePosixPath(script).parent)
    return ("",) if folder == "." else (folder, "")


def _is_interpreters(entry: str) -> bool:
    """Whether a path entry belongs to this interpreter: another one has its own packages."""
    places = {*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()}
    return (
        entry in places
        or entry.startswith(f"{sysconfig.get_path('stdlib')}/")
        or (entry.startswith(sys.base_prefix) and entry.endswith(".zip"))
    )
