"""Reads which configurations led to the final state of a trial of a population, and from when on.

They are those of the trial, and before that of the trials whose states it took over. They stand in
the journal of the search, and in policy files of Ray Tune.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.core.trials.trial import continued_from
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.journal.journal_reader import recover
from tunemq_scheduler.journal.journal_replay import replay_recovered
from tunemq_scheduler.storage.folders import results_folder
from tunemq_shared.base.decoding_errors import NO_JSON
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.code.config_packing import unpack_config
from tunemq_shared.objects.store_address import is_remote


class PolicyStep(NamedTuple):
    """A configuration, and the step behind which it holds."""

    step: int
    config: dict[str, Any]


def read_policy(who: str, policy_file: Any, trial_id: str | None) -> list[PolicyStep]:
    """Return the configurations that led to a trial's final state, in their order.

    Args:
        who: the scheduler, for messages.
        policy_file: a policy file of Ray Tune; or a search's folder, or the name of that in the
            results folder.
        trial_id: the trial of that search.

    Raises:
        ConfigError: there is no such file, search or trial, or it cannot be read.
        JournalError: the search's journal cannot be read.
    """
    given = str(policy_file)
    if is_remote(given):
        raise ConfigError(
            f"{who}(policy_file={given!r}) is an address; fetch the search with Tuner.restore, and "
            "give the folder that this makes."
        )
    path = Path(given).expanduser()
    if path.is_file():
        return _read_file(path)
    for folder in (path, Path(results_folder(None), given)):
        if (folder / FILE_NAME).is_dir():
            runner = replay_recovered(recover(folder / FILE_NAME))
            trials = sorted({*runner.live, *runner.finished})
            if trial_id not in trials:
                raise ConfigError(
                    f"{who}(trial_id={trial_id!r}): name a trial of the search in {folder}, which "
                    f"has {', '.join(trials) or 'none'}."
                )
            return policy_of(runner, trial_id)
    raise ConfigError(
        f"{who}(policy_file={given!r}): there is no such file, and no search of that name or in "
        "that folder."
    )


def policy_of(runner: TrialRunner, trial_id: str) -> list[PolicyStep]:
    """Return the configurations that led to a trial's newest state, in their order.

    Raises:
        ConfigError: an earlier version wrote a snapshot that lacks them.
    """
    name, lineage = trial_id, runner.summary(trial_id).lineage
    policy: list[tuple[int, bytes]] = []
    while True:
        summary = runner.summary(name)
        former = [one for one in summary.former if one.lineage == lineage]
        configs, changed = [one.config for one in former], [one.until for one in former]
        if lineage == summary.lineage:
            configs.append(summary.config)
        if not configs:
            raise ConfigError(
                f"the schedule of trial {trial_id} is not known: the journal's snapshot is of an "
                f"earlier version, and lacks what trial {name} had in its lineage {lineage}."
            )
        source = former[0].source if former else continued_from(summary.inherited)
        begun = 0 if source is None else source[2]
        policy = [*zip([begun, *changed], configs, strict=False), *policy]
        if source is None:
            return _in_effect(PolicyStep(step, unpack_config(config)) for step, config in policy)
        name, lineage, _ = source


def _read_file(path: Path) -> list[PolicyStep]:
    """Read a policy file of Ray Tune.

    Each line has a trial, its donor, the steps of both, and the configuration of the donor before
    and that of the trial behind. The lines before a trial's first are those of its donor.

    Raises:
        ConfigError: it is none.
    """
    policy: list[PolicyStep] = []
    before: dict[str, Any] = {}
    donor = None
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    for number, line in reversed([*enumerate(lines, start=1)]):
        try:
            trial, source, _, step, old, new = json.loads(line)
            is_valid = type(step) is int and isinstance(old, dict) and isinstance(new, dict)
        except (*NO_JSON, TypeError):
            is_valid = False
        if not is_valid:
            raise ConfigError(
                f"line {number} of {path} is not of a policy file of population based training: "
                "[trial, donor, step, step of the donor, configuration before, and behind]."
            )
        if donor not in {None, trial}:
            break  # what its trial did before it took over the donor's state
        donor, before = source, old
        policy.insert(0, PolicyStep(step, new))
    if not policy:
        raise ConfigError(f"{path} is empty: its trial took over no state.")
    return _in_effect([PolicyStep(0, before), *policy])


def _in_effect(policy: Iterable[PolicyStep]) -> list[PolicyStep]:
    """Leave out the configurations that others replaced before their first step."""
    kept: list[PolicyStep] = []
    for one in policy:
        while kept and kept[-1].step >= one.step:
            kept.pop()
        kept.append(one)
    return kept
