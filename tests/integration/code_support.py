"""Code that travels as on a farm: through a store, to nodes that share nothing else."""

from __future__ import annotations

import shutil
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

from tests.integration.farm_support import Scheduler
from tunemq_scheduler.experiment.code_package import search_path
from tunemq_shared.code.blob_folder import BlobFolder
from tunemq_shared.code.blob_store import open_blobs
from tunemq_shared.code.bundles import bundle
from tunemq_shared.protocol.messages import BlobRef, Environment, TrialSpec
from tunemq_shared.trainable.trainable_blobs import blobs_of, ship

#: The node's interpreter and variables, and nothing else.
BARE = Environment("", (), {}, (), inherits=True)


def write_files(folder: Path, files: dict[str, str]) -> Path:
    """Write these files into a folder; return the folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def put_bundle(store: str, folder: Path, files: dict[str, str]) -> BlobRef:
    """Put a bundle of these files into the store, and nowhere else."""
    with open_blobs(store) as blobs:
        ref = bundle(write_files(folder, files), blobs)
    shutil.rmtree(folder)
    return ref


def put_code(store: str, folder: Path, trainable: Any) -> dict[str, Any]:
    """Put a trainable into the store, and nowhere else; return fields of a `TrialSpec`."""
    code = ship(trainable, BlobFolder(folder))
    needed = blobs_of(code)
    with open_blobs(store) as blobs:
        fields = {
            "code": blobs.put_blob(code),
            "blobs": tuple(blobs.put_blob(ref) for ref in needed),
        }
    shutil.rmtree(folder)
    return fields


def start_apart(
    scheduler: Scheduler,
    store: str,
    written: Path,
    trainable: Any,
    *,
    number: int = 0,
    bundle: BlobRef | None = None,
    environment: Environment = BARE,
    config: dict[str, Any] | None = None,
    **how: Any,
) -> TrialSpec:
    """Return the spec of a trial on a node that reads only from the store."""
    path = search_path("train.py") if bundle is not None else ()
    given = Environment(
        environment.python, environment.preload, environment.variables, path, inherits=True
    )
    values = {
        "trial_number": number,
        "folder": f"exp/trial_{number}",
        "bundle": bundle,
        "environment": given,
        "store": store,
        **put_code(store, written, trainable),
    }
    return scheduler.start(trainable, config, **{**values, **how})


def make_environment(folder: Path, files: dict[str, str], *, has_ours: bool = True) -> str:
    """Create a virtual environment with these files in its packages; return its interpreter.

    Args:
        has_ours: it has all packages of this environment, too.
    """
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    write_files(packages, files)
    if has_ours:
        (packages / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(folder / "bin" / "python")
