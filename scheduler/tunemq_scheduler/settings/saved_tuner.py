"""Saves a `Tuner` in its experiment's folder, and loads it for `Tuner.restore`.

The file is msgpack, and the SHA-256 of that: one changed bit could make it another search. It
contains the search space and the two configs, each pickled separately, so that the user can supply
one that cannot be pickled. Loading them executes code: restore only experiments of people whom you
trust.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from tunemq_scheduler.settings.config import RunConfig, TuneConfig
from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.base.errors import ConfigError, StoreError, TunerVersionMismatch
from tunemq_shared.base.failpoints import failpoint
from tunemq_shared.base.pickling import Unpicklable, dump
from tunemq_shared.base.unpickling import unpickle
from tunemq_shared.protocol.result_conditions import Condition

TUNER_FILE: Final = "tuner.pkl"
_VERSION: Final = 1
_SUM_BYTES: Final = hashlib.sha256().digest_size


class _PickledField(msgspec.Struct, array_like=True):
    """One pickled field, or the reason why it cannot be pickled."""

    pickled: bytes
    problem: str = ""


class SavedTuner(msgspec.Struct, kw_only=True):
    """A `Tuner` without its trainable, as it was when `fit` began.

    Attributes:
        trainable: the trainable's name.
        seed: the search's seed, generated if the user set none.
        run: the experiment's run that it was saved for, from 1; it may not have begun.
        stop: the stop criteria of that run, which ``run_config`` may have in a form that cannot be
            loaded.
        stopped_by: those of the run before that one.
    """

    version: int = _VERSION
    python: str
    cloudpickle: str
    tunemq: str
    trainable: str
    seed: int
    param_space: _PickledField
    tune_config: _PickledField
    run_config: _PickledField
    run: int = 1
    stop: tuple[Condition, ...] = ()
    stopped_by: tuple[Condition, ...] = ()

    def get(self, name: str) -> Any:
        """Unpickle the argument of `Tuner` with this name.

        Raises:
            ConfigError: it could not be saved, or cannot be loaded; the message says what to do.
        """
        part: _PickledField = getattr(self, name)
        if part.problem:
            raise ConfigError(
                f"the {name} of this experiment could not be pickled ({part.problem}), so it "
                f"was not saved; pass it again: Tuner.restore(..., {name}=...)."
            )
        try:
            return unpickle(part.pickled)
        except Exception as error:
            # The user's classes may raise anything; the message says what helps.
            raise ConfigError(
                f"the {name} of this experiment cannot be loaded ({type(error).__name__}: "
                f"{error}); check that its modules can be imported, or pass it again: "
                f"Tuner.restore(..., {name}=...)."
            ) from error


def pickle_tuner(
    param_space: dict[str, Any] | None, tune: TuneConfig, run: RunConfig
) -> dict[str, _PickledField]:
    """Pickle the parts of a `SavedTuner` before a search changes objects in them."""
    return {
        "param_space": _pickled(param_space),
        "tune_config": _pickled(tune),
        "run_config": _pickled(run),
    }


def save_tuner(
    folder: str,
    parts: dict[str, _PickledField],
    *,
    name: str,
    seed: int,
    run: int = 1,
    stop: tuple[Condition, ...] = (),
    stopped_by: tuple[Condition, ...] = (),
) -> None:
    """Save a tuner in the experiment's folder, durably and atomically.

    Args:
        folder: the experiment's folder.
        parts: the pickled parts.
        name: the trainable's name.
        seed: the search's seed.
        run, stop, stopped_by: as in `SavedTuner`.

    Raises:
        StoreError: the file cannot be written.
    """
    fields: dict[str, Any] = {**_versions(), **parts}
    saved = SavedTuner(
        **fields, trainable=name, seed=seed, run=run, stop=stop, stopped_by=stopped_by
    )
    path = os.path.join(folder, TUNER_FILE)
    try:
        descriptor = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(with_sum(msgspec.msgpack.encode(saved)))
            file.flush()
            os.fsync(descriptor)
        failpoint("tuner.before_rename")
        os.replace(f"{path}.new", path)
        failpoint("tuner.after_rename")
    except OSError as error:
        with contextlib.suppress(OSError):  # do not leave it on a full disk
            os.unlink(f"{path}.new")
        raise StoreError(f"{path} cannot be written: {error.strerror}.") from error


def read_tuner(folder: str) -> SavedTuner:
    """Read the tuner saved in an experiment's folder; executes no code of the experiment yet.

    Raises:
        ConfigError: there is none, or it is damaged.
        TunerOfOtherVersion: another version of Python, cloudpickle or TuneMQ wrote it.
    """
    path = os.path.join(folder, TUNER_FILE)
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} is not an experiment that can be restored: it has no {TUNER_FILE}. Pass "
            "the folder of a search, or its address in a store."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        if with_sum(data[:-_SUM_BYTES]) != data:
            raise msgspec.DecodeError("its checksum does not fit")
        found = msgspec.msgpack.decode(data[:-_SUM_BYTES])
        theirs = {name: found[name] for name in ("version", *_versions())}
        for what, ours in {"version": _VERSION, **_versions()}.items():
            if _readable_by(what, theirs[what]) != _readable_by(what, ours):
                raise TunerVersionMismatch(
                    f"{path} was written with {_named(what, theirs[what])}, which "
                    f"{_named(what, ours)} does not read. {_remedy(what, theirs)}"
                )
        return msgspec.convert(found, SavedTuner)
    except (*UNDECODABLE, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is damaged: {error}. Put back this file from a backup; or continue the search "
            "from its bucket: Tuner.restore(ADDRESS), or tunemq scheduler --take-over ADDRESS."
        ) from error


def with_sum(saved: bytes) -> bytes:
    """Return the content of the file for an encoded `SavedTuner`."""
    return saved + hashlib.sha256(saved).digest()


def _pickled(value: Any) -> _PickledField:
    try:
        return _PickledField(dump(value))
    except Unpicklable as error:  # kept, and told by `get`
        return _PickledField(b"", f"{type(error.cause).__name__}: {error.cause}")


def _versions() -> dict[str, Any]:
    import cloudpickle

    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "cloudpickle": str(cloudpickle.__version__),
        "tunemq": importlib.metadata.version("tunemq"),
    }


def _readable_by(what: str, version: object) -> object:
    """Return the part of a version that two versions share if each can read the other's files.

    cloudpickle does not promise to read files of its other versions.
    """
    series = re.match(r"\d+\.\d+", str(version)) if what == "tunemq" else None
    return version if series is None else series[0]


def _named(what: str, version: object) -> str:
    names = {"python": "Python", "tunemq": "TuneMQ", "version": "the format of version"}
    return f"{names.get(what, what)} {version}"


def _remedy(what: str, theirs: Mapping[str, object]) -> str:
    if what in {"python", "cloudpickle"}:
        return f"Install {_named(what, theirs[what])} with TuneMQ to continue this search."
    return (
        f"Install TuneMQ {theirs['tunemq']} again to continue this search; upgrade to another "
        "minor version when no search runs or is paused."
    )
