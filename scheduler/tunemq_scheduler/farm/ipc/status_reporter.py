"""`SearchStatusReporter`: reports a running search to its supervisor, regularly and on request."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import msgspec

from tunemq_scheduler.api.farm_answer_types import (
    DeviceUseRow,
    ExperimentDetail,
    ExperimentRow,
    ExperimentState,
    RequestDone,
    RequestRejection,
    TrialRow,
)
from tunemq_scheduler.core.resource_demand import ANY_NUMBER
from tunemq_scheduler.core.runner_state import ELSEWHERE_S
from tunemq_scheduler.core.shared_amounts import WHOLE_NODE, OfferUsage
from tunemq_scheduler.core.trials.trial import (
    ERROR,
    FAILURES_ON_A_NODE,
    FINISHED,
    PENDING,
    RUNNING,
    STORE,
    Trial,
    awaited,
)
from tunemq_scheduler.experiment.experiment_view import ExperimentView
from tunemq_scheduler.experiment.search_run import SearchRun
from tunemq_scheduler.farm.ipc import ipc_messages as r
from tunemq_scheduler.output.terminal.rows import newest_decision
from tunemq_scheduler.results.explained_trial import explain_status
from tunemq_scheduler.results.json_encoding import to_plain
from tunemq_scheduler.results.trial_view import TrialView
from tunemq_shared.base.errors import ConfigError, RequestRejected, SchedulerSuperseded, TuneError
from tunemq_shared.base.failure_text import shortened
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.result_conditions import lookup

#: The most trials in an answer, or in the final report.
_TOLD_AT_MOST: Final = 1000
#: Smaller numbers for a final report that is too large.
_TOLD_ELSE: Final = (100, 10, 0)
#: The largest configuration in an answer.
_CONFIG_BYTES: Final = 2**20
#: The most trials to name in a line.
_NAMED_AT_MOST: Final = 5
#: Errors for values that msgpack cannot encode: integers beyond 64 bits, lone surrogates, deep
#: nesting.
_UNTELLABLE: Final = (OverflowError, UnicodeEncodeError, RecursionError)

_encode: Final = msgspec.msgpack.Encoder(enc_hook=repr).encode


class SearchStatusReporter:
    """Reports a running search; its thread calls this between two turns.

    Args:
        search: the search.
        view: the search as displays see it.
    """

    def __init__(self, search: SearchRun, view: ExperimentView) -> None:
        self._search, self._view = search, view
        self._loop = search.loop

    # --- regular reports --------------------------------------------------------------------------

    def usage(self) -> OfferUsage:
        """Return how the search uses its offers."""
        runner, total = self._loop.runner, self._view.num_trials
        return runner.usage(ANY_NUMBER if total is None else max(0, total - runner.suggested))

    def status(self) -> r.SearchStatus:
        """Return the progress of the search."""
        view, waits = self._view, tuple(map(shortened, self._waits()))
        return r.SearchStatus(counts=dict(view.counts), total=view.num_trials, waits=waits)

    def _waits(self) -> Iterator[str]:
        """Explain why trials wait, other than for slots or stores."""
        runner, now = self._loop.runner, self._view.elapsed_s
        pauses = [
            trial.not_before
            for trial in runner.live.values()
            if trial.status == PENDING and trial.not_before > now
        ]
        if pauses:
            failed = "trial failed and is" if len(pauses) == 1 else "trials failed and are"
            yield f"{len(pauses)} {failed} tried again in {_span_s(pauses, now)}"
        if len(runner.giving_way) == 1:
            ((name, due),) = runner.giving_way.items()
            yield (
                f"trial {name} has to save and give back its slot; it is stopped in"
                f" {_span_s([due], now)} where it has not saved, and continues later from its last"
                " checkpoint"
            )
        elif runner.giving_way:
            names = list(runner.giving_way)
            more = len(names) - _NAMED_AT_MOST
            named = ", ".join(names[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")
            yield (
                f"trials {named} have to save and give back their slots; they are stopped in"
                f" {_span_s(runner.giving_way.values(), now)} where they have not saved, and"
                " continue later from their last checkpoints"
            )
        if unreturned := self._view.unreturned:
            yield unreturned
        if runner.exhausted and not runner.stopping:
            name = self._loop.algorithms.search_name
            yield f"its search algorithm ({name}) has no more configurations"

    def waiting_for_store(self) -> int:
        """Return how many trials wait for a store."""
        waits = (trial.waits[0] for trial in self._loop.runner.live.values())
        return sum(bool(what) and awaited(what) == STORE for what in waits)

    def search_ended(self) -> r.SearchEnded:
        """Return how the search ended."""
        interrupted = bool(self._loop.runner.interrupted) or self._search.is_killed
        outcome = shortened(self._view.outcome, r.MOST_CHARACTERS)
        return r.SearchEnded(outcome, interrupted, self._last_detail())

    def _last_detail(self) -> bytes:
        for most in (_TOLD_AT_MOST, *_TOLD_ELSE):
            with contextlib.suppress(RequestRejected):
                return _encoded(self._detail(most))
        return b""

    # --- requests ---------------------------------------------------------------------------------

    def answer(self, asked: r.IpcRequest) -> r.IpcReply:
        """Run a request, and return the reply.

        Raises:
            SchedulerSuperseded: this process must end at once and leave everything unchanged.
        """
        try:
            return r.IpcReply(asked.id, msgspec.Raw(_encoded(self._do(asked.request))))
        except SchedulerSuperseded:
            raise
        except RequestRejected as error:
            return r.IpcReply(asked.id, rejection=RequestRejection(text=str(error)))
        except TuneError as error:
            return r.IpcReply(
                asked.id, rejection=RequestRejection(text=str(error), is_wrong_use=True)
            )

    def _do(self, request: r.SearchRequest) -> RequestDone | ExperimentDetail | r.TrialExplanation:
        match request:
            case r.StopSearch():
                self._loop.request_stop(request.reason)
                return RequestDone(text="all trials are being stopped")
            case r.InterruptSearch():
                self._search.interrupt(request.reason)
                return RequestDone(text="it ends, to be resumed")
            case r.DetachSearch():
                self._search.complete_copy()
                raise SchedulerSuperseded("The supervisor ends; trials continue, for the next one.")
            case r.StopOneTrial():
                return self._stop(request)
            case r.RetryTrial():
                return self._retry(request.trial)
            case r.ShowTrials():
                return self._detail(min(request.trials, _TOLD_AT_MOST))
            case r.ExplainTrial():
                return self._why(request.trial)

    def _stop(self, request: r.StopOneTrial) -> RequestDone:
        trial = self._find(request.trial)
        live = self._loop.runner.live.get(trial)
        if live is None or live.is_finished:
            raise ConfigError(f"trial {trial} has already ended.")
        self._loop.request_stop(request.reason, trial)
        return RequestDone(text=f"trial {trial} is being stopped")

    def _retry(self, wanted: str) -> RequestDone:
        runner = self._loop.runner
        trials = [self._find(wanted)] if wanted else runner.errored()
        for trial in trials:
            summary = runner.summary(trial)
            if summary.status != ERROR:
                why = f" ({summary.reason})" if summary.reason else ""
                raise ConfigError(
                    f"trial {trial} is {summary.status}{why}; only one in ERROR is tried again."
                )
        if runner.stopping or runner.interrupted:
            raise ConfigError("the search is ending, so that no trial is tried again.")
        if trials:
            also = tuple(trials)
            event = m.ExperimentResumed(
                run=runner.run, at=time.time(), unfinished=True, is_cold=False, also=also
            )
            self._loop.resume(event)
        tried = ", ".join(trials) or "none is in ERROR"
        return RequestDone(text=f"tried again: {tried}")

    def _find(self, name: str) -> str:
        """Return a trial's id, from its id or name.

        Raises:
            ConfigError: there is no such trial.
        """
        runner = self._loop.runner
        prefix = f"{self._loop.plan.trainable_name}_"
        for trial in (name, name.removeprefix(prefix)):
            if trial in runner.live or trial in runner.finished:
                return trial
        raise ConfigError(f"there is no trial {name} in {self._loop.plan.experiment}.")

    # --- trials in a table ------------------------------------------------------------------------

    def _detail(self, most: int) -> ExperimentDetail:
        view, runner, plan = self._view, self._loop.runner, self._loop.plan
        best = view.best
        rows = [self._row(one) for one in self._chosen(most)]
        return ExperimentDetail(
            experiment=ExperimentRow(
                name=plan.experiment,
                id=plan.experiment_id,
                owner="",
                priority=0,
                state=ExperimentState.RUNNING,
                submitted=0.0,
                trials=dict(view.counts),
                total=view.num_trials,
            ),
            metric=view.metric or "",
            mode=view.mode or "",
            best=None if best is None else self._row(self._of(best[0])),
            trials=tuple(rows),
            hidden=len(runner.live) + len(runner.finished) - len(rows),
            folder=plan.folder,
            store=view.store,
            resources=dict(view.resources_used),
            notes=tuple(view.notes),
        )

    def _chosen(self, most: int) -> Iterator[TrialView]:
        """Return running trials first, then waiting ones, then the newest finished ones."""
        runner = self._loop.runner
        running = [one for one in runner.live.values() if one.status == RUNNING]
        waiting = [one for one in runner.live.values() if one.status not in {RUNNING, *FINISHED}]
        over = [one.trial_id for one in runner.live.values() if one.is_finished]
        over += reversed(runner.finished)
        chosen = [one.trial_id for one in (*running, *waiting)] + over
        return map(self._of, chosen[: max(0, most)])

    def _of(self, trial: str) -> TrialView:
        known = self._loop.trials.get(trial)
        return known or TrialView(trial, self._loop.runner.summary(trial), self._loop.plan)

    def _row(self, view: TrialView) -> TrialRow:
        newest, metric = view.newest, self._view.metric
        value: Any = lookup(view.full_result(newest), metric) if newest and metric else None
        runner, trial = self._loop.runner, view.trial_id
        known = runner.live.get(trial) or runner.summary(trial)
        return TrialRow(
            trial=view.trial_id,
            name=view.trial_name,
            status=view.status,
            node=self._node_of(view),
            step=newest.step if newest is not None else 0,
            metric=float(value) if isinstance(value, int | float) else None,
            config=_told_config(view.config),
            time_total_s=newest.time_total_s if newest is not None else 0.0,
            failures=view.num_failures,
            preemptions=known.preemptions,
            repeated=known.repeated,
            note=self._note(view),
            decision=newest_decision(view.decisions),
            devices_used=tuple(
                DeviceUseRow(**msgspec.structs.asdict(use)) for use in known.devices_used
            ),
        )

    def _node_of(self, view: TrialView) -> str:
        """Return the name of the node that runs the trial; of one that ran, its machine's name."""
        runner = self._loop.runner
        trial = runner.live.get(view.trial_id)
        instance = (
            runner.slots.node_at(trial.trial_id, trial.attempt) if trial is not None else None
        )
        node = runner.nodes.get(instance or "")
        return node.node if node is not None else view.hostname

    def _note(self, view: TrialView) -> str:
        failure = self._search.dispatcher.fatal.get(view.trial_id)
        if failure is not None:
            return failure.error
        if view.waits[0]:
            return f"waits for {awaited(view.waits[0])}: {view.waits[1]}"
        return ""

    # --- reasons for waiting ----------------------------------------------------------------------

    def _why(self, wanted: str) -> r.TrialExplanation:
        name = self._find(wanted)
        runner = self._loop.runner
        trial = runner.live.get(name)
        if trial is None or trial.is_finished:
            summary = runner.summary(name)
            told = [explain_status(name, summary)]
            if trial is not None and trial.checkpoints.uploading:
                told.append(f"{trial.checkpoints.uploading} checkpoints of it are being uploaded")
            before = summary.decisions_before
            return r.TrialExplanation(tuple(told), {}, summary.decisions, before)
        lines = [*self._reasons(trial)]
        waits = trial.status == PENDING and trial.not_before <= runner.elapsed
        waits &= not runner.is_at_limit
        request = WHOLE_NODE if runner.is_suspect(trial) else trial.resources
        return r.TrialExplanation(
            tuple(lines),
            dict(request) if waits else {},
            tuple(trial.decisions),
            trial.decisions_before,
        )

    def _reasons(self, trial: Trial) -> Iterator[str]:
        runner, name = self._loop.runner, trial.trial_id
        if trial.waits[0]:
            yield f"trial {name} waits for {awaited(trial.waits[0])}: {trial.waits[1]}"
        if trial.status == RUNNING:
            yield f"trial {name} runs, on {self._node_of(self._of(name)) or 'a node'}"
            if trial.ending:
                yield f"it is to end ({trial.ending}), and its code has not returned yet"
            return
        if trial.status != PENDING:
            yield f"trial {name} is PAUSED, until its trial scheduler lets it continue"
            return
        if trial.not_before > runner.elapsed:
            left = trial.not_before - runner.elapsed
            yield f"trial {name} failed, and is tried again in {left:.0f} s"
            return
        if runner.is_at_limit:
            limit = runner.settings.max_concurrent
            yield f"trial {name} waits: {limit} trials run (max_concurrent_trials={limit})"
            return
        yield f"trial {name} waits for a place: {trial.resources}"
        if trial.excluded:
            nodes = ", ".join(trial.excluded)
            yield f"it is not placed on {nodes} any more, for what it printed there (log policies)"
            if runner.shuns_all(trial):
                yield "no other node of today could hold it"
        elif runner.kept_from(trial):
            yield (
                f"it failed {FAILURES_ON_A_NODE} times in a row on {trial.unlucky_on}, "
                f"and waits up to {ELSEWHERE_S:g} s for another node"
            )
        why = runner.placement.why_never(trial.resources)
        if why:
            yield f"no node of today could hold it: {why}"


def _span_s(due: Collection[float], now: float) -> str:
    """Return in how many seconds the first and the last of these are due."""
    first, last = (f"{max(0.0, at - now):.0f}" for at in (min(due), max(due)))
    return f"{first} s" if first == last else f"{first} to {last} s"


def _encoded(answer: RequestDone | ExperimentDetail | r.TrialExplanation) -> bytes:
    """Encode an answer.

    Raises:
        RequestRejected: it cannot be sent.
    """
    try:
        data = _encode(answer)
    except _UNTELLABLE as error:
        raise RequestRejected(f"the answer cannot be sent: {error}.") from error
    if len(data) > r.ANSWER_BYTES:
        raise RequestRejected(
            f"the answer has {len(data)} bytes; {r.ANSWER_BYTES} can be sent: ask for fewer trials."
        )
    return data


def _told_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration for people; empty if it cannot be sent."""
    try:
        plain: dict[str, Any] = to_plain(config)
        return plain if len(_encode(plain)) <= _CONFIG_BYTES else {}
    except Exception:  # noqa: BLE001  only not shown; a repr of the user's may raise
        return {}
