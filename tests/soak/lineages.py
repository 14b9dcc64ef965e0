"""Follows which state each trial continued from, and what its results have to be."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from tests.support.searches.chain import link
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_shared.code.config_packing import unpack_config
from tunemq_shared.protocol import messages as m

#: The lineage that a trial begins with.
_FIRST: Final = -1


class _Lineage(NamedTuple):
    """A trial's, named by the last attempt before it."""

    trial: str
    after: int


class Lineages:
    """The values of all chains, computed anew from the decisions of a journal.

    A trial that took over a checkpoint must continue the chain of the trial that wrote it.

    Attributes:
        exploits: how many lineages with results began by a decision.
        lost: how many of these had to begin with an older state than the decision meant.
    """

    def __init__(self) -> None:
        self.exploits = self.lost = 0
        self._values: dict[tuple[_Lineage, int], str] = {}
        self._afters: dict[str, list[int]] = {}
        self._steps: dict[_Lineage, int] = {}
        self._sources: dict[str, str] = {}
        self._warned: set[str] = set()

    def handled(self, runner: TrialRunner, event: m.Event, commands: list[c.Command]) -> None:
        """Check the results of an event that the runner has just handled."""
        if type(event) is m.ActionTaken and event.action == m.EXPLOIT and event.reason:
            self._sources[event.trial] = event.source
            self._warned.discard(event.trial)
        for command in commands:
            if isinstance(command, c.WarnStateLost):
                self._warned.add(command.trial)
            elif isinstance(command, c.NotifyResult):
                self._result(runner, command.result)

    def steps(self, trial: str) -> int:
        """Return the last step of a trial's last lineage; 0 without results."""
        afters = self._afters.get(trial)
        return 0 if afters is None else self._steps[_Lineage(trial, afters[-1])]

    def _result(self, runner: TrialRunner, result: m.ResultReported) -> None:
        summary = runner.summary(result.trial)
        state = summary.inherited
        lineage = _Lineage(result.trial, _FIRST if state is None else state.attempt)
        if lineage not in self._steps:
            self._begin(lineage, state)
        step = self._steps[lineage] + 1
        assert result.step == step, (lineage, result.step, step)
        config: dict[str, Any] = unpack_config(summary.config)
        value = link(self._values[lineage, step - 1], config, step)
        assert result.metrics["chain"] == value, (lineage, step)
        self._steps[lineage], self._values[lineage, step] = step, value

    def _begin(self, lineage: _Lineage, state: Any) -> None:
        step, value = 0, ""
        if state is not None:
            self.exploits += 1
            if lineage.trial in self._warned:
                self.lost += 1
            else:
                assert state.step >= max(state.announced, 1), state
                assert state.source == self._sources[lineage.trial], state
            step = state.step
            assert (state.checkpoint is None) == (step == 0), state
        if step:
            folder, _, name = state.checkpoint.key.rpartition("/")
            writer = next(trial for trial in self._afters if folder.endswith(trial))
            attempt = int(name.removeprefix("checkpoint_").partition("-")[0])
            after = max(one for one in self._afters[writer] if one < attempt)
            value = self._values[_Lineage(writer, after), step]
        self._afters.setdefault(lineage.trial, []).append(lineage.after)
        self._steps[lineage], self._values[lineage, step] = step, value
