"""`ExperimentView`: the state of a search for displays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from tunemq_scheduler.core.placement.placement_reasons import device_set_aside
from tunemq_scheduler.core.trials.trial import PAUSED, PENDING, RUNNING, awaited
from tunemq_scheduler.experiment.experiment_loop import ExperimentLoop
from tunemq_scheduler.experiment.start_checks import PreparedSearch
from tunemq_scheduler.output.callback_dispatcher import CallbackDispatcher
from tunemq_scheduler.results.trial_failures import FailureGroup
from tunemq_scheduler.results.trial_view import TrialView
from tunemq_shared.objects.store_address import without_settings

#: The states of trials that have not ended.
UNFINISHED: Final = (PENDING, RUNNING, PAUSED)
#: Seconds that uploads may take after the last trial before a notice mentions them.
_TIMEOUT_S: Final = 2.0
#: Seconds after which a note names a trial whose code has not returned since its last result.
_RETURNS_WITHIN_S: Final = 60.0
#: The most nodes or devices that a note names.
_NODES_TOLD: Final = 3
#: The most trials that a note looks at; all may wait for the same thing.
_LOOKED_AT: Final = 1000


class ExperimentView:
    """The state of a search for displays; implements `SearchView`.

    Args:
        loop: the experiment's loop.
        dispatcher: the experiment's loggers and callbacks.
        prepared: the search's checked input.
        elapsed: returns for how many seconds the search has run.
    """

    def __init__(
        self,
        loop: ExperimentLoop,
        dispatcher: CallbackDispatcher,
        prepared: PreparedSearch,
        elapsed: Callable[[], float],
    ) -> None:
        self._loop = loop
        self._dispatcher = dispatcher
        self._elapsed = elapsed
        plan = loop.plan
        self.name = plan.experiment
        self.path = plan.folder
        self.store = without_settings(plan.store)
        self.metric = prepared.tune.metric
        self.mode = prepared.tune.direction
        self.num_trials = prepared.trials
        self.counts: Mapping[str, int] = loop.runner.counts
        self.live: Iterable[TrialView] = loop.trials.values()

    @property
    def elapsed_s(self) -> float:
        """See `SearchView`."""
        return self._elapsed()

    @property
    def resources_used(self) -> Mapping[str, float]:
        """See `SearchView`."""
        placement = self._loop.runner.placement
        free = placement.free
        return {name: total - free.get(name, 0.0) for name, total in placement.total.items()}

    @property
    def resources_total(self) -> Mapping[str, float]:
        """See `SearchView`."""
        return self._loop.runner.placement.total

    @property
    def best(self) -> tuple[str, float, Mapping[str, Any]] | None:
        """See `SearchView`."""
        return self._dispatcher.best

    @property
    def outcome(self) -> str:
        """See `SearchView`."""
        runner = self._loop.runner
        if runner.interrupted:
            return f"was interrupted ({runner.interrupted}); PENDING trials are unfinished"
        if runner.stopping:
            return f"was stopped: {runner.stopping}"
        return "finished" if runner.is_finished else "was aborted"

    @property
    def notes(self) -> Sequence[str]:
        """See `SearchView`."""
        notes = *self._loop.executor.notes(), *self._set_aside(), *self._withheld(), *self._waits()
        others = self.unreturned, self._loop.waits_for_search, self.uploads
        return [*notes, *filter(None, others)]

    def _set_aside(self) -> Iterator[str]:
        """Yield notes about nodes that are set aside while trials wait; only the first few."""
        runner = self._loop.runner
        waits = runner.counts[PENDING] or runner.counts[PAUSED]
        aside = runner.aside.items() if waits else ()
        for instance_id, until in islice(aside, _NODES_TOLD):
            node, left = runner.nodes[instance_id], max(0.0, until - runner.elapsed)
            yield (
                f"trials wait, because node {node.node} on {node.hostname} is set aside for "
                f"{left:.0f} s more: {runner.health[node.node].reason}"
            )

    def _withheld(self) -> Iterator[str]:
        """Yield notes about GPUs that trials wait for; on shared nodes the farm reports them."""
        runner = self._loop.runner
        if not any(node.withheld and not node.is_shared for node in runner.nodes.values()):
            return
        lines = (*runner.queue.lines(PENDING), *runner.queue.lines(PAUSED))
        requests = [trial.resources for trial, _ in lines]
        if not runner.exhausted and runner.settings.request is not None:
            requests.append(runner.settings.request)
        found = {
            device_set_aside(runner.nodes[node].node, uuid, why): None
            for request in requests
            if runner.placement.fit(request) is None
            for node, uuid, why in runner.placement.withheld_from(request)
        }
        for told in islice(found, _NODES_TOLD):
            yield f"trials wait, because {told}"

    def _waits(self) -> Iterator[str]:
        """Yield one line about all trials that wait for the store or for GPUs."""
        waiting = [trial for trial in islice(self.live, _LOOKED_AT) if trial.waits[0]]
        if waiting:
            first, others = waiting[0], len(waiting) - 1
            who = f"trial {first.trial_id}" + (f" and {others} more wait" if others else " waits")
            yield f"{who} for {awaited(first.waits[0])}: {first.waits[1]}"

    @property
    def unreturned(self) -> str:
        """A note about trials whose code has not returned since their last result; may be empty."""
        now = time.time()
        ages = {
            trial.trial_id: now - trial.last_result.timestamp
            for trial in islice(self._loop.runner.live.values(), _LOOKED_AT)
            if trial.status == RUNNING and trial.ending and not trial.is_saving
            if trial.last_result is not None and trial.last_result.done
        }
        late = [name for name, age_s in ages.items() if age_s > _RETURNS_WITHIN_S]
        if not late:
            return ""
        others = f" and {len(late) - 1} more" if len(late) > 1 else ""
        return (
            f"trial {late[0]}{others} reached the end {ages[late[0]]:.0f} s ago, and the code has"
            " not returned since: the slot stays taken; look for threads, `except:` or `finally:`"
            " that continue; `tunemq stop SEARCH/TRIAL` or TrialLimits(stall_s=...) ends it"
        )

    @property
    def uploads(self) -> str:
        """A note that only uploads keep the search from ending; empty if that is not so."""
        runner = self._loop.runner
        if not runner.uploading or any(runner.counts[state] for state in UNFINISHED):
            return ""
        amount = "1 checkpoint" if runner.uploading == 1 else f"{runner.uploading} checkpoints"
        return f"waiting for {amount} on the way to {self.store or self.path}"

    @property
    def failures(self) -> Sequence[FailureGroup]:
        """See `SearchView`."""
        return self._dispatcher.failures.groups()


class UploadNotice:
    """Shows one notice when a search waits only for uploads, unless they finish quickly.

    Args:
        view: the search.
        tell: shows a line to the user.
    """

    def __init__(self, view: ExperimentView, tell: Callable[[str], None]) -> None:
        self._view = view
        self._tell = tell
        self._since: float | None = None
        self._has_told = False

    def look(self) -> None:
        """Check once a turn whether the notice is due."""
        uploads = "" if self._has_told else self._view.uploads
        if not uploads:
            self._since = None
            return
        now = self._view.elapsed_s
        self._since = now if self._since is None else self._since
        if now - self._since >= _TIMEOUT_S:
            self._has_told = True
            self._tell(f"{uploads}; Ctrl-C leaves them on this machine")
