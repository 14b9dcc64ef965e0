"""Answers users' requests from a farm's queue, its running experiments, and its nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import msgspec

from tunemq_scheduler.api import farm_answers as a
from tunemq_scheduler.api.farm_answers import ExperimentState as State
from tunemq_scheduler.farm.common.unknown_names import unknown_name
from tunemq_scheduler.farm.service.environment_check import check_settings
from tunemq_scheduler.farm.service.experiment_queue import ExperimentQueue, check_name
from tunemq_scheduler.farm.service.log_pages import read_page
from tunemq_scheduler.farm.service.queue_entry import RETRY_ALL, QueueEntry
from tunemq_scheduler.farm.service.request_handler import DeferredAnswer, RequestCaller
from tunemq_shared.base.errors import ConfigError, RequestRejected
from tunemq_shared.protocol import farm_requests as r

#: So many rows of trials are in one answer at most.
_MOST_TRIALS: Final = 1000
#: So many nodes are named that get no answer from a store.
_MOST_TROUBLES: Final = 3


class TrialCounts(NamedTuple):
    """How many trials an experiment has in each state, and in all; None where that is open."""

    trials: dict[str, int]
    total: int | None


class ExperimentControl(Protocol):
    """The experiments that have a process, as the supervisor knows them; by name."""

    def has(self, name: str) -> bool:
        """Whether it has a process now."""

    def counts(self, name: str) -> TrialCounts | None:
        """What its process said last; of one without a process, what is known from before."""

    def trouble(self, name: str) -> str:
        """Why it has no process that has begun, where one has failed before; else empty."""

    def detail(
        self, name: str, trials: int
    ) -> a.ExperimentDetail | DeferredAnswer[a.ExperimentDetail] | None:
        """All about it but ``experiment``, which is overwritten; None where nobody knows."""

    def stop(self, name: str, reason: str) -> None:
        """Have it stop; its state is STOPPING, and is another one when it has."""

    def pause(self, name: str, reason: str) -> None:
        """Have it give its slots back; its state is PAUSED."""

    def resume(self, name: str) -> None:
        """Let it have slots again; its state is RUNNING."""

    def stop_trial(
        self, name: str, trial: str, reason: str
    ) -> a.RequestDone | DeferredAnswer[a.RequestDone]:
        """Stop one trial."""

    def retry(self, name: str, trial: str) -> a.RequestDone | DeferredAnswer[a.RequestDone]:
        """Have a trial in ERROR go on; `RETRY_ALL` for all of them."""

    def why(self, name: str, trial: str) -> a.Explanation | DeferredAnswer[a.Explanation]:
        """Why a trial waits, or ended; without one, why the experiment has not all it wants."""

    def log(self, name: str, trial: str) -> Path | None:
        """Where a log of it is, whether or not it has a process; None if there is none yet.

        Raises:
            ConfigError: it has no such trial.
        """

    def store_troubles(self) -> tuple[a.StoreTroubleRow, ...]:
        """Which processes of the scheduler an object store fails now."""

    def forget(self, name: str, *, with_files: bool) -> None:
        """It was removed; remove its results and checkpoints, too, where that is wanted."""


class NodeControl(Protocol):
    """The nodes as the supervisor knows them."""

    def troubles(self) -> Iterator[str]:
        """Which nodes are set aside, or get no answer from an object store, in lines for people."""

    def rows(self) -> tuple[a.NodeRow, ...]:
        """One for each, those that left a short while ago too."""

    def rejected(self) -> tuple[a.RejectionRow, ...]:
        """What the scheduler and its nodes did not believe."""

    def asked(self) -> Collection[str]:
        """The names of the nodes that are to get nothing, there or not."""

    def drain(self, instance_id: str, reason: str) -> str:
        """Place nothing new there, have what runs go elsewhere; what happens now, in words."""

    def resume(self, instance_id: str) -> str:
        """Place trials there again; what happens now, in words.

        Args:
            instance: or a name that was `asked`, where there is no such node now.
        """

    def retire(self, instance_id: str, reason: str) -> str:
        """Drain it and have it end; what happens now, in words."""


class FarmApi:
    """A `RequestHandler`.

    What it changes is in the queue when a method returns; the supervisor starts what waits there.

    Args:
        results: the folder of all experiments: what has a folder there has its name.
        farm: what submitters need to know.
    """

    def __init__(
        self,
        queue: ExperimentQueue,
        experiments: ExperimentControl,
        nodes: NodeControl,
        results: Path,
        farm: a.FarmDescription,
    ) -> None:
        self._queue, self._experiments, self._nodes = queue, experiments, nodes
        self._results, self._farm = results, farm

    # --- experiments ------------------------------------------------------------------------------

    def submit(self, request: r.SubmitExperiment, caller: RequestCaller) -> a.ExperimentSubmitted:
        """Queue it."""
        entry = self._queue.submitted_by(caller.request)
        if entry is None:
            check_settings(request.settings)
            entry = self._queue.add(
                self._free_name(request),
                owner=caller.owner,
                code=request.code,
                priority=request.priority,
                settings=request.settings,
                request=caller.request,
            )
        return a.ExperimentSubmitted(
            name=entry.name, id=entry.id, ahead=self._queue.ahead_of(entry)
        )

    def list_experiments(
        self, request: r.ListExperiments, caller: RequestCaller
    ) -> a.ExperimentList:
        """Those that run, those that wait in their order, those that are over: the newest first."""
        del caller
        active = self._queue.in_state(State.RUNNING, State.STOPPING, State.PAUSED)
        entries = [*sorted(active, key=lambda entry: entry.turn), *self._queue.waiting()]
        if request.is_all:
            over = self._queue.in_state(State.FINISHED, State.STOPPED, State.FAILED)
            entries += sorted(over, key=lambda entry: -(entry.ended or 0))
        return a.ExperimentList(
            experiments=tuple(
                self._row(entry)
                for entry in entries
                if not request.owner or entry.owner == request.owner
            )
        )

    def show(
        self, request: r.ShowExperiment, caller: RequestCaller
    ) -> a.ExperimentDetail | DeferredAnswer[a.ExperimentDetail]:
        """Its row here, and what its process knows."""
        del caller
        name = self._entry(request.name).name
        found = self._experiments.detail(name, max(0, min(request.trials, _MOST_TRIALS)))

        def with_row(detail: a.ExperimentDetail) -> a.ExperimentDetail:
            entry = self._entry(name)
            folder = detail.folder or str(self._results / name)
            return msgspec.structs.replace(detail, experiment=self._row(entry), folder=folder)

        if isinstance(found, DeferredAnswer):
            return found.then(with_row)
        return with_row(found or a.ExperimentDetail(experiment=self._row(self._entry(name))))

    def read_log(self, request: r.ReadLog, caller: RequestCaller) -> a.LogPage:
        """From the file."""
        del caller
        entry = self._entry(request.name)
        path = self._experiments.log(entry.name, request.trial)
        page = read_page(path, request.offset, request.limit)
        return a.LogPage(
            data=page.data,
            offset=page.offset,
            end=page.end,
            size=page.size,
            is_over=entry.is_over,
            state=entry.state,
            reason=entry.reason,
        )

    def stop(
        self, request: r.StopExperiment, caller: RequestCaller
    ) -> a.RequestDone | DeferredAnswer[a.RequestDone]:
        """Begin to stop what runs; what waits is stopped at once."""
        entry = self._entry(request.name)
        reason = f"stopped by {caller.owner}"
        if request.trial:
            self._needs_process(entry, "so none of its trials can be stopped")
            return self._experiments.stop_trial(entry.name, request.trial, reason)
        if entry.state is State.STOPPING or entry.is_over:
            return _done(entry, f"is {entry.state} already")
        if self._experiments.has(entry.name):
            entry = self._queue.move(entry.name, State.STOPPING, reason, may_wait=True)
            self._experiments.stop(entry.name, reason)
            what = "is being stopped; what its trials have is saved first"
            if trouble := self._experiments.trouble(entry.name):
                what += f". But {trouble.rstrip('.')}"
        else:
            entry = self._queue.move(entry.name, State.STOPPED, reason, may_wait=True)
            what = "is stopped"
        if unsaved := self._queue.unsaved(entry.name):
            what += (
                f". If the scheduler ends before it can write this down, stop it again: {unsaved}"
            )
        return _done(entry, what)

    def pause(self, request: r.PauseExperiment, caller: RequestCaller) -> a.RequestDone:
        """Take its slots from it, or its place in the queue."""
        entry = self._entry(request.name)
        if entry.state is State.PAUSED:
            return _done(entry, "is PAUSED already")
        self._may(entry, State.PAUSED, "paused")
        reason = f"paused by {caller.owner}"
        entry = self._queue.move(entry.name, State.PAUSED, reason)
        if not self._experiments.has(entry.name):
            return _done(entry, "is paused")
        self._experiments.pause(entry.name, reason)
        return _done(entry, "is paused; its trials give their slots back at their next checkpoints")

    def resume(self, request: r.ResumeExperiment, caller: RequestCaller) -> a.RequestDone:
        """Give it slots again, or a place in the queue."""
        entry = self._entry(request.name)
        reason = f"resumed by {caller.owner}"
        if entry.state in {State.RUNNING, State.QUEUED}:
            return _done(entry, f"is {entry.state} already")
        if entry.state is State.PAUSED and self._experiments.has(entry.name):
            entry = self._queue.move(entry.name, State.RUNNING, reason)
            self._experiments.resume(entry.name)
            return _done(entry, "goes on")
        self._may(entry, State.QUEUED, "resumed")
        return self._queued(self._queue.move(entry.name, State.QUEUED, reason))

    def retry(
        self, request: r.RetryTrials, caller: RequestCaller
    ) -> a.RequestDone | DeferredAnswer[a.RequestDone]:
        """Have trials in ERROR go on now, or in a further run of what is over."""
        entry = self._entry(request.name)
        trial = request.trial or RETRY_ALL
        if self._experiments.has(entry.name) and entry.state is not State.STOPPING:
            return self._experiments.retry(entry.name, trial)
        if entry.state is State.QUEUED:
            raise RequestRejected(f"experiment {entry.name} waits; no trial of it is in ERROR.")
        self._may(entry, State.QUEUED, "retried")
        if request.trial:
            self._experiments.log(entry.name, request.trial)  # knows whether there is such a trial
        reason = f"retried by {caller.owner}"
        return self._queued(self._queue.move(entry.name, State.QUEUED, reason, retry=trial))

    def remove(self, request: r.RemoveExperiment, caller: RequestCaller) -> a.RequestDone:
        """Forget what is over."""
        del caller
        entry = self._entry(request.name)
        if not entry.is_over or self._experiments.has(entry.name):
            raise RequestRejected(
                f"experiment {entry.name} is {entry.state}; stop it first: tunemq stop {entry.name}"
            )
        self._queue.remove(entry.name)
        self._experiments.forget(entry.name, with_files=request.with_files)
        what = "with its results and checkpoints" if request.with_files else "; its files are left"
        return a.RequestDone(text=f"{entry.name} is removed{'' if what[0] == ';' else ' '}{what}")

    def why(
        self, request: r.ExplainState, caller: RequestCaller
    ) -> a.Explanation | DeferredAnswer[a.Explanation]:
        """From its process; without one, from the queue."""
        del caller
        entry = self._entry(request.name)
        if self._experiments.has(entry.name):
            found = self._experiments.why(entry.name, request.trial)
            troubles = tuple(islice(self._nodes.troubles(), _MOST_TROUBLES))

            def with_troubles(why: a.Explanation) -> a.Explanation:
                return msgspec.structs.replace(why, lines=(*why.lines, *troubles))

            return (
                found.then(with_troubles)
                if isinstance(found, DeferredAnswer)
                else with_troubles(found)
            )
        if request.trial:
            self._experiments.log(entry.name, request.trial)
        lines = [f"{entry.name} is {entry.state}" + (f": {entry.reason}" if entry.reason else "")]
        if entry.state is State.QUEUED:
            ahead = self._queue.ahead_of(entry)
            lines.append(f"{ahead or 'no'} experiment{'' if ahead == 1 else 's'} before it wait")
        return a.Explanation(lines=tuple(lines))

    def describe_farm(self, request: r.DescribeFarm, caller: RequestCaller) -> a.FarmDescription:
        """As it was started."""
        del request, caller
        return self._farm

    # --- nodes ------------------------------------------------------------------------------------

    def list_nodes(self, request: r.ListNodes, caller: RequestCaller) -> a.NodeList:
        """All of them."""
        del request, caller
        return a.NodeList(
            nodes=self._nodes.rows(),
            rejected=self._nodes.rejected(),
            stores=self._experiments.store_troubles(),
        )

    def drain(self, request: r.DrainNode, caller: RequestCaller) -> a.RequestDone:
        """Drain it."""
        instance_id = self._node(request.node)
        return a.RequestDone(text=self._nodes.drain(instance_id, f"drained by {caller.owner}"))

    def resume_node(self, request: r.ResumeNode, caller: RequestCaller) -> a.RequestDone:
        """Use it again."""
        del caller
        return a.RequestDone(text=self._nodes.resume(self._node(request.node, self._nodes.asked())))

    def retire(self, request: r.RetireNode, caller: RequestCaller) -> a.RequestDone:
        """Retire it."""
        instance_id = self._node(request.node)
        return a.RequestDone(text=self._nodes.retire(instance_id, f"retired by {caller.owner}"))

    # --- what they share --------------------------------------------------------------------------

    def _row(self, entry: QueueEntry) -> a.ExperimentRow:
        counts = self._experiments.counts(entry.name)
        return a.ExperimentRow(
            name=entry.name,
            id=entry.id,
            owner=entry.owner,
            priority=entry.priority,
            state=entry.state,
            reason=entry.reason,
            trouble=self._experiments.trouble(entry.name),
            submitted=entry.submitted,
            started=entry.started,
            ended=entry.ended,
            trials={} if counts is None else counts.trials,
            total=None if counts is None else counts.total,
            position=self._queue.ahead_of(entry) if entry.state is State.QUEUED else None,
        )

    def _entry(self, name: str) -> QueueEntry:
        entry = self._queue.get(name)
        if entry is None:
            raise unknown_name("experiment", name, (one.name for one in self._queue.all()))
        return entry

    def _node(self, name: str, others: Collection[str] = ()) -> str:
        """The instance of a node that is meant by its name, or by the instance's.

        Of several of one name it is the newest that is heard. Names among ``others`` need no node.
        """
        rows = self._nodes.rows()
        if any(name == row.instance_id for row in rows):
            return name
        there = [row for row in rows if row.state != "gone"]
        if named := [row for row in there if name == row.node]:
            return max(named, key=lambda row: (row.state != "silent", row.since)).instance_id
        if name in others:
            return name
        raise unknown_name("node", name, (*(row.node for row in there), *others))

    def _free_name(self, request: r.SubmitExperiment) -> str:
        check_name(request.name)
        if not self._is_taken(request.name):
            return request.name
        if request.is_made_up:
            number = 2
            while self._is_taken(f"{request.name}_{number}"):
                number += 1
            return f"{request.name}_{number}"
        entry = self._queue.get(request.name)
        if entry is None:
            raise ConfigError(
                f"there is a folder {self._results / request.name} of an experiment that this farm"
                " does not know; give this one another --name, or move that away."
            )
        fix = f", go on with it (tunemq resume {entry.name}), or remove it" if entry.is_over else ""
        raise ConfigError(
            f"there is an experiment {entry.name}, which is {entry.state}; give this one another"
            f" --name{fix}."
        )

    def _is_taken(self, name: str) -> bool:
        return self._queue.get(name) is not None or (self._results / name).exists()

    def _may(self, entry: QueueEntry, state: State, done: str) -> None:
        if not self._queue.may(entry, state):
            raise RequestRejected(f"experiment {entry.name} is {entry.state} and cannot be {done}.")

    def _needs_process(self, entry: QueueEntry, so: str) -> None:
        if not self._experiments.has(entry.name):
            raise RequestRejected(f"experiment {entry.name} is {entry.state}, {so}.")

    def _queued(self, entry: QueueEntry) -> a.RequestDone:
        ahead = self._queue.ahead_of(entry)
        behind = f", behind {ahead} other{'s' if ahead > 1 else ''}" if ahead else ""
        return _done(entry, f"is queued again{behind}")


def _done(entry: QueueEntry, what: str) -> a.RequestDone:
    return a.RequestDone(text=f"{entry.name} {what}", state=entry.state)
