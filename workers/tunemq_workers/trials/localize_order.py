"""Adapts a start order to this node: its paths, its interpreter and its variables."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Final

import msgspec

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.messages import BlobRef, Environment, TrialSpec
from tunemq_workers.system.credentials import is_for_trials
from tunemq_workers.system.trial_user import UserAccount

#: Folders in the node's working folder.
BLOBS: Final = "blobs"
CODE: Final = "code"
TRIALS: Final = "trials"
#: Variables that trials get in any case with `--trial-env`: programs and Python need them.
_ALWAYS: Final = (
    "CUDA_VISIBLE_DEVICES",  # the worker's GPUs, where TuneMQ sets none
    "HOME",
    "LANG",
    "LANGUAGE",
    "LC_*",
    "LD_LIBRARY_PATH",
    "LOGNAME",
    "PATH",
    "PYTHONHOME",
    "PYTHONPATH",
    "SHELL",
    "TERM",
    "TMPDIR",
    "TZ",
    "USER",
)
_PATTERN: Final = re.compile(r"[A-Za-z0-9_*]+")


def place_of_shared_names(folder: str) -> str:
    """Return the place of disk jobs that look up or rename what trials share, in a working folder.

    They run one after another. So what a trial's start has found is not moved by an earlier job.
    """
    return os.path.join(folder, BLOBS)


def parse_allowed(text: str) -> tuple[str, ...]:
    """Return the patterns of ``--trial-env``, such as ``WANDB_*,HTTPS_PROXY``; "" has none.

    Raises:
        ConfigError: a pattern is not a valid variable name.
    """
    patterns = tuple(filter(None, map(str.strip, text.split(","))))
    for pattern in patterns:
        if not _PATTERN.fullmatch(pattern):
            raise ConfigError(
                f"--trial-env names {pattern!r}, which is not the name of a variable; pass "
                "names with commas between them, where * stands for any text, such as "
                "WANDB_*,HTTPS_PROXY."
            )
    return patterns


def unmatched(patterns: Iterable[str]) -> list[str]:
    """Return the patterns that match no variable of this process that trials may have."""
    names = list(filter(is_for_trials, os.environ))
    return [one for one in patterns if not any(fnmatchcase(name, one) for name in names)]


def trial_variables(
    account: UserAccount | None = None, allowed: Iterable[str] | None = None
) -> dict[str, str]:
    """Return the environment variables of this process that its trials get.

    Args:
        account: the user that trials run as; by default the node's own user.
        allowed: patterns of names; only variables that match, and a few that programs need, are
            passed on. None: all but the keys of the farm.
    """
    own = {name: value for name, value in os.environ.items() if is_for_trials(name)}
    if allowed is not None:
        patterns = (*_ALWAYS, *allowed)
        own = {n: v for n, v in own.items() if any(fnmatchcase(n, one) for one in patterns)}
    return own if account is None else account.variables(own)


def localised(start: TrialSpec, folder: str, inherited: Mapping[str, str]) -> TrialSpec:
    """Return the order as the trial process gets it.

    Args:
        start: the order as the scheduler sent it.
        folder: the node's working folder, with all blobs that the trial needs.
        inherited: the node's environment variables that trials get.
    """
    bundle = "" if start.bundle is None else os.path.join(folder, CODE, start.bundle.sha256)
    trials, given = os.path.join(folder, TRIALS), start.environment
    sys_path = given.sys_path
    if bundle:
        sys_path = tuple(os.path.join(bundle, entry).rstrip("/") for entry in sys_path)
    return msgspec.structs.replace(
        start,
        # An absolute path stays unchanged.
        folder=os.path.join(trials, start.folder),
        code=_here(start.code, folder),
        blobs=tuple(_here(ref, folder) for ref in start.blobs),
        environment=Environment(
            given.python or sys.executable,
            given.preload,
            _variables(given, inherited),
            sys_path,
            given.inherits,
        ),
    )


def _variables(given: Environment, inherited: Mapping[str, str]) -> dict[str, str]:
    if not given.inherits:
        return given.variables
    variables = {**inherited, **given.variables}
    if given.python and "PATH" not in given.variables:
        # As in an activated environment: programs that run `python` get this one.
        folders = os.path.dirname(given.python), variables.get("PATH", os.defpath)
        variables["PATH"] = os.pathsep.join(folders)
    return variables


def _here(ref: BlobRef, folder: str) -> BlobRef:
    if not ref.store:
        return ref
    return BlobRef(ref.sha256, ref.size, os.path.join(folder, BLOBS, ref.sha256))
