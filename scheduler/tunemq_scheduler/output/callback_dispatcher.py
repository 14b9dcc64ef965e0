"""`CallbackDispatcher`: passes notifications to loggers, callbacks and the display.

All of these follow the journal: an error here cannot lose an event; at worst a file lacks what the
journal has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from tunemq_scheduler.base.plugin_calls import call_plugin
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.output.loggers import LoggerCallback
from tunemq_scheduler.output.pending_fsyncs import UnsyncedFiles
from tunemq_scheduler.output.result_repair import put_away
from tunemq_scheduler.output.terminal.display_base import Display
from tunemq_scheduler.results.callback import Callback
from tunemq_scheduler.results.decision_rows import result_row
from tunemq_scheduler.results.result import sign_of
from tunemq_scheduler.results.trial_failures import (
    FailureLog,
    TrialFailure,
    recorded_failure,
    write_failure,
)
from tunemq_scheduler.results.trial_view import TrialView
from tunemq_scheduler.storage.folders import make_trial_folder
from tunemq_shared.protocol.result_conditions import lookup


class CallbackDispatcher:
    """Notify all loggers, callbacks and the display of a search, after the journal.

    Args:
        callbacks: the loggers first, then the user's.
        display: shows the search on the terminal.
        metric, mode: what to optimise; None without a metric.
        unsynced: records which files are written.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        display: Display,
        metric: str | None,
        mode: str | None,
        unsynced: UnsyncedFiles | None = None,
    ) -> None:
        self.failures = FailureLog()
        #: The failure that ended each trial in ERROR.
        self.fatal: dict[str, TrialFailure] = {}
        #: The best trial so far: its id, its value and its configuration.
        self.best: tuple[str, float, Mapping[str, Any]] | None = None
        #: Returns the unfinished trials; the loop sets it.
        self.trials: Callable[[], Iterable[TrialView]] = list
        #: Receives every notice, in addition to the display.
        self.also_notify: Callable[[str], None] = lambda _text: None
        #: Called at the end of each turn.
        self.show: Callable[[], None] = lambda: None
        self._callbacks = callbacks
        #: The callbacks that have each hook.
        self._hooked: dict[str, list[Callback]] = {}
        told = self._having("on_trial_result")
        # Plain loggers are called directly, which saves a call for each result.
        self._loggers = [one for one in told if _is_plain_logger(one)]
        self._others = [one for one in told if not _is_plain_logger(one)]
        self._display = display
        self._metric = metric
        self._sign = sign_of(mode) if metric is not None else 0
        self._iteration = 0
        self._unsynced = UnsyncedFiles() if unsynced is None else unsynced

    # --- called by the loop -----------------------------------------------------------------------

    def notify(self, command: c.NotifyCommand, trial: TrialView) -> None:
        """Pass on an event of one trial.

        Raises:
            SearchFailed: a callback raised.
        """
        match command:
            case c.NotifyResult():
                self._result(command, trial)
            case c.NotifyTrialAdded():
                make_trial_folder(trial.local_path)
            case c.NotifyTrialRevived():
                self.fatal.pop(trial.trial_id, None)
                if command.is_anew:
                    put_away(trial.local_path, trial.trial_id, command.lineage, self._unsynced)
            case c.NotifyTrialStart():
                self._display.trial_started(trial)
                self._tell("on_trial_start", trial=trial)
                if trial.checkpoint is not None:
                    self._tell("on_trial_restore", trial=trial)
            case c.NotifyCheckpoint():
                self._tell("on_trial_save", trial=trial)
                self._tell("on_checkpoint", trial=trial, checkpoint=command.checkpoint)
            case c.NotifyFailure():
                self._failure(command, trial)
            case c.NotifyTrialEnd():
                self._tell(
                    "on_trial_error" if command.status == "ERROR" else "on_trial_complete",
                    trial=trial,
                )
                self._display.trial_ended(trial, command.reason)

    def trial_waits(self, trial: TrialView) -> None:
        """Report that a trial begins or ends to wait for the store."""
        self._display.trial_waits(trial)

    def turn_began(self) -> None:
        """Report that a turn of the loop begins."""
        self._tell("on_step_begin")

    def notices(self, text: str) -> None:
        """Show a notice that concerns no trial."""
        self._display.notices(text)
        self.also_notify(text)

    def turn_ended(self) -> None:
        """Report that a turn has ended and all its events were passed on."""
        self._tell("on_step_end")
        self._iteration += 1
        self.show()

    def take_up(self, trials: Iterable[TrialView]) -> None:
        """Load the outcomes of trials of earlier runs."""
        for trial in trials:
            if self._metric is not None:
                self._compare(trial, trial.last_result, self._metric)

    def setup(self, **about: Any) -> None:
        """Set up the callbacks before the first turn."""
        for callback in self._callbacks:
            self._call(callback, "setup", **about)

    def finish(self, trials: Sequence[TrialView]) -> None:
        """Call the last hook after the last turn, with all trials of the search."""
        for callback in self._callbacks:
            self._call(callback, "on_experiment_end", trials=trials)

    # --- helpers ----------------------------------------------------------------------------------

    def _result(self, command: c.NotifyResult, trial: TrialView) -> None:
        result = result_row(trial, command)
        if self._metric is not None:
            self._compare(trial, result, self._metric)
        for logger in self._loggers:
            self._call(logger, "log_trial_result", self._iteration, trial, result)
        for callback in self._others:
            self._call(callback, "on_trial_result", self._iteration, self._live(), trial, result)
        if self._display.wants_results:
            self._display.trial_result(trial, result)

    def _compare(self, trial: TrialView, result: Mapping[str, Any], metric: str) -> None:
        value = lookup(result, metric)
        if isinstance(value, int | float) and math.isfinite(value):
            best, number = self.best, float(value)  # it may be a boolean, or too large to be sent
            if best is None or self._sign * number > self._sign * best[1]:
                self.best = (trial.trial_id, number, result.get("config", trial.config))

    def _failure(self, command: c.NotifyFailure, trial: TrialView) -> None:
        failure = recorded_failure(command, trial.trial_name, trial.num_failures)
        trial.error_file = write_failure(trial.local_path, failure)
        self._unsynced.note(trial.error_file)
        failure = msgspec.structs.replace(failure, file=trial.error_file)
        self.failures.add(failure)
        if not command.retried:
            self.fatal[trial.trial_id] = failure
        self._display.trial_failed(trial, failure)
        if command.retried:
            self._tell("on_trial_recover", trial=trial)

    def _live(self) -> list[TrialView]:
        return list(self.trials())

    def _tell(self, hook: str, **about: Any) -> None:
        for callback in self._having(hook):
            self._call(callback, hook, iteration=self._iteration, trials=self._live(), **about)

    def _having(self, hook: str) -> list[Callback]:
        """Return the callbacks that define a hook."""
        if hook not in self._hooked:
            default = getattr(Callback, hook)
            self._hooked[hook] = [
                one for one in self._callbacks if getattr(type(one), hook) is not default
            ]
        return self._hooked[hook]

    def _call(self, callback: Callback, hook: str, *args: Any, **more: Any) -> None:
        who = f"{type(callback).__name__}.{hook}"
        call_plugin(who, getattr(callback, hook), *args, **more)


def _is_plain_logger(callback: Callback) -> bool:
    is_logger = isinstance(callback, LoggerCallback)
    return is_logger and type(callback).on_trial_result is LoggerCallback.on_trial_result
