"""Submits experiments to a farm: scripts, and Tuners of the running script."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from tunemq_scheduler.api.farm_answer_types import ExperimentSubmitted
from tunemq_scheduler.api.farm_client import FarmClient
from tunemq_scheduler.api.script_files import code_place, script_name
from tunemq_scheduler.storage.folders import experiment_name, safe_name
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.base.safe_text import repr_of
from tunemq_shared.code.blob_store import TIMEOUT_S, open_blobs
from tunemq_shared.code.bundles import bundle
from tunemq_shared.protocol.farm_requests import (
    MAX_PRIORITY,
    ExperimentEnvironment,
    PickledCode,
    ScriptCode,
    SubmitExperiment,
    SubmittedCode,
)
from tunemq_shared.system.standard_streams import tell

#: Folders of installed packages, which are not the user's code.
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})


class SubmitOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a submission besides the code.

    Attributes:
        name: the experiment's name; empty for a generated one.
        folder: the folder of the code to send; None for what the script seems to need.
    """

    name: str = ""
    priority: int = 0
    folder: str | None = None
    settings: ExperimentEnvironment = ExperimentEnvironment()

    def __post_init__(self) -> None:
        safe = safe_name(self.name, "experiment")
        if self.name and safe != self.name:
            raise ConfigError(f"the name {self.name!r} is invalid for an experiment; use {safe!r}.")
        if type(self.priority) is not int or abs(self.priority) > MAX_PRIORITY:
            raise ConfigError(
                f"priority={repr_of(self.priority)} is invalid: use a whole number from "
                f"{-MAX_PRIORITY} to {MAX_PRIORITY}."
            )


def submit_script(
    client: FarmClient, given: str, submit_options: SubmitOptions
) -> ExperimentSubmitted:
    """Submit a script's Tuner to a farm; the script does not run here.

    Args:
        given: ``SCRIPT`` or ``SCRIPT:NAME``.

    Raises:
        ConfigError: an argument is invalid; nothing was queued.
        StoreError: the farm's store cannot be reached from here.
        TuneError: see `FarmClient.ask`.
    """
    script = script_name(given)
    place = code_place(script.path, submit_options.folder)
    store = client.farm().store
    with open_blobs(store, _tell_troubles()) as blobs:
        sent = bundle(place.source, blobs, own=client.secrets(store), tell=_tell)
        code = ScriptCode(bundle=sent, script=place.script, tuner=script.tuner)
    return _submit(client, code, submit_options, script.path.stem)


def submit_pickled(
    client: FarmClient, pickled: bytes, submit_options: SubmitOptions, fallback: str
) -> ExperimentSubmitted:
    """Submit a Tuner of this process to a farm.

    The submission includes the modules that the Tuner imports from the running script's folder, or
    the requested folder.

    Args:
        pickled: the Tuner, by `tunemq_scheduler.api.pickled_tuner`.
        fallback: the beginning of the name if none is requested.

    Raises:
        ConfigError: an argument is invalid; nothing was queued.
        StoreError: the farm's store cannot be reached from here.
        TuneError: see `FarmClient.ask`.
    """
    folder, store = _modules_folder(submit_options.folder), client.farm().store
    with open_blobs(store, _tell_troubles()) as blobs:
        sent = None
        if folder is not None:
            sent = bundle(folder, blobs, own=client.secrets(store), tell=_warn)
        code = PickledCode(tuner=blobs.put(pickled), bundle=sent)
    return _submit(client, code, submit_options, fallback)


def _tell(text: str) -> None:
    tell(f"tunemq: {text}")


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)


def _tell_troubles() -> Callable[[str], None]:
    """Return a function that prints each store problem once; the store client retries silently."""
    told = {""}

    def on_trouble(trouble: str) -> None:
        if trouble not in told:
            told.add(trouble)
            _tell(f"{trouble} Retrying for up to {TIMEOUT_S:g} s.")

    return on_trouble


def _modules_folder(folder: str | None) -> Path | None:
    """Return the folder of the modules that a Tuner of this process may import."""
    if folder is not None:
        if not Path(folder).is_dir():
            raise ConfigError(f"fit(folder={folder!r}): the folder does not exist.")
        return Path(folder)
    main = sys.modules.get("__main__")
    running = getattr(main, "__file__", None)
    if running is None or not running.endswith(".py"):
        return None  # a notebook or an installed program
    path = Path(running).absolute()
    if not _INSTALLED.isdisjoint(path.parts):
        return None
    module = getattr(getattr(main, "__spec__", None), "name", "")
    if "." in module:  # python -m package.module: bundle the folder that contains the package
        return path.parents[module.count(".")]
    source = code_place(path).source
    return source if source.is_dir() else None


def _submit(
    client: FarmClient, code: SubmittedCode, submit_options: SubmitOptions, fallback: str
) -> ExperimentSubmitted:
    request = SubmitExperiment(
        name=submit_options.name or experiment_name(fallback, time.time()),
        is_made_up=not submit_options.name,
        code=code,
        priority=submit_options.priority,
        settings=submit_options.settings,
    )
    return client.ask(request, ExperimentSubmitted)
