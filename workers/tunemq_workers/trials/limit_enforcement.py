"""Enforces the limits of trials: time, silence, memory and number of processes.

A trial's clock stands still while its process waits for the node: for an answer to a request, for
an order at its horizon, or because the outbox is full. Clocks are read at short intervals, and each
interval counts at most double, so that no trial fails because the node or the machine was stopped
for a while.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Final, NamedTuple

import msgspec

from tunemq_shared.protocol.trial_limits import TrialLimitSpec
from tunemq_workers.logs import output_files
from tunemq_workers.processes.tree_watch import TreeWatch
from tunemq_workers.runtime import frames
from tunemq_workers.runtime.reactor import Reactor, do_nothing
from tunemq_workers.runtime.trial_process_state import TrialProcess

#: Clocks are read this often while the shortest limit runs out; then the shortest and the longest
#: interval.
_READINGS: Final = 20
_PERIODS_S: Final = (0.02, 1.0)
#: A look at a trial's processes that takes between this and twice as long ends the trial: it may
#: block such looks, and its memory would have no limit.
LOOK_S: Final = 300.0
#: How long a trial process gets to write the stacks of its threads.
DUMP_S: Final = 0.5

#: The size of the number of received orders, which `AWAIT_ORDER` carries.
_COUNT_BYTES: Final = 4
#: The requests of a trial process, and the frames that answer them.
_ANSWERS: Final = {
    frames.ASK_SAVE: frames.SAVE_ANSWER,
    frames.FETCH: frames.FETCHED,
    frames.AWAIT_ORDER: frames.ORDER,
}


class LimitExceeded(NamedTuple):
    """Why a trial process is to be killed: ``kind`` and ``error`` of a TrialFailed.

    ``is_urgent``: kill at once, without a SIGTERM first.
    """

    kind: str
    error: str
    is_urgent: bool = False


class _Clock(msgspec.Struct, eq=False):
    """The time that a trial has used.

    Attributes:
        spent_s: in all, including earlier attempts.
        step_s: since the last report or other message.
        read_at: up to when time is counted.
        has_spoken: whether a message came since then.
        orders: the number of orders sent to it.
        awaits: the frame kind that it waits for; 0 if it waits for none.
        is_late: it exceeded a limit at the last reading; its report may not have been read yet.
        found: the limit that it exceeded; its stacks are being written, and then it is killed.
    """

    process: TrialProcess
    limits: TrialLimitSpec
    spent_s: float
    read_at: float
    is_running: bool = False
    step_s: float = 0.0
    has_spoken: bool = False
    orders: int = 0
    awaits: int = 0
    is_late: bool = False
    found: LimitExceeded | None = None

    def read(self, now: float, longest_s: float, *, is_held: bool) -> None:
        """Count the time since the last reading, at most ``longest_s`` of it."""
        passed = min(now - self.read_at, longest_s)
        self.read_at = now
        if not self.is_running or self.awaits or is_held:
            return
        self.spent_s += passed
        # The message came at an unknown time since then; assume just now.
        self.step_s = 0.0 if self.has_spoken else self.step_s + passed
        self.has_spoken = False

    def excess(self) -> LimitExceeded | None:
        """Return the limit that the trial exceeded, if any."""
        limits = self.limits
        log = os.path.join(self.process.start.folder, output_files.STDERR)
        for kind, field, limit, used_s, what in (
            ("trial_limit", "trial_s", limits.trial_s, self.spent_s, "the trial took"),
            ("time_limit", "step_s", limits.step_s, self.step_s, "a step took more than"),
            ("stalled", "stall_s", limits.stall_s, self.step_s, "the trial has not reported for"),
        ):
            if limit and used_s > limit:
                return LimitExceeded(
                    kind,
                    (
                        f"{what} {used_s:.1f} s, and its limit is {limit:g} s "
                        f"(TrialLimits({field}=...)); the stacks of its threads are at the end of "
                        f"{log}."
                    ),
                )
        return None


class LimitEnforcer:
    """Enforces the limits of trial processes. Used by the node's loop only.

    Processes without limits cost nothing.

    Args:
        timers: for reading the clocks.
        process_trees: measures memory and processes.
        silence: makes the node ignore further messages of a process whose trial failed; returns
            False if the process is ending anyway.
        dump: makes a trial process write the stacks of its threads to its log.
        exceeded: called once per process that exceeded a limit, with that limit.
        now: the monotonic clock.
    """

    def __init__(
        self,
        timers: Reactor,
        process_trees: TreeWatch,
        *,
        silence: Callable[[TrialProcess], bool],
        dump: Callable[[str], object],
        exceeded: Callable[[TrialProcess, LimitExceeded], object],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timers, self._process_trees, self._dump, self._now = timers, process_trees, dump, now
        self._exceeded, self._silence = exceeded, silence
        process_trees.on_exceeded = self._has_too_much
        self._clocks: dict[str, _Clock] = {}
        self._held: dict[str, TrialProcess] = {}
        self._period_s = _PERIODS_S[1]
        self._is_reading = False
        self._full: Collection[str] = ()

    def enter(self, process: TrialProcess, emit: Callable[[bytes], object]) -> None:
        """Prepare the limits of a trial before its process runs it; ``emit`` takes its events."""
        limits, connection = process.start.limits, process.connection
        if not limits.has_times:
            connection.on_event = emit
            return
        clock = _Clock(process, limits, process.start.time_spent_s, self._now())
        self._clocks[process.name] = clock

        def heard(event: bytes) -> None:
            clock.has_spoken = True
            emit(event)

        connection.on_event = heard
        connection.on_sent = lambda kind: self._sent(clock, kind)

    def begin(self, process: TrialProcess) -> None:
        """Start to enforce the limits: the process now runs its trial."""
        if (clock := self._clocks.get(process.name)) is not None:
            clock.read_at, clock.is_running = self._now(), True
            self._read_often()
        limits = process.start.limits
        if limits.memory or limits.processes:
            self._held[process.name] = process
            self._process_trees.watch(process.name, process.pid, limits)
        if limits.memory:
            self._check_look(process)

    def heard(self, name: str, kind: int, payload: bytes) -> None:
        """Note a frame of a trial process that is not a plain event."""
        clock = self._clocks.get(name)
        if clock is None:
            return
        clock.has_spoken = True
        if kind == frames.AWAIT_ORDER and payload != clock.orders.to_bytes(_COUNT_BYTES, "big"):
            return  # the order is on its way
        if kind in _ANSWERS:
            self._read(clock)
            clock.awaits = _ANSWERS[kind]

    def is_killed_for_memory(self, process: TrialProcess) -> bool:
        """Return whether the kernel killed a process of the trial for its memory limit.

        If so, report that the limit was exceeded.
        """
        error = self._process_trees.why_killed(process.name, process.start.limits)
        if error:
            self._has_too_much(process.name, "memory", error)
        return bool(error)

    def hold(self, events_keys: Collection[str]) -> None:
        """Stop the clocks of these experiments: the node does not read their events now."""
        for clock in self._clocks.values():
            self._read(clock)
        self._full = events_keys

    def leave(self, process: TrialProcess) -> None:
        """Stop enforcing limits: the trial ended or is being ended; further calls do nothing."""
        clock = self._clocks.pop(process.name, None)
        if clock is not None:
            process.connection.on_sent = do_nothing
        if self._held.pop(process.name, None) is not None:
            self._process_trees.leave(process.name)
        if clock is not None and clock.found is not None:
            self._exceeded(process, clock.found)

    def _sent(self, clock: _Clock, kind: int) -> None:
        if kind == frames.ORDER:
            clock.orders += 1
        elif kind == frames.NEXT:
            clock.orders = 0
        if clock.awaits and kind == clock.awaits:
            self._read(clock)
            clock.awaits, clock.step_s = 0, 0.0

    def _read_often(self) -> None:
        limits = [clock.limits for clock in self._clocks.values()]
        times = [t for one in limits for t in (one.step_s, one.trial_s, one.stall_s) if t]
        shortest, longest = _PERIODS_S
        self._period_s = max(shortest, min(min(times) / _READINGS, longest))
        if not self._is_reading:
            self._is_reading = True
            self._timers.after(self._period_s, self._read_all)

    def _read_all(self) -> None:
        for clock in list(self._clocks.values()):
            self._read(clock)
            if clock.found is None:
                self._judge(clock)
        self._is_reading = bool(self._clocks)
        if self._is_reading:
            self._timers.after(self._period_s, self._read_all)

    def _read(self, clock: _Clock) -> None:
        is_held = clock.process.start.events_key in self._full
        clock.read(self._now(), 2 * self._period_s, is_held=is_held)

    def _judge(self, clock: _Clock) -> None:
        excess = clock.excess()
        was_late, clock.is_late = clock.is_late, excess is not None
        if excess is None or not was_late:
            return
        # The signal interrupts the C call in which the trial hangs, and that may then return. So
        # the verdict is final before the signal is sent, and later messages of the trial do not
        # count.
        if not self._silence(clock.process):
            self.leave(clock.process)
            return
        clock.found = excess
        self._dump(clock.process.name)
        self._timers.after(DUMP_S, partial(self._stacks_are_written, clock))

    def _stacks_are_written(self, clock: _Clock) -> None:
        if self._clocks.get(clock.process.name) is clock:
            self.leave(clock.process)

    def _check_look(self, process: TrialProcess, late_before: float | None = None) -> None:
        if self._held.get(process.name) is not process:
            return
        late = self._process_trees.late_look(process.name)
        # At two checks: after a stop of the whole machine each look is late once.
        if late is None or late != late_before:
            self._timers.after(LOOK_S, partial(self._check_look, process, late))
            return
        error = (
            f"the node could not measure the memory of the trial's processes for {LOOK_S:g} s, "
            "because the kernel waits for one of them (as for a file that does not arrive), and so "
            "could not enforce its limit (TrialLimits(memory=...))."
        )
        self._has_too_much(process.name, "memory", error)

    def _has_too_much(self, name: str, kind: str, error: str) -> None:
        process = self._held.get(name)
        if process is not None:
            self.leave(process)
            self._exceeded(process, LimitExceeded(kind, error, is_urgent=True))
