"""`LogWatch`: search trial output that decides how the scheduler handles failures.

The log scanner, a separate process, searches for two things: the patterns of log policies, in all
output; and reports that a GPU ran out of memory, in the last output of a GPU trial that died
without saying so itself. The last output matters most. So `LogWatch` holds the event of a failure,
and all later events of the attempt, until that output was searched: a LogMatched precedes its
TrialFailed or TrialProcessDied.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, TypeAlias

import msgspec

from tunemq_shared.protocol import messages
from tunemq_shared.trainable.resource_names import GPU, GPU_MEMORY
from tunemq_shared.trial.memory_errors import CUDA_MEMORY, is_of_a_child
from tunemq_workers.logs import scanner_messages
from tunemq_workers.processes.child_process import ChildProcess
from tunemq_workers.processes.child_supervisor import ChildSupervisor
from tunemq_workers.runtime.reactor import Reactor, Timer, cancel
from tunemq_workers.runtime.trial_process_state import AttemptId, Emit

#: Seconds for which a failure waits for the search of its output. Normally that takes milliseconds;
#: the limit is for hanging file systems and overloaded machines.
TIMEOUT_S: Final = 20.0
#: Seconds without work after which the node ends the scanner.
_IDLE_S: Final = 60.0

_Ended: TypeAlias = (
    messages.TrialFailed
    | messages.TrialProcessDied
    | messages.TrialFinished
    | messages.TrialPaused
    | messages.SlotFreed
)
#: The tags of events that an attempt began, failed, or ended.
BEGINS: Final = b"started"
FAILS: Final = frozenset({b"failed", b"died"})
_IS_OVER: Final = frozenset({b"finished", b"paused", b"freed"})
#: The first byte of a msgpack array whose length is in the next two bytes.
_ARRAY_16: Final = b"\xdc"

_log = logging.getLogger(__name__)


class _WatchedAttempt(msgspec.Struct, eq=False):
    """An attempt whose output may matter."""

    id: int
    events_key: str
    key: AttemptId
    output: scanner_messages.AttemptOutput
    has_gpu: bool
    told: set[str] = set()
    #: The event of its failure and all later ones, while the output is being searched.
    held: list[bytes] = []
    asks_memory: bool = False
    timer: Timer | None = None


class LogWatch:
    """Pass events on, with the results of searching trials' output. Never blocks.

    Args:
        reactor: runs the callbacks.
        start: starts a log scanner.
        children: the pids of the node's own children; receives the scanner's.
        emit: takes (events stream, encoded event).
        warn: takes (events stream, text for people).
    """

    def __init__(
        self,
        reactor: Reactor,
        *,
        start: Callable[[], ChildProcess],
        children: set[int],
        emit: Emit,
        warn: Callable[[str, str], object],
    ) -> None:
        #: Returns the trials that have a trial process.
        self.running_trials: Callable[[], Iterable[tuple[AttemptId, messages.TrialSpec]]] = tuple
        self._reactor, self._emit, self._warn = reactor, emit, warn
        self._ids = itertools.count(1)
        self._followed: dict[int, _WatchedAttempt] = {}
        self._by_key: dict[tuple[str, AttemptId], _WatchedAttempt] = {}
        self._warned: set[tuple[str, str]] = set()
        self._idle: Timer | None = None
        self._is_ending = False
        self._child = ChildSupervisor(
            reactor,
            "log scanner",
            start,
            children,
            on_up=self._tell_all,
            decode=scanner_messages.decode_answer,
            on_answer=self._answered,
            on_end=self._child_ended,
        )

    @property
    def is_holding(self) -> bool:
        """Whether events of ended trial processes are still held."""
        return any(one.held for one in self._followed.values())

    def hold_no_more(self) -> None:
        """Release held events, and hold none from now on, because the node is about to end.

        Failures are still reported, but without a search of the last output.
        """
        self._is_ending = True
        for followed in [one for one in self._followed.values() if one.held]:
            self._release(followed, is_cuda_memory=False)

    def close(self) -> None:
        """End the scanner; held events are dropped."""
        self._child.close()

    def emit(self, events_key: str, event: bytes) -> None:
        """Pass on an event of a trial process, or of the node about one, in order."""
        tag = tag_of(event)
        if tag == BEGINS:
            self._emit(events_key, event)
            self._begin(events_key, event)
        elif self._followed and (tag in FAILS or tag in _IS_OVER):
            self._end(events_key, event)
        else:
            self._emit(events_key, event)

    # --- attempts -----------------------------------------------------------------------------

    def _begin(self, events_key: str, event: bytes) -> None:
        started: messages.TrialStarted = messages.decode_node_event(event)
        key = (started.trial, started.attempt)
        starts = (start for one, start in self.running_trials() if one == key)
        start = next((one for one in starts if one.events_key == events_key), None)
        if start is None or (events_key, key) in self._by_key:
            return
        has_gpu = bool(start.devices) or any(start.resources.get(one) for one in (GPU, GPU_MEMORY))
        if not (start.log_patterns or has_gpu):
            return
        output = scanner_messages.AttemptOutput(
            events_key, start.folder, started.printed, start.log_patterns
        )
        followed = _WatchedAttempt(next(self._ids), events_key, key, output, has_gpu)
        self._followed[followed.id] = self._by_key[events_key, key] = followed
        if output.patterns:
            self._order(followed)

    def _end(self, events_key: str, event: bytes) -> None:
        ended = messages.decode_node_event(event)
        followed = None
        if isinstance(ended, _Ended):
            followed = self._by_key.get((events_key, (ended.trial, ended.attempt)))
        if followed is None:
            self._emit(events_key, event)
            return
        if followed.held:
            followed.held.append(event)
            return
        if self._is_ending:
            self._forget(followed)
        elif isinstance(ended, messages.TrialFailed | messages.TrialProcessDied):
            followed.asks_memory = followed.has_gpu and _may_be_memory(ended)
            if followed.asks_memory or followed.output.patterns:
                self._hold(followed, event)
                return
        else:
            self._forget(followed)
        self._emit(events_key, event)

    def _hold(self, followed: _WatchedAttempt, event: bytes) -> None:
        followed.held.append(event)
        followed.timer = self._reactor.after(TIMEOUT_S, partial(self._is_late, followed))
        self._order(followed)

    def _release(self, followed: _WatchedAttempt, *, is_cuda_memory: bool) -> None:
        """Pass on the held events and forget the attempt."""
        cancel(followed.timer)
        held, followed.held = followed.held, []
        if is_cuda_memory:
            held[0] = _as_cuda_memory(held[0])
        for event in held:
            self._emit(followed.events_key, event)
        self._forget(followed)

    def _is_late(self, followed: _WatchedAttempt) -> None:
        folder = followed.output.folder
        _log.error("log_scanner.late folder=%s patience=%s", folder, TIMEOUT_S)
        self._warn(
            followed.events_key,
            (
                f"The output in {folder} could not be read within {TIMEOUT_S:g} s; no log policy "
                "was applied to it."
            ),
        )
        self._release(followed, is_cuda_memory=False)
        self._child.end("it did not answer")

    def _forget(self, followed: _WatchedAttempt) -> None:
        del self._followed[followed.id], self._by_key[followed.events_key, followed.key]
        if self._child.is_up:
            self._child.send(scanner_messages.encode(scanner_messages.ForgetOutput(followed.id)))
        if not self._followed:
            cancel(self._idle)
            self._idle = self._reactor.after(_IDLE_S, self._rest)

    def _rest(self) -> None:
        if not self._followed:
            self._warned.clear()
            self._child.end("it had nothing to do")

    # --- the process ------------------------------------------------------------------------------

    def _order(self, followed: _WatchedAttempt) -> None:
        """Order a search; if there is no scanner, start it and order later."""
        if not self._child.is_up:
            self._child.start_if_none()
        elif followed.held:
            finish = scanner_messages.FinishOutput(
                followed.id, followed.output, followed.asks_memory
            )
            self._child.send(scanner_messages.encode(finish))
        elif followed.output.patterns:
            self._child.send(
                scanner_messages.encode(scanner_messages.FollowOutput(followed.id, followed.output))
            )

    def _tell_all(self) -> None:
        for followed in list(self._followed.values()):
            self._order(followed)

    def _child_ended(self, why: str) -> None:
        if any(one.held or one.output.patterns for one in self._followed.values()):
            _log.warning("log_scanner.again why=%r", why)
            self._child.start_if_none()

    def _answered(self, said: scanner_messages.LogAnswer) -> None:
        followed = self._followed.get(said.id)
        if followed is None:
            return
        match said:
            case scanner_messages.LineMatched(_, pattern, line):
                if pattern not in followed.told:  # an earlier scanner may have found it
                    followed.told.add(pattern)
                    matched = messages.LogMatched(*followed.key, pattern, line, time.time())
                    self._emit(followed.events_key, messages.encode(matched))
            case scanner_messages.PatternDropped(_, pattern, reason):
                if (followed.events_key, pattern) not in self._warned:
                    self._warned.add((followed.events_key, pattern))
                    text = f"The log policy {pattern!r} is not applied on this node: {reason}."
                    self._warn(followed.events_key, text)
            case scanner_messages.OutputFinished(_, is_cuda_memory):
                self._release(followed, is_cuda_memory=is_cuda_memory)


def tag_of(event: bytes) -> bytes:
    """Return an event's tag without decoding its other fields, as most events are results."""
    at = 3 if event.startswith(_ARRAY_16) else 1
    head = event[at : at + 1]  # a short string: its length is in the low bits
    return event[at + 1 : at + 1 + (head[0] & 0x1F)] if head else b""


def _may_be_memory(failure: messages.TrialFailed | messages.TrialProcessDied) -> bool:
    """Return whether lack of GPU memory may explain a failure that does not name its cause."""
    if isinstance(failure, messages.TrialProcessDied):
        return not failure.cause
    return failure.kind == "user" and is_of_a_child(failure.error)


def _as_cuda_memory(event: bytes) -> bytes:
    failure = messages.decode_node_event(event)
    if isinstance(failure, messages.TrialProcessDied):
        return messages.encode(msgspec.structs.replace(failure, cause=CUDA_MEMORY))
    if isinstance(failure, messages.TrialFailed):
        return messages.encode(msgspec.structs.replace(failure, kind=CUDA_MEMORY))
    return event
