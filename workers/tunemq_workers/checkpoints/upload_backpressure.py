"""`UploadBackpressure`: make trial processes wait before writing while too much is not uploaded.

A trial process asks before it writes a checkpoint. It may write at once while its trial has few
enough uncommitted checkpoints and all trials together have few enough uncommitted bytes. Otherwise
it waits in order of arrival, and the node reports that to the scheduler. Each experiment has an
equal part of these bytes: one with less never waits for others. A process that was ordered to stop
or pause never waits, so that no due checkpoint is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import msgspec

from tunemq_shared.objects.store_address import without_settings
from tunemq_shared.protocol.messages import TrialWaits, encode
from tunemq_workers.checkpoints import checkpoint_messages
from tunemq_workers.checkpoints.checkpoint_cache import CacheLimits
from tunemq_workers.checkpoints.checkpoint_messages import SaveAnswer
from tunemq_workers.checkpoints.upload_queues import UploadQueues
from tunemq_workers.runtime.reactor import Reactor, Timer, cancel
from tunemq_workers.runtime.trial_process_state import Emit, TrialKey, TrialProcess


class _PendingSave(msgspec.Struct, eq=False):
    process: TrialProcess
    cache: str
    timer: Timer | None = None
    reason: str = ""


class UploadBackpressure:
    """Answer trial processes that ask whether they may write. Owned by the node's loop.

    Args:
        timers: schedules timeouts of waiting processes.
        uploads: the uncommitted checkpoints.
        emit: takes (events stream, encoded event).
        limits: limit for uncommitted bytes; it does not apply to an experiment's only uncommitted
            checkpoint, which may be larger.
    """

    def __init__(
        self, timers: Reactor, uploads: UploadQueues, emit: Emit, limits: CacheLimits
    ) -> None:
        self._timers, self._uploads, self._emit = timers, uploads, emit
        self._limits = limits
        #: By process, its trial and the expected bytes of the checkpoint that it may write.
        self._granted: dict[str, tuple[TrialKey, int]] = {}
        self._questions: dict[str, _PendingSave] = {}

    def ask(self, process: TrialProcess, cache: str) -> None:
        """Handle a process's question whether it may write a checkpoint into ``cache``."""
        self._granted.pop(process.name, None)  # an earlier permission was not used
        self._questions[process.name] = _PendingSave(process, cache)
        self.look()

    def look(self) -> None:
        """Answer the processes that may write now, and report why others wait."""
        for question, reason in self._answerable():
            if not reason:
                self._grant(question)
            elif reason != question.reason:
                self._hold_up(question, reason)

    def is_writing(self, name: str) -> bool:
        """Return whether a process has a permission and has not reported its checkpoint yet."""
        return name in self._granted

    def written(self, name: str) -> None:
        """Note that the process has written its checkpoint."""
        self._granted.pop(name, None)

    def leave(self, name: str) -> None:
        """Forget a trial process that is gone."""
        self._granted.pop(name, None)
        question = self._questions.pop(name, None)
        if question is not None and question.timer is not None:
            question.timer.cancel()
        self.look()

    def close(self) -> None:
        """Drop all questions without an answer."""
        for question in self._questions.values():
            cancel(question.timer)
        self._questions.clear()

    def _answerable(self) -> Iterator[tuple[_PendingSave, str]]:
        """Yield each question, in order, with the reason why it must wait; "" if it need not."""
        full = set[str]()  # experiments that wait: their later questions must not overtake
        part = self._limits.uploads // max(1, self._uploads.experiments)
        for question in list(self._questions.values()):
            if question.process.is_leaving:
                yield question, ""
                continue
            if reason := self._too_many(question):
                yield question, reason
                continue
            events_key = question.process.start.events_key
            reason = "others wait for room on this node"
            if events_key not in full:
                reason = self._too_large(question, part, is_first=not full)
            if reason:
                full.add(events_key)
            yield question, reason

    def _too_many(self, question: _PendingSave) -> str:
        process, trial = question.process, question.process.trial
        count = self._uploads.count(trial)
        count += sum(1 for granted, _ in self._granted.values() if granted == trial)
        allowed = 1 + process.start.uploads_waiting
        if count < allowed:
            return ""
        if trouble := self._uploads.trouble(trial):
            return f"{count} of its checkpoints are not in the store yet: {trouble}"
        return f"{count} of its checkpoints are not in {without_settings(process.start.store)} yet"

    def _too_large(self, question: _PendingSave, part: int, *, is_first: bool) -> str:
        trial, limit = question.process.trial, self._limits.uploads
        held = self._uploads.sizes.copy()
        for granted, granted_size in self._granted.values():
            held[granted.events_key] += granted_size
        of_experiment, size = held[trial.events_key], self._uploads.last_size(trial)
        if not of_experiment or of_experiment + size <= part:
            return ""
        if is_first and held.total() + size <= limit:
            return ""
        reason = f"no more than {limit} bytes on this node may wait to be uploaded"
        trouble = self._uploads.trouble()
        return f"{reason}: {trouble}" if trouble else reason

    def _grant(self, question: _PendingSave) -> None:
        process, trial = question.process, question.process.trial
        self._granted[process.name] = trial, self._uploads.last_size(trial)
        self._answer(question, SaveAnswer(question.cache))

    def _hold_up(self, question: _PendingSave, reason: str) -> None:
        process, question.reason = question.process, reason
        if question.timer is None:
            delay_s = process.start.sync_timeout_s
            question.timer = self._timers.after(delay_s, partial(self._reject, question))
        self._say(process, "save", reason)

    def _reject(self, question: _PendingSave) -> None:
        start = question.process.start
        error = (
            f"no checkpoint could be written for {start.sync_timeout_s:g} s (sync_timeout), since "
            f"{question.reason}."
        )
        self._answer(question, SaveAnswer("", error))

    def _answer(self, question: _PendingSave, answer: SaveAnswer) -> None:
        process = question.process
        del self._questions[process.name]
        if question.timer is not None:
            question.timer.cancel()
            self._say(process, "", "")
        process.answer(checkpoint_messages.encode(answer))

    def _say(self, process: TrialProcess, what: str, reason: str) -> None:
        waits = TrialWaits(*process.key, what, reason)
        self._emit(process.start.events_key, encode(waits))
