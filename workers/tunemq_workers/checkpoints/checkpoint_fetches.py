"""`CheckpointFetches`: get checkpoints for trial processes that restore them, from cache or store.

A checkpoint is downloaded once, however many trial processes wait for it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial

import msgspec

from tunemq_shared.protocol.messages import CheckpointRef, TrialWaits, encode
from tunemq_workers.checkpoints import cache_disk, checkpoint_messages
from tunemq_workers.checkpoints.checkpoint_cache import CachedCheckpoint, CheckpointCache
from tunemq_workers.checkpoints.checkpoint_messages import FetchAnswer, FetchCheckpoint
from tunemq_workers.runtime.disk_jobs import DiskJobs
from tunemq_workers.runtime.transfer_messages import DownloadCheckpoint
from tunemq_workers.runtime.trial_process_state import Emit, TrialProcess
from tunemq_workers.transfers.transfer_client import TransferClient

_log = logging.getLogger(__name__)


class _PendingFetch(msgspec.Struct, eq=False):
    process: TrialProcess
    root: str
    ref: CheckpointRef
    #: Hash of its manifest in the store.
    sha256: str
    transfer: int | None = None
    reason: str = ""


class _Download(msgspec.Struct, eq=False):
    """Requests for one download; ``is_clear``: the target path is free, so it may run."""

    questions: dict[str, _PendingFetch] = {}
    is_clear: bool = False


class CheckpointFetches:
    """Answer trial processes that request a checkpoint. Owned by the node's loop.

    Args:
        transfers: downloads checkpoints.
        cache: the checkpoints on disk; a process's checkpoints stay until `leave`.
        disk: clears target paths.
        emit: takes (events stream, encoded event).
        on_given: takes the trial process and the checkpoint that it received.
    """

    def __init__(
        self,
        transfers: TransferClient,
        cache: CheckpointCache,
        disk: DiskJobs,
        emit: Emit,
        *,
        on_given: Callable[[TrialProcess, CachedCheckpoint], object],
    ) -> None:
        self._transfers, self._cache, self._disk, self._emit = transfers, cache, disk, emit
        self._on_given = on_given
        self._arrivals: dict[tuple[str, str], _Download] = {}
        self._given: dict[str, list[CachedCheckpoint]] = {}

    def fetch(self, process: TrialProcess, root: str, asked: FetchCheckpoint) -> None:
        """Get the checkpoint into the folder ``root`` and answer the trial process."""
        ref = asked.ref
        sha256 = ref.sha256 or self._cache.committed_as(root, ref.key)
        cached = self._cache.find(root, ref.key)
        if cached is not None and not cached.is_lost:
            # Another process may have found the same damage, after which the copy was replaced.
            is_damaged = asked.again and cached in self._given.get(process.name, ())
            if cached.fits(ref) and not is_damaged:
                self._give(process, ref, cached)
                return
            if not cached.sha256:
                what = "is damaged" if is_damaged else "is not the one that was asked for"
                self._reject(process, f"checkpoint {ref.key} {what}, and is not in the store yet.")
                return
            _log.warning("cache.discarded key=%s process=%s", ref.key, process.name)
            self._cache.discard(cached)
        if not sha256:
            self._reject(process, f"checkpoint {ref.key} was never committed, and is not here.")
        else:
            self._await(_PendingFetch(process, root, ref, sha256))

    def leave(self, name: str) -> None:
        """Release the checkpoints of a trial process that is gone, and cancel its requests."""
        for cached in self._given.pop(name, ()):
            self._cache.release(cached, name)
        for arrival in self._arrivals.values():
            question = arrival.questions.pop(name, None)
            if question is not None and question.transfer is not None:
                self._transfers.cancel(question.transfer)
        self._arrivals = {
            place: arrival
            for place, arrival in self._arrivals.items()
            if arrival.questions or not arrival.is_clear
        }

    def _await(self, question: _PendingFetch) -> None:
        place = question.root, question.ref.key
        arrival = self._arrivals.get(place)
        if arrival is None:
            arrival = self._arrivals[place] = _Download()
            job = partial(cache_disk.remove, *place)
            failed = partial(self._no_place, place)
            self._disk.run(question.root, job, lambda _: self._clear(place), failed)
        arrival.questions[question.process.name] = question
        if arrival.is_clear:
            self._order(question)

    def _clear(self, place: tuple[str, str]) -> None:
        """Begin the downloads after the target path became free."""
        arrival = self._arrivals[place]
        arrival.is_clear = True
        if not arrival.questions:
            del self._arrivals[place]
        for question in arrival.questions.values():
            self._order(question)

    def _no_place(self, place: tuple[str, str], problem: OSError) -> None:
        for question in self._arrivals.pop(place).questions.values():
            self._answer(question, FetchAnswer("", str(problem)))

    def _order(self, question: _PendingFetch) -> None:
        # Each process has its own timeout; `TransferClient` performs equal downloads once.
        start, ref = question.process.start, question.ref
        folder = os.path.join(question.root, ref.key)
        question.transfer = self._transfers.start(
            DownloadCheckpoint(start.store, ref.key, question.sha256, folder, start.sync_timeout_s),
            partial(self._arrived, question),
            partial(self._failed, question),
            partial(self._has_trouble, question),
        )

    def _arrived(self, question: _PendingFetch, _uploaded: object) -> None:
        root, ref = question.root, question.ref
        self._settle(question)
        cached = self._cache.find(root, ref.key)
        if cached is None:
            _log.info("checkpoint.downloaded key=%s", ref.key)
            cached = CachedCheckpoint(
                root, ref.key, sha256=question.sha256, users={question.process.name}
            )
            self._cache.add(cached)
        self._say_that_it_continues(question)
        self._give(question.process, ref, cached)

    def _failed(self, question: _PendingFetch, reason: str, is_corrupt: bool) -> None:
        self._settle(question)
        if not is_corrupt:
            reason = f"checkpoint {question.ref.key} could not be downloaded: {reason}"
        self._answer(question, FetchAnswer("", reason, is_corrupt))

    def _has_trouble(self, question: _PendingFetch, reason: str) -> None:
        if reason:
            question.reason = reason
            self._say(question.process, "restore", reason)
        else:
            self._say_that_it_continues(question)

    def _settle(self, question: _PendingFetch) -> None:
        place = question.root, question.ref.key
        questions = self._arrivals[place].questions
        del questions[question.process.name]
        if not questions:
            del self._arrivals[place]

    def _give(self, process: TrialProcess, ref: CheckpointRef, cached: CachedCheckpoint) -> None:
        self._cache.use(cached, process.name)
        self._given.setdefault(process.name, []).append(cached)
        self._on_given(process, cached)
        answer = FetchAnswer(cached.root, sha256="" if ref.sha256 else cached.sha256)
        process.answer(checkpoint_messages.encode(answer))

    def _reject(self, process: TrialProcess, error: str) -> None:
        answer = FetchAnswer("", error, is_corrupt=True)
        process.answer(checkpoint_messages.encode(answer))

    def _answer(self, question: _PendingFetch, answer: FetchAnswer) -> None:
        self._say_that_it_continues(question)
        question.process.answer(checkpoint_messages.encode(answer))

    def _say_that_it_continues(self, question: _PendingFetch) -> None:
        if question.reason:
            question.reason = ""
            self._say(question.process, "", "")

    def _say(self, process: TrialProcess, what: str, reason: str) -> None:
        self._emit(process.start.events_key, encode(TrialWaits(*process.key, what, reason)))
