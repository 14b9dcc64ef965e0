"""`TrialSupervisor`: starts, watches and ends a node's trial processes as assignments say.

It compares each assignment with the running processes, entry by entry, so that a lost, repeated or
late one does no harm. Forkservers start and kill the processes, frame connections handle their
sockets; this module makes the decisions.

A trial process is forked, gets the order how far to run, ends (it says so, or dies), and is freed
when its process tree is gone. A reusable process is *parked* instead: its slot is free, it waits
for a trial that could have been forked in its place, and it ends when another kind of trial has to
start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from signal import SIGKILL, SIGTERM
from typing import Final

import msgspec

from tunemq_shared.base.errors import TransportError
from tunemq_shared.base.failure_text import shortened
from tunemq_shared.protocol.messages import FORKSERVER_LOST, TrialOrder, TrialSpec, encode
from tunemq_workers.broker.event_validation import EventValidator
from tunemq_workers.broker.trial_notices import TrialEvents
from tunemq_workers.checkpoints.trial_checkpoint_requests import CheckpointRequests
from tunemq_workers.forkservers.forkserver_pool import ForkserverPool
from tunemq_workers.gpu.gpu_admission import GpuAdmission
from tunemq_workers.gpu.gpu_availability import GpuAvailability
from tunemq_workers.gpu.gpu_meter import GpuMeter
from tunemq_workers.processes.forkserver_messages import SHORTAGES
from tunemq_workers.processes.tree_watch import TreeWatch
from tunemq_workers.runtime import frames
from tunemq_workers.runtime.reactor import Reactor, cancel, do_nothing
from tunemq_workers.runtime.trial_process_state import (
    AttemptId,
    TrialKey,
    TrialProcess,
    how_far,
)
from tunemq_workers.system.oom_kills import OomKills
from tunemq_workers.trials.dependencies import DependencyFetcher
from tunemq_workers.trials.limit_enforcement import LimitEnforcer, LimitExceeded

#: The time between SIGTERM for a process group and SIGKILL for the process tree.
TERM_GRACE_S: Final = 1.0
#: How long a stop waits for a trial that is saving a checkpoint, however often it saves.
_SAVE_GRACE_S: Final = 600.0
#: A trial process that closed its socket is killed if it does not exit within this time.
_CLOSED_GRACE_S: Final = 1.0
#: If SIGTERM kills a trial process, the report waits so long for the same signal to the node: a
#: machine that shuts down may send it to all processes, and then it is no failure of the trial.
_NODE_FOLLOWS_S: Final = 1.0
#: The most characters of an unreadable frame that an error shows.
_SHOWN: Final = 300
#: The most bytes that valid frames of these kinds have, with room to spare.
_LONGEST: Final = {
    frames.ASK_SAVE: 0,
    frames.AWAIT_ORDER: 16,
    frames.ENDING: frames.MAX_FROM_TRIAL_BYTES,
    frames.FETCH: 16 * 2**10,
    frames.IDLE: 0,
    frames.SAVING: 1,
    frames.WRITTEN: 16 * 2**10,
}
_OF_CHECKPOINTS: Final = frozenset({frames.ASK_SAVE, frames.FETCH, frames.WRITTEN})

_log = logging.getLogger(__name__)


class TrialSupervisor:
    """Starts, watches and ends trial processes. Used by the node's loop only.

    Args:
        reactor: for timers.
        forkservers: start and end processes.
        checkpoints: answers the checkpoint requests of trial processes.
        dependencies: fetches the blobs that trials need to start.
        emit: takes (events stream, encoded event).
        emit_result: takes the same for results, which need no further processing.
        availability: decides which GPUs may be used.
        meter: measures how trials use GPUs.
        now: the monotonic clock.
    """

    def __init__(
        self,
        reactor: Reactor,
        forkservers: ForkserverPool,
        checkpoints: CheckpointRequests,
        dependencies: DependencyFetcher,
        emit: Callable[[str, bytes], object],
        emit_result: Callable[[str, bytes], object],
        availability: GpuAvailability,
        meter: GpuMeter,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        #: Called with a trial whose process did not end by itself, and its start order.
        self.on_cut_off: Callable[[AttemptId, TrialSpec], object] = do_nothing
        #: Called with a trial that its process has left, and its start order.
        self.on_left: Callable[[AttemptId, TrialSpec], object] = do_nothing
        self._reactor, self._forkservers, self._emit = reactor, forkservers, emit
        self._now = now
        self._emit_result = emit_result
        self._trial_events = TrialEvents(emit)
        self._checkpoints, self._dependencies = checkpoints, dependencies
        checkpoints.uploads.on_given_up = self._fail
        dependencies.in_use = self._starts_in_use
        self._limits = LimitEnforcer(
            reactor,
            TreeWatch(reactor.post, forkservers.held_at_kill),
            silence=self._silence,
            dump=forkservers.dump,
            exceeded=self._exceeded,
            now=now,
        )
        self._oom_kills = OomKills(reactor)
        self._oom_kills.start()
        self._processes: dict[str, TrialProcess] = {}
        self._validators: dict[str, EventValidator] = {}
        self._running: dict[AttemptId, TrialProcess] = {}
        self._wanted: dict[AttemptId, TrialOrder] = {}
        self._starts: dict[AttemptId, TrialSpec] = {}
        self._over: set[AttemptId] = set()
        self._gate = GpuAdmission(availability, reactor, self._trial_events, self._over.add)
        self._availability, self._meter = availability, meter
        availability.on_change = self._start_missing
        self._names = 0
        self._held: Collection[str] = ()
        self._is_closed = self._has_given_up = False

    def __len__(self) -> int:
        """Return the number of trial processes whose process tree is not gone."""
        return len(self._processes)

    # --- what the scheduler wants ---------------------------------------------------------------

    def obey(self, orders: Iterable[TrialOrder], untouched: Collection[str] = ()) -> None:
        """Start, change and end trial processes until they match ``orders``.

        Args:
            untouched: the event keys of experiments whose trials continue unchanged, without
                orders.
        """
        told = {(order.trial, order.attempt): order for order in orders}
        self._wanted = self._wanted_by(untouched) | told
        self._over.intersection_update(self._wanted)  # `_gate` adds to this set, too
        self._starts = {key: start for key, start in self._starts.items() if key in self._wanted}
        for key, process in list(self._running.items()):
            if key not in self._wanted:
                self._kill(process)
        for key, order in told.items():
            if order.start is not None:
                self._starts[key] = order.start
            if key in self._running:
                self._tell(self._running[key], order)
        self._start_missing()
        for waits in (self._dependencies, self._gate):
            waits.forget_all_but(self._wanted.keys() - self._over)
        if not self._wanted:
            self._dismiss_parked()

    def reject(self, key: AttemptId, events_key: str, problem: str) -> None:
        """Report that a trial's order cannot be read.

        Its process, if it has one, is killed because `obey` gets no order for it.
        """
        reason = (
            f"its node cannot read the order for it: {problem}; check that scheduler and node "
            "have the same version"
        )
        self._trial_events.not_started(key, events_key, f"{reason} the same TuneMQ")
        if key not in self._running:
            self._trial_events.freed(key, events_key)

    def leave(self, *, at_checkpoint: bool = False) -> None:
        """Make every trial process save and end as if its trial paused; start no more.

        The scheduler did not ask for that, so it places the trial again.
        """
        self._is_closed = True
        for process in list(self._running.values()):
            self._tell(process, process.order.paused(at_checkpoint=at_checkpoint))
            if process.name not in self._processes:
                self._settle_terminated(process)
        self._dismiss_parked()

    def give_up(self) -> None:
        """Make every trial save and end while no scheduler answers; start none until one does."""
        self._has_given_up = True
        for process in list(self._running.values()):
            self._tell(process, process.order.paused())
        self._dismiss_parked()

    def go_on(self) -> None:
        """Start trials again: a scheduler answers."""
        self._has_given_up = False
        self._start_missing()

    def kill_all(self) -> None:
        """Kill every trial process and start no more."""
        self._is_closed = True
        for process in self._processes.values():
            self._kill(process)

    def hold(self, events_keys: Collection[str]) -> None:
        """Stop reading from the trial processes of these experiments, and read from all others."""
        self._held = events_keys
        self._limits.hold(events_keys)
        for process in self._processes.values():
            process.connection.hold(process.start.events_key in events_keys)

    def events_keys(self) -> set[str]:
        """Return the event streams of experiments with orders or trial processes."""
        starts = [*self._starts.values()]
        starts += [process.start for process in self._processes.values() if not process.is_parked]
        return {start.events_key for start in starts}

    def folders(self) -> set[str]:
        """Return the folders of the trials that have processes."""
        return {process.start.folder for process in self._processes.values()}

    def running_trials(self) -> list[tuple[AttemptId, TrialSpec]]:
        """Return the trials that have a process, each with its start order."""
        return [
            (process.key, process.start)
            for process in self._processes.values()
            if not process.is_parked
        ]

    # --- what trial processes say ---------------------------------------------------------------

    def said(self, name: str, kind: int, payload: bytes) -> None:
        """Handle a frame of a trial process that is not a plain event."""
        process = self._processes[name]
        if process.is_condemned:
            return
        if len(payload) > _LONGEST.get(kind, frames.MAX_FRAME_BYTES):
            problem = f"a frame of the kind {kind} has {len(payload)} bytes"
            self._reject(process, f"{problem}; at most {_LONGEST[kind]} are possible")
            return
        self._limits.heard(name, kind, payload)
        if kind == frames.ENDING:
            self._end(process, payload)
        elif kind in _OF_CHECKPOINTS and not process.is_parked:
            try:
                self._checkpoints.said(process, kind, payload)
            except TransportError as problem:
                self._reject(process, str(problem))
        elif kind == frames.SAVING:
            self._saves(process, is_saving=payload == b"\x01")
        elif kind == frames.IDLE:
            self._idle(process)
        elif kind == frames.UNREADABLE:
            said = payload[:_SHOWN].decode(errors="replace")
            self._reject(process, f"a frame of the trial's process cannot be read: {said}")
        elif kind == frames.UNREAD:
            self._reject(process, "the trial's process does not read its node's messages")
        elif kind != frames.AWAIT_ORDER:
            self._reject(process, f"the trial's process sent a frame of the unknown kind {kind}")

    def _end(self, process: TrialProcess, payload: bytes) -> None:
        """Handle a trial's message that it has ended."""
        # A trial that lost a process to the kernel reports a consequence, such as a broken pool.
        if process.has_ended or self._limits.is_killed_for_memory(process):
            return
        if self._validators[process.name].end(payload):
            process.has_ended = True
            self._over.add(process.key)
            if not process.is_given_up:
                self._escalate(process, process.start.stop_grace_s)

    def _idle(self, process: TrialProcess) -> None:
        """Handle a process's message that its trial ended and that it could run another one."""
        if process.is_killed:
            return
        has_ended = process.has_ended or process.is_given_up
        if self._limits.is_killed_for_memory(process):
            self._kill(process)
        elif process.start.reuse and has_ended and not process.is_parked:
            self._park(process)
        else:
            self._reject(process, "the trial's process said that it is free, and it is not")

    def closed(self, name: str) -> None:
        """Kill a process that closed its socket but does not exit: it no longer receives orders."""
        process = self._processes.get(name)
        if process is not None and not process.is_killed:
            self._set_timer(process, _CLOSED_GRACE_S, partial(self._forkservers.kill, name))

    # --- what forkservers say -------------------------------------------------------------------

    def forked(self, name: str, pid: int) -> None:
        """Note that a trial process was forked."""
        self._processes[name].pid = pid
        self._limits.begin(self._processes[name])
        _log.debug("trial.started trial=%s attempt=%d pid=%d", *self._processes[name].key, pid)

    def not_started(self, name: str, reason: str) -> None:
        """Report that a trial process could not be forked."""
        process = self._processes[name]
        process.connection.close()
        self._set_timer(process, None)
        if not process.is_given_up:
            self._trial_events.not_started(process.key, process.start.events_key, reason)

    def exited(self, name: str, signal: int | None, exit_code: int | None) -> None:
        """Handle the exit of a trial process."""
        process = self._processes[name]
        self._limits.is_killed_for_memory(process)  # if so, the exit is not reported
        if not self._is_unexpected_end(process):
            return
        if signal == SIGTERM:
            process.is_terminated = process.is_given_up = process.is_killed = True
        else:
            self._trial_events.died(process, signal, exit_code, self._cause_of_death(signal))

    def lost(self, name: str, reason: str) -> None:
        """Handle the death of a process's forkserver, which is not the trial's fault."""
        process = self._processes[name]
        if self._is_unexpected_end(process):
            # Any trial of this user may have killed it, also one that is ending.
            is_shared = len(self._processes) > 1
            self._trial_events.failed(process, FORKSERVER_LOST, reason, is_shared=is_shared)

    def gone(self, name: str) -> None:
        """Free a trial whose process tree is gone."""
        process = self._processes.pop(name)
        self._validators.pop(name, None)
        self._limits.leave(process)
        self._checkpoints.process_gone(name)
        self._availability.gone(name)
        if process.is_killed or process.is_condemned or not process.has_ended:
            self.on_cut_off(process.key, process.start)
        if process.is_terminated:
            settle = partial(self._settle_terminated, process)
            self._reactor.after(0.0 if self._is_closed else _NODE_FOLLOWS_S, settle)
        elif not process.is_parked:
            self._free(process)
        self._start_missing()

    # --- decisions ------------------------------------------------------------------------------

    def _wanted_by(self, events_keys: Collection[str]) -> dict[AttemptId, TrialOrder]:
        """Return the current orders of these experiments."""
        if not events_keys:
            return {}
        starts = self._starts
        return {
            key: order
            for key, order in self._wanted.items()
            if key in starts and starts[key].events_key in events_keys
        }

    def _tell(self, process: TrialProcess, order: TrialOrder) -> None:
        before, process.order = process.order, order
        process.was_to_pause |= order.pause or order.stop
        if order.kill:
            self._kill(process)
        if process.has_ended or process.is_given_up:
            return
        if order.stop:
            process.is_given_up = True
            process.saves_until = self._now() + _SAVE_GRACE_S
            process.connection.send(frames.ORDER, _encoded(order))
            self._escalate(process, self._stop_grace_s(process))
        elif how_far(order) != how_far(before):
            # A trial that is to pause may end its step and save, without a limit of time.
            process.connection.send(frames.ORDER, _encoded(order))
        self._checkpoints.told(process)

    def _saves(self, process: TrialProcess, *, is_saving: bool) -> None:
        """Note that a process begins or ends a save; one that is to stop gets time for it."""
        process.is_saving = is_saving
        if process.is_stopping and self._now() < process.saves_until:
            self._escalate(process, self._stop_grace_s(process))

    def _stop_grace_s(self, process: TrialProcess) -> float:
        """Return how long a process that is to stop may take to end, or to save, from now on."""
        left_s = process.saves_until - self._now()
        return max(left_s if process.is_saving else 0.0, process.start.stop_grace_s)

    def _fail(self, trial: TrialKey, reason: str) -> None:
        """Fail a trial whose checkpoints cannot be kept, if it has a process."""
        for process in list(self._running.values()):
            if process.trial == trial and not (process.has_ended or process.is_given_up):
                self._condemn(process, "storage", reason)
                self._kill(process)

    def _reject(self, process: TrialProcess, problem: str) -> None:
        """Fail a trial whose process sent an invalid message, and kill the process."""
        problem = shortened(problem)
        if process.is_killed:  # sent before it was killed
            return
        _log.error(
            "trial.rejected process=%s trial=%s problem=%r", process.name, process.key[0], problem
        )
        if not (process.has_ended or process.is_given_up):
            text = f"the node refused what the trial's process sent: {problem.rstrip('.')}."
            self._condemn(process, "metric", text)
        process.connection.on_event = do_nothing
        self._kill(process)

    def _exceeded(self, process: TrialProcess, excess: LimitExceeded) -> None:
        """Fail a trial that exceeded a limit; one that took too long is silenced already."""
        if not excess.is_urgent:
            self._say_failed(process, excess.kind, excess.error)
            self._escalate(process, 0.0)
            return
        if not (process.has_ended or process.is_given_up):
            self._condemn(process, excess.kind, excess.error)
        self._kill(process)

    def _condemn(self, process: TrialProcess, kind: str, reason: str) -> None:
        """Report a trial as failed while its process still runs."""
        self._silence(process)
        self._say_failed(process, kind, reason)

    def _silence(self, process: TrialProcess) -> bool:
        """Ignore a process whose trial failed; return False if it was ending anyway."""
        if process.has_ended or process.is_given_up:
            return False
        process.connection.on_event = do_nothing
        process.has_ended = process.is_given_up = process.is_condemned = True
        self._over.add(process.key)
        return True

    def _say_failed(self, process: TrialProcess, kind: str, reason: str) -> None:
        _log.warning("trial.failed process=%s kind=%s reason=%r", process.name, kind, reason)
        self._trial_events.failed(process, kind, reason)

    def _is_unexpected_end(self, process: TrialProcess) -> bool:
        """Note the exit of a trial process; return whether its trial should have continued."""
        process.connection.drain()  # its last messages precede the report of its death;
        process.connection.close()  # those of its children would follow it
        self._limits.leave(process)
        self._set_timer(process, None)
        self._over.add(process.key)
        return not (process.has_ended or process.is_given_up or process.is_parked)

    def _settle_terminated(self, process: TrialProcess) -> None:
        """Free a trial that SIGTERM killed; report that as a failure unless the node ends, too."""
        if process.is_terminated:
            process.is_terminated = False
            if not self._is_closed:
                self._trial_events.died(process, SIGTERM, None, "")
            self._free(process)

    def _cause_of_death(self, number: int | None) -> str:
        """Return ``memory`` if the kernel probably killed it for lack of memory, else ""."""
        return "memory" if number == SIGKILL and self._oom_kills.is_recent() else ""

    def _escalate(self, process: TrialProcess, grace_s: float) -> None:
        """Let a process end by itself for ``grace_s`` seconds; then SIGTERM, then SIGKILL."""

        def term() -> None:
            _log.warning("trial.terminated process=%s trial=%s", process.name, process.order.trial)
            self._forkservers.term(process.name)
            self._set_timer(process, TERM_GRACE_S, partial(self._forkservers.kill, process.name))

        self._set_timer(process, grace_s, term)

    def _kill(self, process: TrialProcess) -> None:
        if not process.is_killed:
            process.is_given_up = process.is_killed = True
            self._set_timer(process, None)
            self._forkservers.kill(process.name)

    def _park(self, process: TrialProcess) -> None:
        process.is_parked = True
        self._limits.leave(process)
        self._checkpoints.process_gone(process.name)
        self._over.add(process.key)
        self._set_timer(process, None)
        self._free(process)
        self._start_missing()
        if not self._wanted:
            self._dismiss_parked()

    def _free(self, process: TrialProcess) -> None:
        self._running.pop(process.key, None)
        self._over.add(process.key)
        if (used := self._meter.left(process)) is not None:
            self._emit(process.start.events_key, encode(used))
        if not self._is_closed or process.has_ended or process.order.stop:
            # Otherwise it ended with its node, and the scheduler learns that from the
            # deregistration.
            self._trial_events.freed(process.key, process.start.events_key)
        self.on_left(process.key, process.start)
        _log.debug("trial.left trial=%s attempt=%d", *process.key)

    def _starts_in_use(self) -> list[TrialSpec]:
        """Return the start orders of trials that have a process or wait for one."""
        return [*self._starts.values(), *(process.start for process in self._processes.values())]

    def _start_missing(self) -> None:
        """Start each wanted trial that has no process and has not ended."""
        if self._is_closed or self._has_given_up:
            return
        missing = [
            order
            for key, order in self._wanted.items()
            if key not in self._running and key not in self._over and key in self._starts
        ]
        to_fork = [(order, start) for order in missing if (start := self._to_fork(order))]
        if not to_fork:
            return
        # Parked processes hold resources that a new one needs: they end first, and it starts then.
        self._dismiss_parked()
        if any(process.is_parked for process in self._processes.values()):
            return
        for order, start in to_fork:
            self._fork(order, start)

    def _to_fork(self, order: TrialOrder) -> TrialSpec | None:
        """Return the start of a trial that needs a new process now; None if it needs none yet."""
        key = order.trial, order.attempt
        start = self._starts[key]
        if order.stop or order.kill:  # ended before it began; free its slot
            self._over.add(key)
            self._trial_events.freed(key, start.events_key)
            return None
        local = self._dependencies.find(key, start)
        if local is None:
            self._fetch(key, start)
            return None
        start = local
        process = next((process for process in self._parked() if process.could_run(start)), None)
        if process is None or self._gate.is_withheld(start):
            return None if self._gate.is_shut(key, start) else start
        process.order, process.start = order, start
        process.has_ended = process.is_given_up = process.is_parked = process.is_saving = False
        process.was_to_pause = order.pause
        self._enter(process)
        self._limits.begin(process)
        process.connection.hold(start.events_key in self._held)
        process.connection.send(frames.NEXT, _encoded(order, start))
        self._running[key] = process
        return None

    def _fetch(self, key: AttemptId, start: TrialSpec) -> None:
        """Fetch the missing blobs of a trial; it starts when all are here."""

        def failed(reason: str, kind: str) -> None:
            self._over.add(key)
            self._trial_events.not_started(key, start.events_key, reason, kind)
            self._trial_events.freed(key, start.events_key)

        has_trouble = partial(self._trial_events.waits, key, start.events_key, "code")
        self._dependencies.fetch(key, start, self._start_missing, failed, has_trouble)

    def _fork(self, order: TrialOrder, start: TrialSpec) -> None:
        key = order.trial, order.attempt
        self._names += 1
        name = f"h{self._names}"
        try:
            full = msgspec.structs.replace(order, start=start)
            connection = self._forkservers.start(name, full, self)
        except OSError as problem:
            self._over.add(key)
            is_short = problem.errno in SHORTAGES
            if is_short:  # perhaps other trials use up what it needs
                reason, kind = f"this node has no room for its process: {problem}", FORKSERVER_LOST
            else:
                reason = f"its environment cannot be started: {problem}; see RunConfig(python=...)"
                kind = "start"
            self._trial_events.not_started(
                key, start.events_key, reason, kind, is_shared=is_short and bool(self._processes)
            )
            self._trial_events.freed(key, start.events_key)
            return
        connection.hold(start.events_key in self._held)
        self._processes[name] = self._running[key] = process = TrialProcess(
            name, order, start, connection, was_to_pause=order.pause
        )
        self._availability.took(process)
        self._enter(process)

    def _enter(self, process: TrialProcess) -> None:
        events = EventValidator(
            process, self._emit, self._emit_result, partial(self._reject, process)
        )
        self._validators[process.name] = events
        self._limits.enter(process, events.take)
        self._meter.began(process)

    def _parked(self) -> list[TrialProcess]:
        return [
            process
            for process in self._processes.values()
            if process.is_parked and not process.is_dismissed and not process.is_killed
        ]

    def _dismiss_parked(self) -> None:
        """Let parked processes clean up what they keep for a next trial, and end."""
        for process in self._parked():
            process.is_dismissed = True
            process.connection.send(frames.LEAVE, b"")
            self._escalate(process, process.start.stop_grace_s)

    def _set_timer(
        self, process: TrialProcess, delay_s: float | None, call: Callable[[], None] | None = None
    ) -> None:
        cancel(process.timer)
        process.timer = None
        if delay_s is not None and call is not None:
            process.timer = self._reactor.after(delay_s, call)


def _encoded(order: TrialOrder, start: TrialSpec | None = None) -> bytes:
    return encode(msgspec.structs.replace(order, start=start))
