"""`FarmApi`: answers users' requests from a farm's queue, running experiments, and nodes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from tunemq_scheduler.api import farm_answer_types as a
from tunemq_scheduler.api.farm_answer_types import ExperimentState as State
from tunemq_scheduler.farm.common.unknown_names import unknown_name
from tunemq_scheduler.farm.ipc.ipc_messages import RETRY_ALL
from tunemq_scheduler.farm.service.deferred_answer import DeferredAnswer, MaybeLater
from tunemq_scheduler.farm.service.experiment_queue import ExperimentQueue, check_name
from tunemq_scheduler.farm.service.farm_nodes import FarmNodes
from tunemq_scheduler.farm.service.log_pages import read_page
from tunemq_scheduler.farm.service.queue_entry import QueueEntry
from tunemq_scheduler.farm.service.requested_environment import check_settings
from tunemq_scheduler.farm.service.running_experiments import RunningExperiments
from tunemq_shared.base.errors import ConfigError, JournalFull, RequestRejected
from tunemq_shared.base.failure_text import shortened
from tunemq_shared.protocol import farm_requests as r

#: The most rows of trials in one answer.
_MOST_TRIALS: Final = 1000
#: How long a removal of files may take before its answer says that it is not done.
_REMOVED_WITHIN_S: Final = 20.0
#: How long after the end of a search its nodes may upload: longer than the usual `sync_timeout`.
_UPLOADED_WITHIN_S: Final = 86_400.0
#: The most experiments of one owner, ended ones included: all are kept in memory.
_MOST_OF_OWNER: Final = 10_000
#: The most characters of all reasons in a list, and those of one that may always be there.
_REASONS_IN_LISTS: Final = 4 * 2**20
_REASON_IN_LISTS: Final = 500
#: The longest description of an experiment: its code's address and the environment.
_SUBMISSION_BYTES: Final = 32 * 2**10
#: The most nodes without a store connection to name.
_MOST_TROUBLES: Final = 3


class RequestCaller(NamedTuple):
    """The sender of a request, proved if the farm has keys, and the request's unique key."""

    owner: str
    request: str


class _Removal(NamedTuple):
    """A removal of an experiment's files: of those in the store, its answer, and when that is due.

    The experiment stays in the queue until all are removed.
    """

    stored: Future[str]
    answer: DeferredAnswer[a.RequestDone]
    until: float


