"""`RunningExperiments`: starts, watches and ends the processes of a farm's experiments."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Final

import msgspec

from tunemq_scheduler.api import farm_answer_types as a
from tunemq_scheduler.api.farm_answer_types import ExperimentState as State
from tunemq_scheduler.core.shared_amounts import WHOLE_NODE, OfferUsage
from tunemq_scheduler.farm.allocation.fair_share_allocator import FairShareAllocator
from tunemq_scheduler.farm.allocation.overdue_slots import OVERDUE_S
from tunemq_scheduler.farm.common.last_reports import RunDetails
from tunemq_scheduler.farm.common.scheduler_exit_codes import EXIT_AGAIN, may_pass
from tunemq_scheduler.farm.ipc import ipc_messages as r
from tunemq_scheduler.farm.ipc.experiment_run import ExperimentRun, in_words
from tunemq_scheduler.farm.ipc.supervisor_side import (
    ExperimentConnection,
    ExperimentExit,
    ExperimentOutcome,
)
from tunemq_scheduler.farm.output.event_stream_registry import EventStreams
from tunemq_scheduler.farm.service.deferred_answer import DeferredAnswer, MaybeLater, ask_process
from tunemq_scheduler.farm.service.experiment_files import ResultsFolders
from tunemq_scheduler.farm.service.experiment_queue import ExperimentQueue
from tunemq_scheduler.farm.service.queue_entry import QueueEntry
from tunemq_scheduler.results.explained_trial import explain_decisions
from tunemq_shared.base.backoff import backoff_s
from tunemq_shared.base.errors import ConfigError, JournalFull, RequestRejected
from tunemq_shared.objects.store_traffic import TRAFFIC, StoreTraffic
from tunemq_shared.system.stopped_process import POLL_INTERVAL_S, StoppedProcessDetector

#: Restart delay after a process dies: the first, doubled each time, and the longest. After this
#: many deaths in a row, each before the process was steady, the experiment fails.
_RESTART_S: Final = (0.5, 30.0)
_DEATHS_AT_MOST: Final = 5
#: How long a process that should end gets for it.
_END_GRACE_S: Final = 30.0
#: The limit for stopping a search: saving trials, copying files and running callbacks.
_STOP_WITHIN_S: Final = 180.0
#: People are informed of a process that has been silent for this long.
_SILENT_S: Final = 30.0
#: How often a process is ended for silence before its experiment fails. After its deregistration it
#: gets this long, because it may copy many files.
_HANGS_AT_MOST: Final = 3
_LAST_STEPS_S: Final = 3600.0
#: Nodes end unwanted trials within this time; only then are their slots free.
_FREED_AFTER_S: Final = 10.0
#: For how long trials of a search whose process cannot start block the offers to all others;
#: those of one that runs do so for `SUBMITTED_WITHIN_S`, as it may read a long journal.
_REPORTS_WITHIN_S: Final = 120.0
#: For how long those of a lost search do that is not submitted again, or does not report.
SUBMITTED_WITHIN_S: Final = 600.0
#: The file beside the queue with the stream of each experiment's events.
STREAMS: Final = "streams.json"

StartConnection = Callable[[QueueEntry, str], ExperimentConnection]


class RunningExperiments:
    """The experiments of a farm that have a process.

    Args:
        folder: the farm's own folder, for state that outlives this process.
        queue: all experiments.
        allocator: decides what each experiment gets.
        start_connection: starts the process of an entry; the second argument is the event key of
            its previous run, or empty.
        end_trial_processes: makes nodes end all trials with such an event key.
        folders: the results folders of the experiments.
        max_running: how many experiments have a process at once.
        pause_grace_s: how long trials get to save when their experiment is paused; seconds.
        unresponsive_after_s: a process that is silent for this long is ended; seconds.
        notices: shows a line to people.
    """

    def __init__(
        self,
        folder: Path,
        queue: ExperimentQueue,
        allocator: FairShareAllocator,
        start_connection: StartConnection,
        *,
        end_trial_processes: Callable[[str], None],
        folders: ResultsFolders,
        max_running: int,
        pause_grace_s: float,
        unresponsive_after_s: float,
        notices: Callable[[str], None],
    ) -> None:
        self._queue, self._allocator, self._start_connection = queue, allocator, start_connection
        self._end_trial_processes, self._pause_grace_s = end_trial_processes, pause_grace_s
        self._unresponsive_after_s = unresponsive_after_s
        self._folders, self._max_running, self._notices = folders, max_running, notices
        self._streams = EventStreams(folder / STREAMS)
        self._running: dict[str, ExperimentRun] = {}
        #: Searches of a lost machine that were not submitted yet, and until when to wait for that.
        self._lost: dict[str, float] = {}
        #: Ended experiments, and until when their trial processes may still run.
        self._leaving: dict[str, float] = {}
        self._details = RunDetails(folder / "details")
        #: The queue's change counter at the last check; None after an experiment has ended.
        self._looked_at: int | None = None
        #: Why waiting experiments cannot start: the disk has no space to record it.
        self._no_room: JournalFull | None = None
        #: How many results ended processes had received.
        self._results_before = 0
        #: The store traffic of ended processes.
        self._traffic_before = StoreTraffic()

    @property
    def streams(self) -> Mapping[str, str]:
        """The event keys of experiments that may have trials on nodes, by name.

        A change creates another mapping.
        """
        return self._streams.keys

    def __len__(self) -> int:
        return len(self._running)

    @property
    def results(self) -> int:
        """How many results experiments have received in total."""
        return self._results_before + sum(connection.results for connection in self.connections())

    def trials(self) -> dict[str, dict[str, int]]:
        """Return the number of trials in each state, for each experiment with a process."""
        statuses = {
            one.name: one.connection.status for one in self._running.values() if one.connection
        }
        return {name: status.counts for name, status in statuses.items() if status is not None}

    def troubles(self) -> dict[str, str]:
        """Return the kind of trouble of each experiment that makes no progress; see `FarmSnapshot`.

        An experiment counts as in trouble until its restarted process has lived for a while.
        Otherwise one that fails soon after each start would seem healthy in between.
        """
        kinds = {one.name: one.trouble for one in self._running.values()}
        known = {name: kind for name, kind in kinds.items() if kind}
        return {**dict.fromkeys(self._lost, "waiting"), **known}

    def store_uses(self) -> dict[str, r.StoreUse]:
        """Return the store requests and waiting trials of each experiment with a process."""
        return {
            one.name: one.connection.store_use for one in self._running.values() if one.connection
        }

    def store_troubles(self) -> tuple[a.StoreTroubleRow, ...]:
        """Return the scheduler's processes, this one included, whose store requests fail now."""
        uses = {"": r.StoreUse(TRAFFIC.so_far()), **self.store_uses()}
        return tuple(
            a.StoreTroubleRow(
                experiment=name,
                failing_s=use.traffic.failing_s,
                problem=use.traffic.problem,
                copy_behind_s=use.copy_behind_s,
            )
            for name, use in uses.items()
            if use.traffic.failing_s or use.copy_behind_s
        )

    @property
    def traffic(self) -> StoreTraffic:
        """The store traffic of all experiments in total."""
        total = self._traffic_before
        for use in self.store_uses().values():
            total = total.plus(use.traffic)
        return total

    # --- each turn of the supervisor --------------------------------------------------------------

    def take_up(self) -> None:
        """Restart the experiments that ran when the previous supervisor ended."""
        for entry in self._queue.in_state(State.RUNNING, State.STOPPING):
            self._start(entry)
        for name in list(self._streams.keys):
            known = self._queue.get(name)
            if known is not None and known.state is State.PAUSED:
                self._start(known)  # its trials must still save
                self._end(self._running[name], State.PAUSED, known.reason)
            elif name not in self._running and name not in self._lost:
                self._await_reports(name)
                self._end_trials(name)

    def expect(self, name: str, events_key: str, *, has_ended: bool) -> None:
        """Have nodes keep the trials of a lost search until it is submitted; before `take_up`.

        No other search gets a slot before the search reports what it holds, or its trials have
        ended: at once if it ``has_ended`` itself, else if it is not submitted for a while.
        """
        if self._queue.get(name) is not None:
            return
        self._streams.put(name, events_key)
        if has_ended:
            return  # `take_up` ends the rest
        self._lost[name] = time.monotonic() + SUBMITTED_WITHIN_S
        until = time.strftime("%H:%M:%S %Z", time.localtime(time.time() + SUBMITTED_WITHIN_S))
        hint = (
            f"{name} must be submitted again: only its process knows which slots its trials hold,"
            f" so no other search gets one before. At {until} the farm ends these trials; to end"
            " them now, restart the scheduler without --take-over of this search"
        )
        self._notices(hint)
        self._await_reports(name, hint)

    def _await_reports(self, name: str, hint: str = "") -> None:
        """Block all offers until the search reports which slots its trials hold."""
        self._allocator.experiment_added(name, "", 0, 0)
        self._allocator.expect(name, hint)

    def _end_trials(self, name: str) -> None:
        """End the trials of a search without a process; a while later their slots are free."""
        self._end_trial_processes(self._streams.keys[name])
        self._streams.drop(name)
        self._leaving[name] = time.monotonic() + _FREED_AFTER_S

    def connections(self) -> Iterator[ExperimentConnection]:
        """Yield the connections of all running processes."""
        return (one.connection for one in self._running.values() if one.connection is not None)

    def turn(self) -> None:
        """Start due processes, process their messages, and handle ended ones."""
        now = time.monotonic()
        for one in list(self._running.values()):
            if one.connection is not None:
                self._attend(one, one.connection)
            elif now >= one.restart_at:
                self._begin(one, is_first=False)
        for name in [name for name, until in self._lost.items() if now >= until]:
            del self._lost[name]
            self._notices(
                f"{name} was not submitted again within {SUBMITTED_WITHIN_S:g} s. The farm ends"
                " its trials, so that other searches get slots; they continue from their"
                " checkpoints."
            )
            self._end_trials(name)
        for name, due in list(self._leaving.items()):
            if now >= due:
                del self._leaving[name]
                self._looked_at = None
                self._allocator.experiment_gone(name)
                if name in self._running:
                    self._add_to_allocator(name)
        for name in self._allocator.overdue():
            self._end_overdue(name)
        self._start_waiting()

    def save(self) -> None:
        """Write changes for which the disk had no space; called about once a second.

        Raises:
            JournalFull: it still has none.
            JournalError: the disk rejects the write.
        """
        self._queue.save()
        self._streams.save()
        self._details.save()
        full, self._no_room = self._no_room, None
        if full is not None:
            raise full

    def offer(self) -> None:
        """Send experiments their new offers."""
        for name, offered in self._allocator.offers():
            one = self._running.get(name)
            if one is not None and one.connection is not None:
                one.connection.offer(offered)
                one.pace.offered(offered.instance_id, offered.resources, time.monotonic())

    def forget_nodes(self, dead: Iterable[str]) -> None:
        """Forget these node instances, which will not come back."""
        for instance_id in dead:
            for one in self._running.values():
                one.pace.forget(instance_id)

    def beat(self, at: float) -> None:
        """Forward that this scheduler held the lease at this time."""
        for connection in self.connections():
            connection.beat(at)

    def leave(self, grace_s: float) -> None:
        """End all processes but leave the nodes' trials running, for the next supervisor."""
        for connection in self.connections():
            connection.stop(r.DetachSearch(), grace_s)

    @property
    def next_due(self) -> float | None:
        """When the next timer is due, by the monotonic clock; None if there is none."""
        due = [*self._leaving.values()]
        due += [one.restart_at for one in self._running.values() if one.connection is None]
        return min(due, default=None)

    # --- beginning --------------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        if self._queue.changes == self._looked_at or self._no_room is not None:
            return  # avoids checking a thousand experiments that cannot start
        while (entry := self._next()) is not None:
            try:
                begun = self._queue.move(entry.name, State.RUNNING)
            except JournalFull as full:
                self._no_room = full
                return
            self._start(begun)
        self._looked_at = self._queue.changes

    def _next(self) -> QueueEntry | None:
        """Return the next to start: the highest priority, then the owner with the fewest."""
        busy = self._running.keys() | self._leaving.keys()
        waiting = [one for one in self._queue.waiting() if one.name not in busy]
        if not waiting:
            return None
        first = waiting[0].priority
        if len(self._running) >= self._max_running and not self._make_room(first):
            return None
        owners = Counter(entry.owner for entry in map(self._queue.get, self._running) if entry)
        best = [one for one in waiting if one.priority == first]
        return min(best, key=lambda one: (owners[one.owner], one.number))

    def _make_room(self, priority: int) -> bool:
        """Return whether an experiment of this priority may run; if needed, end a lower one."""
        staying = [
            entry
            for entry in map(self._queue.get, self._running)
            if entry is not None and self._running[entry.name].ends_for is None
        ]
        if len(staying) < self._max_running:
            return True  # some are ending already
        running = [entry for entry in staying if entry.state is State.RUNNING]
        last = min(running, key=lambda entry: (entry.priority, -entry.number), default=None)
        if last is None or last.priority >= priority:
            return False
        self._end(self._running[last.name], State.QUEUED, "preempted by a higher priority")
        return True

    def _start(self, entry: QueueEntry) -> None:
        one = self._running[entry.name] = ExperimentRun(entry.name)
        if self._lost.pop(entry.name, None) is not None:
            self._allocator.experiment_gone(entry.name)  # until now it had no owner
        self._add_to_allocator(entry.name)
        if entry.name in self._streams.keys:
            self._allocator.expect(entry.name)
            one.failing_since = time.monotonic()
        self._begin(one, is_first=True)

    def _begin(self, one: ExperimentRun, *, is_first: bool) -> None:
        entry = self._queue.get(one.name)
        if entry is None or entry.is_over:
            self._forget(one)
            return
        one.begun_at = None
        if entry.state is State.STOPPING and one.end_by is None:  # the previous supervisor set it
            one.end_by = time.monotonic() + _STOP_WITHIN_S
        try:
            one.connection = self._start_connection(entry, self._streams.keys.get(one.name, ""))
        except ConfigError as error:
            if may_pass(error):
                self._ended(one, ExperimentExit(ExperimentOutcome.LEFT, EXIT_AGAIN, str(error)))
            else:
                self._finish(one, State.FAILED, str(error))
            return
        if not is_first:
            self._allocator.experiment_restarted(one.name)
        one.is_told_to_end = one.is_silent = one.is_aborted = False
        if entry.state is State.STOPPING:
            one.connection.ask(r.StopSearch(entry.reason))

    # --- while it runs ----------------------------------------------------------------------------

    def _attend(self, one: ExperimentRun, connection: ExperimentConnection) -> None:
        connection.attend()
        if one.ends and one.is_steady:
            one.ends = one.deaths = 0
        if connection.events_key:
            if one.begun_at is None:
                one.begun_at = time.monotonic()
                one.waits = ""
                entry = self._queue.get(one.name)
                if entry is not None and entry.reason.startswith(a.WAITS):
                    self._queue.explain(one.name, "")
            self._streams.put(one.name, connection.events_key)
            self._queue.begun(one.name)
        if connection.usage is not None and connection.usage is not one.usage:
            one.usage, one.failing_since = connection.usage, None
            self._allocate(one, connection, one.usage)
        for line in connection.take_notices():
            self._notices(f"{one.name}: {line}")
        if connection.process_exit is not None:
            self._keep(one.name, connection)
            self._results_before += connection.results
            before = self._traffic_before.plus(connection.store_use.traffic.ended)
            self._traffic_before = before if before.is_possible else StoreTraffic()
            one.connection = None
            self._ended(one, connection.process_exit)
        elif self._must_be_killed(one, connection):
            connection.kill()
        elif one.ends_for is not None and not one.is_told_to_end and not one.holds:
            one.is_told_to_end = True
            connection.stop(r.InterruptSearch(one.because), _END_GRACE_S)
        elif connection.pid is not None and time.monotonic() >= one.look_at:
            one.look_at = time.monotonic() + POLL_INTERVAL_S
            if one.stops.look(connection.pid):
                self._notices(
                    f"{one.name}: its process {connection.pid} is stopped (SIGSTOP or a debugger)"
                )
                one.stops = StoppedProcessDetector()
                connection.kill()
            else:
                self._end_if_it_hangs(one, connection)

    def _allocate(
        self, one: ExperimentRun, connection: ExperimentConnection, usage: OfferUsage
    ) -> None:
        try:
            self._allocator.usage(one.name, one.pace.heard(usage, time.monotonic()))
        except Exception as error:  # noqa: BLE001  recorded: one experiment must not end the others
            connection.fail(error)

    def _must_be_killed(self, one: ExperimentRun, connection: ExperimentConnection) -> bool:
        if connection.incomplete_node:
            one.starts_over_for = (
                f"node {connection.incomplete_node} has deleted events that this search lacks, as"
                " the copy of its journal did"
            )
        elif len(self._running) > 1 and self._blocks_others(one, SUBMITTED_WITHIN_S):
            one.starts_over_for = (
                f"its process has not said within {SUBMITTED_WITHIN_S:g} s which slots its trials"
                " hold, and others wait for that"
            )
        is_late = one.end_by is not None and time.monotonic() > one.end_by
        return is_late or bool(one.starts_over_for)

    def _blocks_others(self, one: ExperimentRun, within_s: float) -> bool:
        """Whether no other search gets slots, because this one has not reported for so long."""
        since = one.failing_since
        is_due = since is not None and time.monotonic() - since >= within_s
        is_known = one.name in self._streams.keys
        return is_due and is_known and self._allocator.waits_for(one.name)

    def _end_if_it_hangs(self, one: ExperimentRun, connection: ExperimentConnection) -> None:
        """Report a silent process to people; end it after a while.

        It holds slots, and the results of its trials are not journalled and fill its nodes'
        outboxes.
        """
        limit_s = self._limit_s(connection)
        if connection.silent_s < min(_SILENT_S, limit_s / 2):
            one.is_silent = False
            return
        if not one.is_silent:
            one.is_silent = True
            self._notices(self._why_silent(one, connection))
        if connection.silent_s >= limit_s and not one.is_aborted:
            one.is_aborted = True
            one.hangs += 1
            self._notices(f"{one.name}: its process is ended: no answer for {limit_s:g} s")
            connection.abort()

    def _why_silent(self, one: ExperimentRun, connection: ExperimentConnection) -> str:
        """Return how long its process has been silent, the likely reason, and the consequence."""
        if one.end_by is not None:
            then = f"it is killed in {max(0.0, one.end_by - time.monotonic()):.0f} s"
        elif connection.held_up_by:
            then = f"it is killed {self._unresponsive_after_s:g} s after that"
        else:
            left_s = max(0.0, self._limit_s(connection) - connection.silent_s)
            then = (
                f"it is ended and restarted in {left_s:.0f} s, and the search fails after "
                f"{_HANGS_AT_MOST} such restarts; `tunemq stop {one.name}` stops the search"
            )
        since = f"the process of {one.name} has not answered for {connection.silent_s:.0f} s"
        return f"{since}: {connection.likely_reason}; {then}"

    def _limit_s(self, connection: ExperimentConnection) -> float:
        limit_s = self._unresponsive_after_s
        return max(limit_s, _LAST_STEPS_S) if connection.has_ended_search else limit_s

    # --- the end ----------------------------------------------------------------------------------

    def _end(self, one: ExperimentRun, state: State, because: str) -> None:
        one.ends_for, one.because = state, because
        if one.connection is None and one.name not in self._streams.keys:
            self._finish(one, state, because)
            return
        # A process that has just died is restarted first, because its trials must save.
        one.restart_at = 0.0
        one.end_by = time.monotonic() + self._pause_grace_s + 2 * _END_GRACE_S
        self._allocator.experiment_paused(one.name, self._pause_grace_s)

    def _keep(self, name: str, connection: ExperimentConnection) -> None:
        """Keep the process's last report for requests after its end."""
        if (entry := self._queue.get(name)) is not None:
            self._queue.count(name, *self.counts(entry))
        if connection.process_exit is not None and connection.process_exit.detail:
            self._details.keep(name, connection.process_exit.detail)

    def _ended(self, one: ExperimentRun, process_exit: ExperimentExit) -> None:
        entry = self._queue.get(one.name)
        has_trials = entry is not None and bool(entry.trials)
        # Once it is known it stays so: the stream of a search that waits for long is dropped.
        one.has_begun |= has_trials or one.name in self._streams.keys
        is_over = process_exit.outcome in {ExperimentOutcome.FINISHED, ExperimentOutcome.FAILED}
        if process_exit.outcome is ExperimentOutcome.MUST_WAIT and (
            not one.has_begun or (entry is not None and entry.state is State.STOPPING)
        ):
            is_over = True
        if process_exit.outcome in {ExperimentOutcome.FINISHED, ExperimentOutcome.INTERRUPTED}:
            self._streams.drop(one.name)  # it has deregistered from its nodes
        is_late = one.end_by is not None and time.monotonic() > one.end_by
        if entry is None:
            self._forget(one)
        elif entry.state is State.STOPPING and (is_over or is_late):
            late = "; its process did not end by itself, and was killed" if is_late else ""
            self._finish(one, State.STOPPED, f"{entry.reason}{late}")
        elif is_over:
            is_good = process_exit.outcome is ExperimentOutcome.FINISHED
            self._finish(one, State.FINISHED if is_good else State.FAILED, process_exit.text)
        elif one.ends_for is not None and (
            process_exit.outcome is ExperimentOutcome.INTERRUPTED or is_late
        ):
            self._finish(one, one.ends_for, one.because)
        elif process_exit.outcome is ExperimentOutcome.MUST_WAIT:
            self._wait_for_farm(one, process_exit.text)
        elif one.starts_over_for and one.name in self._streams.keys:
            self._restart_from_checkpoints(one)
        else:
            self._try_again(one, process_exit)

    def _restart_from_checkpoints(self, one: ExperimentRun) -> None:
        """End all trials of a search and its process, and restart it; those of others run on."""
        self._notices(
            f"{one.name}: {one.starts_over_for}. All its trials continue from their checkpoints."
        )
        one.starts_over_for = ""
        self._end_trials(one.name)
        one.restart_at = time.monotonic() + _FREED_AFTER_S

    def _end_overdue(self, name: str) -> None:
        """Have a search that does not give its slots back continue from its checkpoints."""
        one = self._running.get(name)
        if one is not None and one.connection is not None:  # else its next process will do it
            one.starts_over_for = (
                f"its process has kept slots for {OVERDUE_S:g} s longer than its trials may save"
            )

    def _wait_for_farm(self, one: ExperimentRun, why: str) -> None:
        """Wait for a scheduler that can run it, while its trials continue: that takes them over."""
        if one.waits != why:
            one.waits = why
            self._notices(f"{one.name} waits: {why}")
            self._queue.explain(one.name, f"{a.WAITS}{why}")
        one.restart_at = time.monotonic() + _RESTART_S[1]
        self._unblock_others(one)

    def _try_again(self, one: ExperimentRun, process_exit: ExperimentExit) -> None:
        if one.is_steady:
            one.ends = one.deaths = 0
        one.ends += 1
        one.failure = process_exit.text
        # INTERRUPTED, too: it was not asked to end, so its own code may have sent the signal.
        one.deaths += process_exit.outcome is not ExperimentOutcome.LEFT
        if one.is_aborted and one.hangs >= _HANGS_AT_MOST:
            self._finish(
                one,
                State.FAILED,
                f"its own code did not return for {self._unresponsive_after_s:g} s, {one.hangs}"
                f" times: {process_exit.text}",
            )
            return
        if one.deaths >= _DEATHS_AT_MOST:
            self._finish(
                one, State.FAILED, f"died {one.deaths} times in a row: {process_exit.text}"
            )
            return
        pause = backoff_s(one.ends, *_RESTART_S)
        self._notices(f"{one.name}: {process_exit.text}; it is restarted in {pause:g} s.")
        one.restart_at = time.monotonic() + pause
        self._unblock_others(one)

    def _unblock_others(self, one: ExperimentRun) -> None:
        """End the trials of a search that ran under the previous supervisor and cannot start.

        The allocator offers nothing until it knows what they hold. They continue from their
        checkpoints once the search starts.
        """
        now = time.monotonic()
        one.failing_since = one.failing_since or now
        if not self._blocks_others(one, _REPORTS_WITHIN_S):
            return
        self._notices(
            f"{one.name}: its process cannot start to report which slots its trials hold. The farm"
            " ends them, so that other searches get slots; they continue from their checkpoints."
        )
        self._end_trials(one.name)
        one.restart_at = max(one.restart_at, now + _FREED_AFTER_S)

    def _add_to_allocator(self, name: str) -> None:
        if (entry := self._queue.get(name)) is not None:
            self._allocator.experiment_added(name, entry.owner, entry.priority, entry.number)

    def _finish(self, one: ExperimentRun, state: State, reason: str) -> None:
        """Record the final state of an experiment that has no process any more."""
        entry = self._queue.get(one.name)
        if entry is not None and entry.state is not state and self._queue.may(entry, state):
            self._queue.move(one.name, state, reason, may_wait=True)
        elif entry is not None:
            self._queue.explain(one.name, reason)
        self._forget(one)

    def _forget(self, one: ExperimentRun) -> None:
        self._looked_at = None
        del self._running[one.name]
        if key := self._streams.keys.get(one.name):
            self._end_trial_processes(key)
            self._streams.drop(one.name)
        if key or one.holds:
            self._leaving[one.name] = time.monotonic() + _FREED_AFTER_S
        else:
            self._allocator.experiment_gone(one.name)

    # --- requests of users, see `FarmApi` ---------------------------------------------------------

    def has(self, name: str) -> bool:
        """Return whether the experiment has a process, or is about to get one again."""
        return name in self._running

    def counts(self, entry: QueueEntry) -> tuple[dict[str, int], int | None]:
        """Return the trials by state, and the expected total, as its process reported last."""
        one = self._running.get(entry.name)
        status = one.connection.status if one is not None and one.connection is not None else None
        # A process that has just begun may not know the trials of earlier ones yet.
        is_new = status is not None and not any(status.counts.values())
        if status is None or (is_new and any(entry.trials.values())):
            return entry.trials, entry.total
        return status.counts, status.total

    def trouble(self, name: str) -> str:
        """Return why it has no running process that answers; empty if it has one."""
        one = self._running.get(name)
        if one is None or one.waits:
            return ""
        if one.connection is not None and (one.is_silent or one.connection.events_key):
            return self._why_silent(one, one.connection) if one.is_silent else ""
        return one.failed if one.ends else ""

    def places(self) -> str:
        """Return which experiments hold all places; empty if there is a free one."""
        if len(self._running) < self._max_running:
            return ""
        by = in_words(self._running, self.troubles())
        return f"all places (max_running = {self._max_running}) are taken by {by}"

    def detail(
        self, name: str, trials: int, row: a.ExperimentRow
    ) -> MaybeLater[a.ExperimentDetail]:
        """Return details from its process; without one, its last report, or else ``row`` alone."""
        connection = self._running[name].connection if name in self._running else None
        if connection is None or self._running[name].is_silent:
            return self._kept_detail(name, trials, row)

        def at_its_end() -> a.ExperimentDetail:
            self._keep(name, connection)
            return self._kept_detail(name, trials, row)

        return ask_process(connection, r.ShowTrials(trials), at_its_end)

    def _kept_detail(self, name: str, trials: int, row: a.ExperimentRow) -> a.ExperimentDetail:
        known = self._details.read(name) or a.ExperimentDetail(experiment=row)
        if len(known.trials) <= trials:
            return known
        hidden = known.hidden + len(known.trials) - trials
        return msgspec.structs.replace(known, trials=known.trials[:trials], hidden=hidden)

    def stop(self, name: str, reason: str) -> None:
        """Stop a search; a silent process is killed soon."""
        one = self._running[name]
        one.ends_for = None
        one.restart_at = 0.0  # a process that has just died is restarted to stop
        within_s = _END_GRACE_S if one.is_silent else _STOP_WITHIN_S
        one.end_by = time.monotonic() + within_s
        if one.connection is not None:
            one.connection.ask(r.StopSearch(reason))

    def stop_again(self, name: str) -> str:
        """Kill the process of a stopping search if it is silent; return what happens, in words."""
        one, now = self._running[name], time.monotonic()
        if one.is_silent:
            one.end_by = now
            return "its process does not answer, and is killed now"
        left_s = max(0.0, (one.end_by or now) - now)
        return f"its process is killed in {left_s:.0f} s unless it ends"

    def pause(self, name: str, reason: str) -> None:
        """Have an experiment save and end, until it is resumed."""
        self._end(self._running[name], State.PAUSED, reason)

    def resume(self, name: str) -> None:
        """Resume a paused experiment; one that is still ending is queued again afterwards."""
        one = self._running[name]
        if one.is_told_to_end:
            one.ends_for, one.because = State.QUEUED, "resumed"
        else:
            one.ends_for = one.end_by = None
            self._allocator.experiment_resumed(name)

    def stop_trial(self, name: str, trial: str, reason: str) -> DeferredAnswer[a.RequestDone]:
        """Stop one trial."""
        return ask_process(self._connection(name), r.StopOneTrial(trial, reason))

    def retry(self, name: str, trial: str) -> DeferredAnswer[a.RequestDone]:
        """Continue one trial, or all, in state ERROR."""
        return ask_process(
            self._connection(name), r.RetryTrial("" if trial == r.RETRY_ALL else trial)
        )

    def why(self, name: str, trial: str) -> MaybeLater[a.Explanation]:
        """Explain why a trial waits; without one, why the experiment has too few slots."""
        one = self._running[name]
        if one.waits:
            return a.Explanation(lines=(f"{name} waits: {one.waits}",))
        if one.connection is None and not trial and one.ends:
            return a.Explanation(lines=(one.failed,))
        connection = self._connection(name)
        silence = (self._why_silent(one, connection),) if one.is_silent else ()
        if trial and silence:
            return a.Explanation(lines=silence)
        if trial:
            reasons: DeferredAnswer[r.TrialExplanation] = ask_process(
                connection, r.ExplainTrial(trial)
            )
            return reasons.then(
                lambda found: a.Explanation(
                    lines=tuple(self._reasons(name, found)),
                    decisions=tuple(
                        a.DecisionRow(**msgspec.structs.asdict(one)) for one in found.decisions
                    ),
                )
            )
        use = connection.store_use
        failed = silence or ((one.failed,) if one.ends else ())
        if connection.usage is None:
            return a.Explanation(lines=(*failed, f"{name} starts"))
        held = sum(bool(amounts.resources) for amounts in connection.usage.held.values())
        ends = "" if one.ends_for is None else f"frees its slots ({one.because}), and still "
        lines = [*failed, f"{name} {ends}runs, on {held} node{'' if held == 1 else 's'}"]
        lines += connection.status.waits if connection.status is not None else ()
        for wanted in connection.usage.wants:
            lines += self._allocator.explainer.why(
                name, WHOLE_NODE if wanted.is_alone else wanted.request
            )
        if use.waiting:
            lines.append(f"{use.waiting} of its trials wait for the store")
        if trouble := use.traffic.shown(f"the process of {name}"):
            lines.append(trouble)
        return a.Explanation(lines=tuple(lines))

    def _reasons(self, name: str, found: r.TrialExplanation) -> Iterator[str]:
        yield from found.lines
        if found.request and name in self._running:
            yield from self._allocator.explainer.why(name, found.request)
        yield from explain_decisions(found.decisions, found.decisions_before)

    def explain_ended(self, name: str, trial: str) -> Future[a.Explanation] | None:
        """Begin to explain a trial of an ended experiment; see `ResultsFolders.explain`."""
        return self._folders.explain(name, trial)

    def log(self, name: str, trial: str) -> Path | None:
        """Return the path of an experiment's or a trial's log."""
        return self._folders.log(name, trial)

    def forget(self, name: str) -> None:
        """Forget a removed experiment."""
        self._details.forget(name)
        self._folders.free_name(name)

    def remove_files(self, name: str) -> Future[str]:
        """Delete the files of an ended experiment; see `ResultsFolders.remove`."""
        entry = self._queue.get(name)
        return self._folders.remove(name, "" if entry is None else entry.id)

    def _connection(self, name: str) -> ExperimentConnection:
        one = self._running[name]
        if one.connection is None:
            raise RequestRejected(
                f"experiment {name} has no process now: {one.failed}"
                if one.ends
                else f"the process of {name} has just ended, and is restarted."
            )
        return one.connection
