"""`LineDisplay`: progress as lines, for output that is not a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from tunemq_scheduler.output.terminal.display_base import Display, TerminalOutput
from tunemq_scheduler.output.terminal.formatting import (
    clean,
    clock,
    duration,
    parameters,
    resources,
    value,
)
from tunemq_scheduler.output.terminal.rows import (
    STATES,
    TableOptions,
    is_reported_metric,
    waits_in_words,
)
from tunemq_scheduler.output.terminal.summary import plain, sections

if TYPE_CHECKING:
    from tunemq_scheduler.output.terminal.display_view import SearchView
    from tunemq_scheduler.results.result import Result
    from tunemq_scheduler.results.trial_failures import TrialFailure
    from tunemq_scheduler.results.trial_view import TrialView

#: Seconds between two lines about the whole search, and the least between two best trials.
STATUS_PERIOD_S: Final = 30.0
BEST_PERIOD_S: Final = 5.0
#: The most lines about trials at once, and then each second; the others are counted.
_BURST: Final = 40.0
_PER_SECOND: Final = 5.0
_WIDTH: Final = 120
#: The most characters of a notice; a reason may be long.
_NOTICES: Final = 500
#: Seconds that a trial waits before a line reports it: short waits are normal.
_TIMEOUT_S: Final = 2.0


class _Allowance:
    """A rate limit that allows bursts (a token bucket)."""

    def __init__(self, now: float) -> None:
        self._left = _BURST
        self._at = now

    def take(self, now: float) -> bool:
        self._left = min(_BURST, self._left + (now - self._at) * _PER_SECOND)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class LineDisplay(Display):
    """Write a line when a trial starts, ends or fails, and when there is a new best trial.

    If lines come too fast, for instance from thousands of short trials, the display drops and
    counts them: failures separately, so that neither kind hides the other.
    """

    def __init__(
        self,
        output: TerminalOutput,
        options: TableOptions,
        *,
        show_results: bool = False,
        status_period_s: float = STATUS_PERIOD_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.wants_results = show_results
        self._output = output
        self._options = options
        self._status_period_s = status_period_s
        self._now = now
        self._began = now()
        self._before = 0.0
        self._status_due = self._began + status_period_s
        self._best_due = self._began
        self._best: tuple[str, float] | None = None
        self._events = _Allowance(self._began)
        self._failures = _Allowance(self._began)
        self._left_out = 0
        #: The trials whose wait was reported, and for what they wait.
        self._waiting: dict[str, str] = {}
        #: The other waiting trials, and since when; the longest wait first.
        self._waits: dict[str, tuple[float, TrialView]] = {}

    def begin(self, view: SearchView) -> None:
        """Write what begins and where its files are."""
        self._before = view.elapsed_s
        amount = f"{view.num_trials} trials, " if view.num_trials else ""
        store = f", checkpoints in {clean(view.store)}" if view.store else ""
        self._say(f"search {clean(view.name)}: {amount}results in {clean(view.path)}{store}")

    def trial_started(self, trial: TrialView) -> None:
        """Write where the trial runs and its parameters."""
        self._waits_no_more(trial)
        if self._may(self._events):
            again = " again" if trial.attempt > 1 else ""
            again += f" (attempt {trial.num_failures + 1})" if trial.num_failures else ""
            host, node = clean(trial.hostname), clean(trial.node)
            where = f" on {node or host}" if node or host else ""
            where += f" ({host})" if node and host not in ("", node) else ""
            params = parameters(trial.evaluated_params or trial.config)
            self._say(f"trial {clean(trial.trial_id)} started{again}{where}: {params}")

    def trial_result(self, trial: TrialView, result: dict[str, Any]) -> None:
        """Write the trial's result."""
        if self._may(self._events):
            step = result.get("training_iteration")
            self._say(f"trial {clean(trial.trial_id)} step {step}: {self._metrics(result)}")

    def trial_failed(self, trial: TrialView, failure: TrialFailure) -> None:
        """Write the error, where it happened, and which file has the details."""
        if self._may(self._failures):
            about = ", ".join(clean(one) for one in (failure.hostname, failure.file) if one)
            again = "" if failure.is_final else "it is tried again"
            then = "".join(f"; {one}" for one in [failure.consequence or again] if one)
            told = f"trial {clean(trial.trial_id)} failed: {clean(failure.error, _NOTICES)}"
            self._say(f"{told} ({about}){then}" if about else f"{told}{then}")

    def trial_ended(self, trial: TrialView, reason: str) -> None:
        """Write how the trial ended; `trial_failed` has already written failures."""
        self._waits_no_more(trial)
        if trial.status != "ERROR" and self._may(self._events):
            result = trial.last_result
            steps = result.get("training_iteration", 0)
            took = duration(result.get("time_total_s") or 0.0)
            why = f" ({clean(reason, 80)})" if reason else ""
            told = f"trial {clean(trial.trial_id)} ended after {steps} steps, {took}{why}"
            self._say(f"{told}: {self._metrics(result)}" if result else told)

    def trial_waits(self, trial: TrialView) -> None:
        """Report the end of a wait that was reported; `update` reports long waits."""
        name = trial.trial_id
        if trial.waits[0]:
            if name not in self._waiting:
                self._waits.setdefault(name, (self._now(), trial))
        elif what := self._waits_no_more(trial):
            waited_for = "a GPU" if what == "device" else "the store"
            self._say(f"trial {clean(name)} no longer waits for {waited_for}")

    def notices(self, text: str) -> None:
        """Write the notice immediately."""
        if self._may(self._failures):
            self._say(clean(text, _NOTICES))

    def update(self, view: SearchView) -> None:
        """Write a new best trial and the search's progress, each at a limited rate."""
        now = self._now()
        self._tell_waits(now)
        best = view.best
        if best is not None and now >= self._best_due and best[:2] != self._best:
            self._best = best[:2]
            self._best_due = now + BEST_PERIOD_S
            name = clean(self._options.metric or view.metric or "metric")
            params = parameters(best[2])
            self._say(f"best {name} = {value(best[1])}, trial {clean(best[0])}: {params}")
        if now >= self._status_due:
            self._status_due = now + self._status_period_s
            self._say(self._status(view), *(f"  {clean(note)}" for note in view.notes))

    def end(self, view: SearchView, results: Sequence[Result]) -> None:
        """Write the summary."""
        self._output.write(*plain(sections(view, results, self._options, _WIDTH)))

    def _tell_waits(self, now: float) -> None:
        for name, (since, trial) in list(self._waits.items()):
            if now - since < _TIMEOUT_S:
                break
            del self._waits[name]
            if self._may(self._failures):
                what, reason = trial.waits
                self._waiting[name] = what
                self._say(f"trial {clean(name)} {waits_in_words(what)} ({clean(reason, _NOTICES)})")

    def _waits_no_more(self, trial: TrialView) -> str:
        """Forget the trial's wait; return what it waited for if that was reported."""
        self._waits.pop(trial.trial_id, None)
        return self._waiting.pop(trial.trial_id, "")

    def _status(self, view: SearchView) -> str:
        counts = [f"{view.counts[state]} {state}" for state in STATES if view.counts.get(state)]
        used = resources(view.resources_used, view.resources_total)
        total = f" of {view.num_trials} trials" if view.num_trials else ""
        told = f"status: {', '.join(counts) or 'no trials yet'}{total}; {used}"
        if self._left_out:
            told += f"; {self._left_out} lines left out"
            self._left_out = 0
        return told

    def _metrics(self, result: dict[str, Any]) -> str:
        chosen = self._options.metric_columns
        if chosen is not None:
            found = {name: result.get(key) for key, name in chosen.items()}
        else:
            found = {key: one for key, one in result.items() if is_reported_metric(key, one)}
        return parameters(found)

    def _may(self, allowance: _Allowance) -> bool:
        if allowance.take(self._now()):
            return True
        self._left_out += 1
        return False

    def _say(self, *lines: str) -> None:
        stamp = clock(self._before + self._now() - self._began)
        self._output.write(*(f"[{stamp}] {line}" for line in lines))
