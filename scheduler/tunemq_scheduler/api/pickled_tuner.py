"""Pickles a whole `Tuner`, for the process that runs it on a farm.

Loading one executes code from it: only the experiment's own process does that.
"""

from __future__ import annotations

import sys
from typing import Any, Final, NamedTuple

import msgspec

from tunemq_scheduler.settings.config import RunConfig, TuneConfig
from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.base.errors import ConfigError, TrainableError, TunerVersionMismatch
from tunemq_shared.base.pickling import Unpicklable, dump
from tunemq_shared.base.unpickling import load_pickled
from tunemq_shared.code.code_by_value import load_trainable, pickle_trainable
from tunemq_shared.trainable.attached import BoundParameters, attach, attached_to

_VERSION: Final = 1


class _Pickled(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a tuner, each pickled separately, so that an error names the part."""

    version: int = _VERSION
    python: str
    cloudpickle: str
    trainable: bytes
    parameters: bytes | None
    resources: bytes | None
    param_space: bytes
    tune: bytes
    run: bytes


class LoadedTuner(NamedTuple):
    """The parts of a `Tuner`."""

    trainable: Any
    param_space: dict[str, Any] | None
    tune: TuneConfig
    run: RunConfig


def pickle_tuner_parts(
    trainable: Any, param_space: dict[str, Any] | None, tune: TuneConfig, run: RunConfig
) -> bytes:
    """Pickle the parts of a Tuner.

    Raises:
        TrainableError: the trainable, or an object bound to it, cannot be pickled; the message
            names it.
        ConfigError: another part cannot be pickled; the message names it.
    """
    attached = attached_to(trainable)
    bound, asks = attached.parameters, attached.resources
    return msgspec.msgpack.encode(
        _Pickled(
            **_versions(),
            trainable=pickle_trainable(attached.original),
            parameters=None if bound is None else _dumped("with_parameters", bound.objects),
            resources=None if asks is None else _dumped("with_resources", asks),
            param_space=_dumped("param_space", param_space),
            tune=_dumped("tune_config", tune),
            run=_dumped("run_config", run),
        )
    )


def load_tuner_parts(data: bytes) -> LoadedTuner:
    """Unpickle the parts of a Tuner; executes code of the experiment.

    Raises:
        TunerOfOtherVersion: another version of Python or cloudpickle pickled it.
        ConfigError: the data is damaged.
        TrainableError: an object that it refers to cannot be imported here.
    """
    try:
        found = msgspec.msgpack.decode(data, type=_Pickled)
    except UNDECODABLE as error:
        raise ConfigError(f"the pickled Tuner cannot be read: {error}.") from error
    for what, ours in {"version": _VERSION, **_versions()}.items():
        if (theirs := getattr(found, what)) != ours:
            raise TunerVersionMismatch(
                f"the Tuner was pickled with {what} {theirs}, and this farm's scheduler has {what}"
                f" {ours}; use the same on both sides, or submit the script: tunemq submit SCRIPT."
            )
    trainable = load_trainable(found.trainable)
    if found.parameters is not None:
        objects = load_pickled(found.parameters, "the objects of with_parameters")
        trainable = attach(trainable, parameters=BoundParameters(objects))
    if found.resources is not None:
        resources = load_pickled(found.resources, "the resources of with_resources")
        trainable = attach(trainable, resources=resources)
    return LoadedTuner(
        trainable,
        load_pickled(found.param_space, "the param_space"),
        load_pickled(found.tune, "the tune_config"),
        load_pickled(found.run, "the run_config"),
    )


def _dumped(name: str, value: Any) -> bytes:
    try:
        return dump(value)
    except Unpicklable as error:
        why = error.explain(f"the {name}", name)
        kind = TrainableError if name.startswith("with_") else ConfigError
        raise kind(f"this Tuner cannot be sent to the farm: {why}.") from error


def _versions() -> dict[str, Any]:
    import cloudpickle

    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "cloudpickle": str(cloudpickle.__version__),
    }