class FarmApi:
    """Has a method for each kind of request; the thread of the scheduler's loop calls them.

    A method stores its change in the queue before it returns; the supervisor then starts waiting
    experiments. It returns its answer, or a `DeferredAnswer` if an experiment's process must answer
    first. The server sends exceptions to the client: a `UserError` as wrong use, any other
    `TuneError` as a rejection.

    A request is handled once. It is handled again only if the scheduler died between a change and
    the record of it. So repeating a change must not be an error, and `RequestCaller.request`
    identifies what a submission has queued.

    Args:
        queue: all experiments.
        experiments: the running experiments.
        nodes: the farm's nodes.
        results: the folder of all experiments; a name with a folder there is taken.
        farm: the farm's description for submitters.
    """

    def __init__(
        self,
        queue: ExperimentQueue,
        experiments: RunningExperiments,
        nodes: FarmNodes,
        results: Path,
        farm: a.FarmDescription,
    ) -> None:
        self._queue, self._experiments, self._nodes = queue, experiments, nodes
        self._results, self._farm = results, farm
        self._removals: dict[str, _Removal] = {}
        self._explanations: list[tuple[Future[a.Explanation], DeferredAnswer[a.Explanation]]] = []
        #: The method for each kind of request.
        self.methods: dict[type[r.FarmRequest], Callable[[Any, RequestCaller], MaybeLater[Any]]] = {
            r.SubmitExperiment: self.submit,
            r.ListExperiments: self.list_experiments,
            r.ShowExperiment: self.show,
            r.ReadLog: self.read_log,
            r.StopExperiment: self.stop,
            r.PauseExperiment: self.pause,
            r.ResumeExperiment: self.resume,
            r.RetryTrials: self.retry,
            r.RemoveExperiment: self.remove,
            r.ExplainState: self.why,
            r.DescribeFarm: self.describe_farm,
            r.ListNodes: self.list_nodes,
            r.DrainNode: self.drain,
            r.ResumeNode: self.resume_node,
            r.RetireNode: self.retire,
        }

    # --- experiments ------------------------------------------------------------------------------

    def submit(self, request: r.SubmitExperiment, caller: RequestCaller) -> a.ExperimentSubmitted:
        """Queue an experiment; a repeated request returns the same one."""
        entry = self._queue.submitted_by(caller.request)
        if entry is None:
            check_settings(request.settings)
            self._check_size(request, caller.owner)
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

    def _check_size(self, request: r.SubmitExperiment, owner: str) -> None:
        size = len(msgspec.msgpack.encode(request))
        if size > _SUBMISSION_BYTES:
            raise ConfigError(
                f"the settings of {request.name} have {size:,} bytes, and {_SUBMISSION_BYTES:,} are"
                " possible; read long values from a file instead of settings.variables."
            )
        if sum(entry.owner == owner for entry in self._queue.all()) >= _MOST_OF_OWNER:
            raise ConfigError(
                f"{owner} has {_MOST_OF_OWNER:,} experiments in this farm, which is the limit;"
                " remove ended ones first: tunemq rm NAME keeps their files."
            )

    def list_experiments(
        self, request: r.ListExperiments, _caller: RequestCaller
    ) -> a.ExperimentList:
        """Return running experiments, then waiting ones in order, then finished ones."""
        active = self._queue.in_state(State.RUNNING, State.STOPPING, State.PAUSED)
        entries = [*sorted(active, key=lambda entry: entry.turn), *self._queue.waiting()]
        if request.is_all:
            over = self._queue.in_state(State.FINISHED, State.STOPPED, State.FAILED)
            entries += sorted(over, key=lambda entry: -(entry.ended or 0))
        shown = [
            entry
            for entry in entries
            if not request.owner or entry.owner == request.owner or entry.is_damaged
        ]
        longest = max(_REASON_IN_LISTS, _REASONS_IN_LISTS // max(1, len(shown)))
        return a.ExperimentList(experiments=tuple(self._row(one, longest) for one in shown))

    def show(
        self, request: r.ShowExperiment, _caller: RequestCaller
    ) -> MaybeLater[a.ExperimentDetail]:
        """Return an experiment's row, and details from its process."""
        asked = self._entry(request.name, request.id)
        name, trials = asked.name, max(0, min(request.trials, _MOST_TRIALS))
        found = self._experiments.detail(name, trials, self._row(asked))

        def with_row(detail: a.ExperimentDetail) -> a.ExperimentDetail:
            entry = self._entry(name)
            folder = detail.folder or str(self._results / name)
            return msgspec.structs.replace(detail, experiment=self._row(entry), folder=folder)

        if isinstance(found, DeferredAnswer):
            return found.then(with_row)
        return with_row(found)

    def read_log(self, request: r.ReadLog, _caller: RequestCaller) -> a.LogPage:
        """Return a page of a log file."""
        entry = self._entry(request.name, request.id)
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

    def stop(self, request: r.StopExperiment, caller: RequestCaller) -> MaybeLater[a.RequestDone]:
        """Stop a running experiment or trial; a waiting experiment stops at once."""
        entry = self._entry(request.name, request.id)
        reason = f"stopped by {caller.owner}"
        if request.trial:
            if not self._experiments.has(entry.name):
                raise RequestRejected(
                    f"experiment {entry.name} is {entry.state}, so none of its trials can be"
                    " stopped."
                )
            return self._experiments.stop_trial(entry.name, request.trial, reason)
        if entry.state is State.STOPPING and self._experiments.has(entry.name):
            return _done(entry, f"is STOPPING already; {self._experiments.stop_again(entry.name)}")
        if entry.state is State.STOPPING or entry.is_over:
            return _done(entry, f"is {entry.state} already")
        if self._experiments.has(entry.name):
            entry = self._queue.move(entry.name, State.STOPPING, reason, may_wait=True)
            self._experiments.stop(entry.name, reason)
            what = "is being stopped; its trials save first"
            if trouble := self._experiments.trouble(entry.name):
                what += f". But {trouble.rstrip('.')}"
        else:
            entry = self._queue.move(entry.name, State.STOPPED, reason, may_wait=True)
            what = "is stopped"
        if unsaved := self._queue.unsaved(entry.name):
            what += f". If the scheduler ends before it can record this, stop it again: {unsaved}"
        return _done(entry, what)

    def pause(self, request: r.PauseExperiment, caller: RequestCaller) -> a.RequestDone:
        """Take an experiment's slots or its place in the queue."""
        entry = self._entry(request.name, request.id)
        if entry.state is State.PAUSED:
            return _done(entry, "is PAUSED already")
        self._may(entry, State.PAUSED, "paused")
        reason = f"paused by {caller.owner}"
        entry = self._queue.move(entry.name, State.PAUSED, reason)
        if not self._experiments.has(entry.name):
            return _done(entry, "is paused")
        self._experiments.pause(entry.name, reason)
        return _done(entry, "is paused; its trials free their slots at their next checkpoints")

    def resume(self, request: r.ResumeExperiment, caller: RequestCaller) -> a.RequestDone:
        """Give an experiment slots or a place in the queue again."""
        entry = self._entry(request.name, request.id)
        reason = f"resumed by {caller.owner}"
        if entry.state in {State.RUNNING, State.QUEUED}:
            return _done(entry, f"is {entry.state} already")
        if entry.state is State.PAUSED and self._experiments.has(entry.name):
            entry = self._queue.move(entry.name, State.RUNNING, reason)
            self._experiments.resume(entry.name)
            return _done(entry, "continues")
        self._may(entry, State.QUEUED, "resumed")
        return self._queue_again(entry, reason, stay="trials")

    def retry(self, request: r.RetryTrials, caller: RequestCaller) -> MaybeLater[a.RequestDone]:
        """Continue trials in state ERROR now, or in another run of a finished experiment."""
        entry = self._entry(request.name)
        trial = request.trial or RETRY_ALL
        if self._experiments.has(entry.name) and entry.state is not State.STOPPING:
            return self._experiments.retry(entry.name, trial)
        if entry.state is State.QUEUED:
            raise RequestRejected(f"experiment {entry.name} waits; no trial of it is in ERROR.")
        self._may(entry, State.QUEUED, "retried")
        if request.trial:
            self._experiments.log(entry.name, request.trial)  # raises if there is no such trial
        reason = f"retried by {caller.owner}"
        stay = "other trials" if request.trial else "trials"
        return self._queue_again(entry, reason, retry=trial, stay=stay)

    def remove(
        self, request: r.RemoveExperiment, _caller: RequestCaller
    ) -> MaybeLater[a.RequestDone]:
        """Forget a finished experiment."""
        entry = self._entry(request.name)
        if not entry.is_over or self._experiments.has(entry.name):
            raise RequestRejected(
                f"experiment {entry.name} is {entry.state}; stop it first: tunemq stop {entry.name}"
            )
        if request.with_files:
            return self._remove_files(entry.name)
        self._queue.remove(entry.name)
        self._experiments.forget(entry.name)
        text = f"{entry.name} is removed; its files remain"
        if (removal := self._removals.pop(entry.name, None)) is not None:
            removal.answer.reject(text)
        return a.RequestDone(text=text)

    def _remove_files(self, name: str) -> DeferredAnswer[a.RequestDone]:
        """Remove an experiment once its store has nothing of it; until then it can be repeated."""
        known = self._removals.get(name)
        if known is not None and known.answer.outcome is None:
            return known.answer
        stored = self._experiments.remove_files(name) if known is None else known.stored
        removal = _Removal(stored, DeferredAnswer(), time.monotonic() + _REMOVED_WITHIN_S)
        self._removals[name] = removal
        self.turn()
        return removal.answer

    def turn(self) -> None:
        """Answer those who wait for the removal of files, or for an explanation."""
        for told, answer in [one for one in self._explanations if one[0].done()]:
            self._explanations.remove((told, answer))
            if (problem := told.exception()) is None:
                answer.resolve(told.result())
            else:
                answer.reject(str(problem), is_wrong_use=isinstance(problem, ConfigError))
        for name, one in list(self._removals.items()):
            repeat = (
                f"Repeat the command: tunemq rm --files {name}; or keep the rest: tunemq rm {name}"
            )
            if not one.stored.done():
                if time.monotonic() > one.until:
                    one.answer.reject(
                        f"the files of {name} in the store are still being removed. {repeat}"
                    )
                continue
            del self._removals[name]
            if (error := one.stored.exception()) is not None:
                reason = str(error).rstrip(".")
                one.answer.reject(f"the results of {name} are removed, but {reason}. {repeat}")
                continue
            entry = self._queue.get(name)
            ended = (entry.ended if entry is not None else None) or 0.0
            try:
                self._queue.remove(name)
            except JournalFull as full:
                one.answer.reject(f"the files of {name} are removed, but {full} {repeat}")
                continue
            self._experiments.forget(name)
            text = f"{name} is removed with its results and checkpoints"
            if (place := one.stored.result()) and time.time() < ended + _UPLOADED_WITHIN_S:
                text += f"; if a node still uploads files of its trials, they stay in {place}"
            one.answer.resolve(a.RequestDone(text=text))

    def why(self, request: r.ExplainState, _caller: RequestCaller) -> MaybeLater[a.Explanation]:
        """Ask the experiment's process; without one, answer from the queue."""
        entry = self._entry(request.name)
        if self._experiments.has(entry.name):
            found = self._experiments.why(entry.name, request.trial)
            troubles = tuple(islice(self._nodes.troubles(), _MOST_TROUBLES))

            def with_troubles(why: a.Explanation) -> a.Explanation:
                return msgspec.structs.replace(why, lines=(*why.lines, *troubles))

            if isinstance(found, DeferredAnswer):
                return found.then(with_troubles)
            return with_troubles(found)
        lines = [f"{entry.name} is {entry.state}" + (f": {entry.reason}" if entry.reason else "")]
        if request.trial:
            return self._why_trial(entry.name, request.trial, lines[0])
        if entry.state is State.QUEUED:
            ahead = self._queue.ahead_of(entry)
            lines.append(f"{ahead or 'no'} experiment{'' if ahead == 1 else 's'} before it wait")
            if places := self._experiments.places():
                lines.append(places)
        return a.Explanation(lines=tuple(lines))

    def _why_trial(self, name: str, trial: str, state: str) -> MaybeLater[a.Explanation]:
        """Explain a trial of an experiment without a process by its journal, if it has one."""
        told = self._experiments.explain_ended(name, trial)
        if told is None:
            self._experiments.log(name, trial)  # raises if there is no such trial
            return a.Explanation(lines=(state,))
        answer: DeferredAnswer[a.Explanation] = DeferredAnswer()
        self._explanations.append((told, answer))
        return answer.then(lambda why: msgspec.structs.replace(why, lines=(state, *why.lines)))

    def describe_farm(self, _request: r.DescribeFarm, _caller: RequestCaller) -> a.FarmDescription:
        """Return the farm's description."""
        return self._farm

    # --- nodes ------------------------------------------------------------------------------------

    def list_nodes(self, _request: r.ListNodes, _caller: RequestCaller) -> a.NodeList:
        """Return all nodes."""
        return a.NodeList(
            nodes=self._nodes.rows(),
            rejected=self._nodes.rejected(),
            stores=self._experiments.store_troubles(),
        )

    def drain(self, request: r.DrainNode, caller: RequestCaller) -> a.RequestDone:
        """Drain a node."""
        instance_id = self._node(request.node)
        return a.RequestDone(text=self._nodes.drain(instance_id, f"drained by {caller.owner}"))

    def resume_node(self, request: r.ResumeNode, _caller: RequestCaller) -> a.RequestDone:
        """Use a drained node again."""
        return a.RequestDone(text=self._nodes.resume(self._node(request.node, self._nodes.asked())))

    def retire(self, request: r.RetireNode, caller: RequestCaller) -> a.RequestDone:
        """Retire a node."""
        instance_id = self._node(request.node)
        return a.RequestDone(text=self._nodes.retire(instance_id, f"retired by {caller.owner}"))

    # --- what they share --------------------------------------------------------------------------

    def _row(self, entry: QueueEntry, longest: int = sys.maxsize) -> a.ExperimentRow:
        trials, total = self._experiments.counts(entry)
        return a.ExperimentRow(
            name=entry.name,
            id=entry.id,
            owner=entry.owner,
            priority=entry.priority,
            state=entry.state,
            reason=shortened(entry.reason, longest),
            trouble=shortened(self._experiments.trouble(entry.name), longest),
            submitted=entry.submitted,
            started=entry.started,
            ended=entry.ended,
            trials=trials,
            total=total,
            position=self._queue.ahead_of(entry) if entry.state is State.QUEUED else None,
        )

    def _entry(self, name: str, identity: str = "") -> QueueEntry:
        entry = self._queue.get(name)
        if entry is None:
            raise unknown_name("experiment", name, (one.name for one in self._queue.all()))
        if identity not in {"", entry.id} and not entry.is_damaged:
            raise ConfigError(
                f"the farm no longer has this experiment {name}: it was removed, and {entry.owner} "
                f"submitted another one under its name. See that one with: tunemq show {name}."
            )
        return entry

    def _node(self, name: str, others: Collection[str] = ()) -> str:
        """Return the instance that a node's name, or an instance id, refers to.

        Of several nodes with one name, it is the newest that is not silent. Names among ``others``
        need no node.
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
                f"the folder {self._results / request.name} belongs to an experiment that this "
                "farm does not know; choose another --name, or move that folder away."
            )
        fix = (
            f", continue with it (tunemq resume {entry.name}), or remove it"
            if entry.is_over
            else ""
        )
        raise ConfigError(
            f"the experiment {entry.name} exists already, and is {entry.state}; choose another "
            f"--name{fix}."
        )

    def _is_taken(self, name: str) -> bool:
        return self._queue.get(name) is not None or (self._results / name).exists()

    def _may(self, entry: QueueEntry, state: State, done: str) -> None:
        if entry.name in self._removals:
            raise RequestRejected(f"experiment {entry.name} is being removed.")
        if not self._queue.may(entry, state):
            why = f": {entry.reason}" if entry.is_damaged else "."
            raise RequestRejected(
                f"experiment {entry.name} is {entry.state} and cannot be {done}{why}"
            )

    def _queue_again(
        self, entry: QueueEntry, reason: str, *, stay: str, retry: str = ""
    ) -> a.RequestDone:
        """Queue an ended experiment; of a stopped one, say which trials (``stay``) stay ended."""
        was_stopped = entry.state is State.STOPPED
        done = self._queued(self._queue.move(entry.name, State.QUEUED, reason, retry=retry))
        if not was_stopped:
            return done
        text = f"{done.text}; {stay} that the stop ended stay ended"
        return msgspec.structs.replace(done, text=text)

    def _queued(self, entry: QueueEntry) -> a.RequestDone:
        ahead = self._queue.ahead_of(entry)
        behind = f", behind {ahead} other{'s' if ahead > 1 else ''}" if ahead else ""
        return _done(entry, f"is queued again{behind}")


def _done(entry: QueueEntry, what: str) -> a.RequestDone:
    return a.RequestDone(text=f"{entry.name} {what}", state=entry.state)
