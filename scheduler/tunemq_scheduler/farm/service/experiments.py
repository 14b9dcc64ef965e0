"""Those of a farm that have a process: started, watched, offered slots, ended."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from tunemq_scheduler.api import farm_answers as a
from tunemq_scheduler.api.farm_answers import ExperimentState as State
from tunemq_scheduler.api.farm_answers import RequestRejection
from tunemq_scheduler.core.allotments import WHOLE_NODE, OfferUsage
from tunemq_scheduler.farm.allocation.fair_share_allocator import FairShareAllocator
from tunemq_scheduler.farm.allocation.offer_pace import OfferPace
from tunemq_scheduler.farm.common.run_details import RunDetails
from tunemq_scheduler.farm.common.scheduler_exit_codes import EXIT_AGAIN, may_pass
from tunemq_scheduler.farm.ipc import ipc_messages as r
from tunemq_scheduler.farm.ipc.experiment_connection import (
    ExperimentConnection,
    ExperimentExit,
    ExperimentOutcome,
    ExperimentReply,
)
from tunemq_scheduler.farm.output.event_streams import EventStreams
from tunemq_scheduler.farm.service.experiment_queue import ExperimentQueue
from tunemq_scheduler.farm.service.farm_api import TrialCounts
from tunemq_scheduler.farm.service.queue_entry import RETRY_ALL, QueueEntry
from tunemq_scheduler.farm.service.request_handler import DeferredAnswer
from tunemq_scheduler.farm.service.results_folders import ResultsFolders
from tunemq_shared.base.backoff import backoff_s
from tunemq_shared.base.errors import ConfigError, JournalFull, RequestRejected
from tunemq_shared.objects.store_traffic import TRAFFIC, StoreTraffic
from tunemq_shared.system.stopped_process import POLL_INTERVAL_S, StoppedProcessDetector

#: A process that dies is started again after so long, twice as long each time; and not again if it
#: died so often in a row, each time before it had lived for so long.
_RESTART_S: Final = (0.5, 30.0)
_DEATHS_AT_MOST: Final = 5
_STEADY_S: Final = 60.0
#: How long a process that is to end gets for it.
_END_GRACE_S: Final = 30.0
#: Trials save, files are copied and callbacks hear of the end within so long, or never.
_STOP_WITHIN_S: Final = 180.0
#: People are told of a process that has said nothing for so long.
_SILENT_S: Final = 30.0
#: So often it is ended for that. After its deregistration it gets this long: it may copy much.
_HANGS_AT_MOST: Final = 3
_LAST_STEPS_S: Final = 3600.0
#: Nodes end what is not wanted within so long: only then is its place somebody else's.
_FREED_AFTER_S: Final = 10.0
#: Beside the queue: where each experiment's events go.
STREAMS: Final = "streams.json"

StartConnection = Callable[[QueueEntry, str], ExperimentConnection]


@dataclass(slots=True)
class _ExperimentRun:
    """An experiment that has a process, or had one until a moment ago and will have one again.

    Attributes:
        ends, deaths: of its processes in a row, soon after they began; those that were deaths.
        failure: how the last of these ended, in words; counts as long as ``ends``.
        began_at: when the start of the newest of them was tried; None before the first.
        restart_at: when the next process is started; None while there is one.
        ends_for: which state it is to be in when it has ended, and ``because`` of what; None while
            it is to go on. It ends when its trials have given back what they hold, saved.
        end_by: it is killed if it has not ended then: its code may hang.
        usage: what it said last of what it was offered; the allotter knows that, as ``pace`` says.
        stops: whether its process is stopped (SIGSTOP); looks at it again at ``look_at``.
        waits: the version that it waits for, in words; empty where it waits for none.
        is_silent: people were told that its process says nothing; ``hangs``: how many of its
            processes were ended for that, ``is_aborted``: this one among them.
    """

    name: str
    connection: ExperimentConnection | None = None
    ends: int = 0
    deaths: int = 0
    failure: str = ""
    began_at: float | None = None
    restart_at: float = 0.0
    ends_for: State | None = None
    because: str = ""
    is_told_to_end: bool = False
    end_by: float | None = None
    usage: OfferUsage | None = None
    pace: OfferPace = field(default_factory=OfferPace)
    stops: StoppedProcessDetector = field(default_factory=StoppedProcessDetector)
    look_at: float = 0.0
    waits: str = ""
    is_silent: bool = False
    hangs: int = 0
    is_aborted: bool = False


class RunningExperiments:
    """The experiments of a farm that have a process.

    Args:
        folder: the farm's own, for what has to outlive this process.
        queue: all experiments.
        allotter: says what each gets.
        start_link: starts the process of an entry; the second argument is the key of the stream of
            its run before, empty where there is none.
        end_hosts: has nodes end all that they host for such a key.
        folders: those of the experiments.
        max_running: so many have a process at once.
        pause_grace_s: how long trials get to save when their experiment is paused.
        unresponsive_after_s: a process that has said nothing for so long is ended.
        news: shows a line to people.
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
        self._running: dict[str, _ExperimentRun] = {}
        #: Those of a lost machine that were not submitted yet.
        self._lost: set[str] = set()
        #: Those that are over, and whose hosts may be there until then.
        self._leaving: dict[str, float] = {}
        self._details = RunDetails(folder / "details")
        #: How many changes of the queue were looked at; None where an experiment has ended since.
        self._looked_at: int | None = None
        #: Why what waits cannot begin: the disk has no room to keep that it has.
        self._no_room: JournalFull | None = None
        #: How many results those processes were given that have ended.
        self._results_before = 0
        #: What those have asked of stores.
        self._traffic_before = StoreTraffic()

    @property
    def streams(self) -> Mapping[str, str]:
        """The keys of the streams of experiments that nodes may host something of, by name.

        Another mapping when there are others.
        """
        return self._streams.keys

    def __len__(self) -> int:
        return len(self._running)

    @property
    def results(self) -> int:
        """How many results experiments were given, all in all."""
        return self._results_before + sum(connection.results for connection in self.connections())

    def trials(self) -> dict[str, dict[str, int]]:
        """Of each that has a process, how many trials are in each state."""
        statuses = {
            one.name: one.connection.status for one in self._running.values() if one.connection
        }
        return {name: status.counts for name, status in statuses.items() if status is not None}

    def troubles(self) -> dict[str, str]:
        """Of each that stands still, what kind of trouble it has; see `FarmSnapshot.troubles`.

        One whose process has just been started again is in trouble until that has lived for a
        while: else a process that fails soon after each start would be well in between.
        """
        kinds = {one.name: _trouble_kind(one) for one in self._running.values()}
        return {name: kind for name, kind in kinds.items() if kind}

    def store_uses(self) -> dict[str, r.StoreUse]:
        """Of each that has a process, what it asks of stores, and who waits for one."""
        return {
            one.name: one.connection.store_use for one in self._running.values() if one.connection
        }

    def store_troubles(self) -> tuple[a.StoreTroubleRow, ...]:
        """Which processes of the scheduler, this one included, an object store fails now."""
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
        """What experiments have asked of stores, all in all."""
        total = self._traffic_before
        for use in self.store_uses().values():
            total = total.plus(use.traffic)
        return total

    # --- each turn of the supervisor --------------------------------------------------------------

    def take_up(self) -> None:
        """Go on with what ran when the supervisor before this one ended."""
        for entry in self._queue.in_state(State.RUNNING, State.STOPPING):
            self._start(entry)
        for name, key in list(self._streams.keys.items()):
            known = self._queue.get(name)
            if known is not None and known.state is State.PAUSED:
                self._start(known)  # its trials have still to save
                self._end(self._running[name], State.PAUSED, known.reason)
            elif name not in self._running and name not in self._lost:
                self._end_trial_processes(key)
                self._streams.drop(name)
                self._await_hosts(name)
                self._leaving[name] = time.monotonic() + _FREED_AFTER_S

    def expect(self, name: str, events_key: str) -> None:
        """Have nodes keep what they host of a lost search until it is submitted; before `take_up`.

        No other search gets a slot before it says what it holds.
        """
        if self._queue.get(name) is None:
            self._streams.put(name, events_key)
            self._lost.add(name)
            self._await_hosts(name)

    def _await_hosts(self, name: str) -> None:
        """Have no search get a place before it is known which slots this one's hosts hold."""
        self._allocator.experiment_added(name, "", 0, 0)
        self._allocator.expect(name)

    def connections(self) -> Iterator[ExperimentConnection]:
        """The processes there are."""
        return (one.connection for one in self._running.values() if one.connection is not None)

    def turn(self) -> None:
        """Start what is due, take what processes said, see to those that ended."""
        now = time.monotonic()
        for one in list(self._running.values()):
            if one.connection is not None:
                self._attend(one, one.connection)
            elif now >= one.restart_at:
                self._begin(one)
        for name, due in list(self._leaving.items()):
            if now >= due:
                del self._leaving[name]
                self._looked_at = None
                self._allocator.experiment_gone(name)
        self._start_waiting()

    def save(self) -> None:
        """About once a second: write what the disk had no room for.

        Raises:
            JournalFull: it still has none.
            JournalError: it refuses it.
        """
        self._queue.save()
        self._streams.save()
        self._details.save()
        full, self._no_room = self._no_room, None
        if full is not None:
            raise full

    def offer(self) -> None:
        """Pass on what experiments may use from now on."""
        for name, offered in self._allocator.offers():
            one = self._running.get(name)
            if one is not None and one.connection is not None:
                one.connection.offer(offered)
                one.pace.offered(offered.instance_id, offered.resources, time.monotonic())

    def forget_nodes(self, dead: Iterable[str]) -> None:
        """These attempts will not come back."""
        for instance_id in dead:
            for one in self._running.values():
                one.pace.forget(instance_id)

    def beat(self, at: float) -> None:
        """At this time the farm was certainly ours."""
        for connection in self.connections():
            connection.beat(at)

    def leave(self, grace_s: float) -> None:
        """End all processes and tell no node: trials go on, for the next supervisor."""
        for connection in self.connections():
            connection.stop(r.DetachSearch(), grace_s)

    @property
    def next_due(self) -> float | None:
        """When something has to be done although nothing happens, by the monotonic clock."""
        due = [*self._leaving.values()]
        due += [one.restart_at for one in self._running.values() if one.connection is None]
        return min(due, default=None)

    # --- beginning --------------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        if self._queue.changes == self._looked_at or self._no_room is not None:
            return  # of a thousand that wait none can begin
        while (entry := self._next()) is not None:
            try:
                begun = self._queue.move(entry.name, State.RUNNING)
            except JournalFull as full:
                self._no_room = full
                return
            self._start(begun)
        self._looked_at = self._queue.changes

    def _next(self) -> QueueEntry | None:
        """Who is started now: the highest priority first, then whose owner has the fewest."""
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
        """Whether one of this priority may run beside all others: one of them ends for it."""
        staying = [
            entry
            for entry in map(self._queue.get, self._running)
            if entry is not None and self._running[entry.name].ends_for is None
        ]
        if len(staying) < self._max_running:
            return True  # some end already
        last = min(staying, key=lambda entry: (entry.priority, -entry.number))
        if last.priority >= priority:
            return False
        self._end(self._running[last.name], State.QUEUED, "made way for a higher priority")
        return True

    def _start(self, entry: QueueEntry) -> None:
        one = self._running[entry.name] = _ExperimentRun(entry.name)
        if entry.name in self._lost:
            self._lost.remove(entry.name)
            self._allocator.experiment_gone(entry.name)  # until now it had no owner
        self._allocator.experiment_added(entry.name, entry.owner, entry.priority, entry.number)
        if entry.name in self._streams.keys:
            self._allocator.expect(entry.name)
        self._begin(one)

    def _begin(self, one: _ExperimentRun) -> None:
        entry = self._queue.get(one.name)
        if entry is None or entry.is_over:
            self._forget(one)
            return
        is_first, one.began_at = one.began_at is None, time.monotonic()
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

    def _attend(self, one: _ExperimentRun, connection: ExperimentConnection) -> None:
        connection.attend()
        if one.ends and _is_steady(one):
            one.ends = one.deaths = 0
        if connection.events_key:
            self._streams.put(one.name, connection.events_key)
            self._queue.begun(one.name)
            if one.waits:
                one.waits = ""
                self._queue.explain(one.name, "")
        if connection.usage is not None and connection.usage is not one.usage:
            one.usage = connection.usage
            self._allocator.usage(one.name, one.pace.heard(connection.usage, time.monotonic()))
        for line in connection.take_notices():
            self._notices(f"{one.name}: {line}")
        if connection.process_exit is not None:
            self._keep(one.name, connection)
            self._results_before += connection.results
            before = self._traffic_before.plus(connection.store_use.traffic.ended)
            self._traffic_before = before if before.is_possible else StoreTraffic()
            one.connection = None
            self._ended(one, connection.process_exit)
        elif one.end_by is not None and time.monotonic() > one.end_by:
            connection.kill()
        elif one.ends_for is not None and not one.is_told_to_end and not _holds(one):
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

    def _end_if_it_hangs(self, one: _ExperimentRun, connection: ExperimentConnection) -> None:
        """Tell people of a process that says nothing; end it after a while.

        It holds slots, and nobody journals what its trials report, which fills their nodes.
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

    def _why_silent(self, one: _ExperimentRun, connection: ExperimentConnection) -> str:
        """For how long its process has said nothing, what may be the reason, and what happens."""
        if one.end_by is not None:
            then = f"it is killed in {max(0.0, one.end_by - time.monotonic()):.0f} s"
        elif connection.held_up_by:
            then = f"it is killed {self._unresponsive_after_s:g} s after that"
        else:
            left_s = max(0.0, self._limit_s(connection) - connection.silent_s)
            then = (
                f"it is ended and started again in {left_s:.0f} s, and the search fails after"
                f" {_HANGS_AT_MOST} times of that; `tunemq stop {one.name}` stops the search"
            )
        since = f"the process of {one.name} has not answered for {connection.silent_s:.0f} s"
        return f"{since}: {_silence(connection)}; {then}"

    def _limit_s(self, connection: ExperimentConnection) -> float:
        limit_s = self._unresponsive_after_s
        return max(limit_s, _LAST_STEPS_S) if connection.has_ended_search else limit_s

    # --- the end ----------------------------------------------------------------------------------

    def _end(self, one: _ExperimentRun, state: State, because: str) -> None:
        one.ends_for, one.because = state, because
        if one.connection is None and one.name not in self._streams.keys:
            self._finish(one, state, because)
            return
        # One whose process has just died is started again for it: its trials have to save.
        one.restart_at = 0.0
        one.end_by = time.monotonic() + self._pause_grace_s + 2 * _END_GRACE_S
        self._allocator.experiment_paused(one.name, self._pause_grace_s)

    def _keep(self, name: str, connection: ExperimentConnection) -> None:
        """Keep what its process said last, for those who ask when there is none."""
        if connection.status is not None and self._queue.get(name) is not None:
            self._queue.count(name, connection.status.counts, connection.status.total)
        if connection.process_exit is not None and connection.process_exit.detail:
            self._details.keep(name, connection.process_exit.detail)

    def _ended(self, one: _ExperimentRun, process_exit: ExperimentExit) -> None:
        entry = self._queue.get(one.name)
        has_begun = one.name in self._streams.keys or (entry is not None and bool(entry.trials))
        is_over = process_exit.outcome in {ExperimentOutcome.FINISHED, ExperimentOutcome.FAILED}
        if process_exit.outcome is ExperimentOutcome.OTHER_VERSION and (
            not has_begun or (entry is not None and entry.state is State.STOPPING)
        ):
            is_over = True
        if process_exit.outcome in {ExperimentOutcome.FINISHED, ExperimentOutcome.INTERRUPTED}:
            self._streams.drop(one.name)  # it has deregistered to its nodes
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
        elif process_exit.outcome is ExperimentOutcome.OTHER_VERSION:
            self._wait_for_version(one, process_exit.text)
        else:
            self._try_again(one, process_exit)

    def _wait_for_version(self, one: _ExperimentRun, why: str) -> None:
        """Its trials go on meanwhile, and the scheduler of the right version takes them over."""
        if one.waits != why:
            one.waits = why
            self._notices(f"{one.name} waits: {why}")
            self._queue.explain(one.name, f"waits: {why}")
        one.restart_at = time.monotonic() + _RESTART_S[1]

    def _try_again(self, one: _ExperimentRun, process_exit: ExperimentExit) -> None:
        if _is_steady(one):
            one.ends = one.deaths = 0
        one.ends += 1
        one.failure = process_exit.text
        one.deaths += process_exit.outcome is ExperimentOutcome.DIED
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
        self._notices(f"{one.name}: {process_exit.text}; it is started again in {pause:g} s.")
        one.restart_at = time.monotonic() + pause

    def _finish(self, one: _ExperimentRun, state: State, reason: str) -> None:
        """It has no process any more, and is in this state now."""
        entry = self._queue.get(one.name)
        if entry is not None and entry.state is not state and self._queue.may(entry, state):
            self._queue.move(one.name, state, reason, may_wait=True)
        elif entry is not None:
            self._queue.explain(one.name, reason)
        self._forget(one)

    def _forget(self, one: _ExperimentRun) -> None:
        self._looked_at = None
        del self._running[one.name]
        if key := self._streams.keys.get(one.name):
            self._end_trial_processes(key)
            self._streams.drop(one.name)
        if key or _holds(one):
            self._leaving[one.name] = time.monotonic() + _FREED_AFTER_S
        else:
            self._allocator.experiment_gone(one.name)

    # --- what users ask, see `tunemq_scheduler.farm.service.farm_api.RunningExperiments`
    # -----------------------------

    def has(self, name: str) -> bool:
        """Whether it has a process now, or will have one again."""
        return name in self._running

    def counts(self, name: str) -> TrialCounts | None:
        """What its process said last."""
        connection = self._running[name].connection if name in self._running else None
        if connection is not None and connection.status is not None:
            return TrialCounts(connection.status.counts, connection.status.total)
        entry = self._queue.get(name)
        return None if entry is None else TrialCounts(entry.trials, entry.total)

    def trouble(self, name: str) -> str:
        """Why it has no process that has begun and answers; else empty."""
        one = self._running.get(name)
        if one is None or one.waits:
            return ""
        if one.connection is not None and one.connection.events_key:
            return self._why_silent(one, one.connection) if one.is_silent else ""
        return _failed(one) if one.ends else ""

    def detail(
        self, name: str, trials: int
    ) -> a.ExperimentDetail | DeferredAnswer[a.ExperimentDetail] | None:
        """From its process; where it has none, or none any more, what that said last."""
        connection = self._running[name].connection if name in self._running else None
        if connection is None or self._running[name].is_silent:
            return self._kept_detail(name, trials)

        def at_its_end() -> a.ExperimentDetail | None:
            self._keep(name, connection)
            return self._kept_detail(name, trials)

        return _ask(connection, r.ShowTrials(trials), at_its_end)

    def _kept_detail(self, name: str, trials: int) -> a.ExperimentDetail | None:
        known = self._details.read(name)
        if known is None or len(known.trials) <= trials:
            return known
        hidden = known.hidden + len(known.trials) - trials
        return msgspec.structs.replace(known, trials=known.trials[:trials], hidden=hidden)

    def stop(self, name: str, reason: str) -> None:
        """Have it stop; one whose process says nothing is killed soon."""
        one = self._running[name]
        one.ends_for = None
        one.restart_at = 0.0  # one whose process has just died is started again for it
        within_s = _END_GRACE_S if one.is_silent else _STOP_WITHIN_S
        one.end_by = time.monotonic() + within_s
        if one.connection is not None:
            one.connection.ask(r.StopSearch(reason))

    def pause(self, name: str, reason: str) -> None:
        """Have it save and end, until it is resumed."""
        self._end(self._running[name], State.PAUSED, reason)

    def resume(self, name: str) -> None:
        """It was paused and has not ended yet: it goes on as soon as it has."""
        one = self._running[name]
        if one.is_told_to_end:
            one.ends_for, one.because = State.QUEUED, "resumed"
        else:
            one.ends_for = one.end_by = None
            self._allocator.experiment_resumed(name)

    def stop_trial(self, name: str, trial: str, reason: str) -> DeferredAnswer[a.RequestDone]:
        """Stop one trial."""
        return _ask(self._connection(name), r.StopOneTrial(trial, reason))

    def retry(self, name: str, trial: str) -> DeferredAnswer[a.RequestDone]:
        """Have trials in ERROR go on."""
        return _ask(self._connection(name), r.RetryTrial("" if trial == RETRY_ALL else trial))

    def why(self, name: str, trial: str) -> a.Explanation | DeferredAnswer[a.Explanation]:
        """Why a trial waits; without one, why the experiment has not all it wants."""
        one = self._running[name]
        if one.waits:
            return a.Explanation(lines=(f"{name} waits: {one.waits}",))
        if one.connection is None and not trial and one.ends:
            return a.Explanation(lines=(_failed(one),))
        connection = self._connection(name)
        silence = (self._why_silent(one, connection),) if one.is_silent else ()
        if trial and silence:
            return a.Explanation(lines=silence)
        if trial:
            reasons: DeferredAnswer[r.TrialExplanation] = _ask(connection, r.ExplainTrial(trial))
            return reasons.then(
                lambda found: a.Explanation(lines=tuple(self._reasons(name, found)))
            )
        use = connection.store_use
        failed = (_failed(one),) if one.ends else silence
        if connection.usage is None:
            return a.Explanation(lines=(*failed, f"{name} starts"))
        held = sum(bool(amounts.resources) for amounts in connection.usage.held.values())
        ends = "" if one.ends_for is None else f"gives its slots back ({one.because}), and still "
        lines = [*failed, f"{name} {ends}runs, on {held} node{'' if held == 1 else 's'}"]
        lines += connection.status.waits if connection.status is not None else ()
        for wanted in connection.usage.wants:
            lines += self._allocator.why(name, WHOLE_NODE if wanted.is_alone else wanted.request)
        if use.waiting:
            lines.append(f"{use.waiting} of its trials wait for the store")
        if trouble := use.traffic.shown(f"the process of {name}"):
            lines.append(trouble)
        return a.Explanation(lines=tuple(lines))

    def _reasons(self, name: str, found: r.TrialExplanation) -> Iterator[str]:
        yield from found.lines
        if found.request and name in self._running:
            yield from self._allocator.why(name, found.request)

    def log(self, name: str, trial: str) -> Path | None:
        """Where a log of it is."""
        return self._folders.log(name, trial)

    def forget(self, name: str, *, with_files: bool) -> None:
        """It was removed."""
        self._details.forget(name)
        if with_files:
            self._folders.remove(name)

    def _connection(self, name: str) -> ExperimentConnection:
        one = self._running[name]
        if one.connection is None:
            raise RequestRejected(
                f"experiment {name} has no process now: {_failed(one)}"
                if one.ends
                else f"the process of {name} has just ended, and is started again."
            )
        return one.connection


def _is_steady(one: _ExperimentRun) -> bool:
    """Whether its newest process began so long ago that those before it count no more."""
    return one.began_at is not None and time.monotonic() >= one.began_at + _STEADY_S


def _trouble_kind(one: _ExperimentRun) -> str:
    if one.waits:
        return "version"
    if one.is_silent:
        return "silent"
    return "failing" if one.ends else ""


def _failed(one: _ExperimentRun) -> str:
    """How often its processes have ended in a row, why the last one did, and what happens next."""
    how_often = "once" if one.ends == 1 else f"{one.ends} times in a row"
    wait_s = max(0.0, one.restart_at - time.monotonic()) if one.connection is None else 0.0
    next_one = (
        f"It starts again in {wait_s:.0f} s." if one.connection is None else "It started again."
    )
    return f"The process of {one.name} failed {how_often}: {one.failure.rstrip('.')}. {next_one}"


def _silence(connection: ExperimentConnection) -> str:
    """What may be the reason why a process says nothing."""
    if connection.held_up_by:
        return f"its process waits for {connection.held_up_by}; all else is done"
    if connection.has_ended_search:
        return (
            "its trials are done, and on_experiment_end of its callbacks or the copying of its"
            " files takes long"
        )
    return (
        "its own code (a callback, logger, stopper, trial scheduler or search algorithm) has not"
        " returned"
    )


def _holds(one: _ExperimentRun) -> bool:
    """Whether trials of it hold anything, as far as it said."""
    return one.usage is not None and bool(one.usage.held)


def _ask(
    connection: ExperimentConnection,
    request: r.SearchRequest,
    at_its_end: Callable[[], Any] | None = None,
) -> DeferredAnswer[Any]:
    """Ask its process; if that ends before it answers, ``at_its_end`` does, where there is one."""
    deferred: DeferredAnswer[Any] = DeferredAnswer()

    def take(reply: ExperimentReply) -> None:
        kept = (
            at_its_end() if at_its_end is not None and connection.process_exit is not None else None
        )
        if kept is not None:
            deferred.resolve(kept)
        elif isinstance(reply, RequestRejection):
            deferred.reject(reply.text, is_wrong_use=reply.is_wrong_use)
        else:
            deferred.resolve(reply)

    connection.ask(request, take)
    return deferred
