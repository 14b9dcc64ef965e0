"""`UploadQueues`: the checkpoints that a node wrote and has not committed, in a queue per trial.

A checkpoint is written, waits, is in flight, and is committed. If its upload is given up, it is
lost, and so are all later ones of the same trial in the queue. The node uploads a trial's
checkpoints one after another in the order of writing, over all its attempts on this node, and
different trials' in parallel.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

import msgspec

from tunemq_shared.base.failpoints import failpoint
from tunemq_shared.checkpoints.manifest import COMMITTED
from tunemq_shared.protocol import messages
from tunemq_workers.checkpoints.checkpoint_cache import CachedCheckpoint, CheckpointCache
from tunemq_workers.runtime.reactor import do_nothing
from tunemq_workers.runtime.transfer_messages import UploadCheckpoint, UploadResult
from tunemq_workers.runtime.trial_process_state import Emit, TrialKey
from tunemq_workers.transfers.transfer_client import TransferClient

_log = logging.getLogger(__name__)


class _WrittenCheckpoint(msgspec.Struct, eq=False):
    said: messages.CheckpointWritten
    #: Bytes of its files: as its process named them, until the node has counted them.
    size: int
    cached: CachedCheckpoint
    start: messages.TrialSpec


class _TrialQueue(msgspec.Struct, eq=False):
    """One trial's queue; its first checkpoint is in flight if ``transfer`` is set."""

    key: TrialKey
    waiting: deque[_WrittenCheckpoint] = msgspec.field(default_factory=deque)
    transfer: int | None = None
    #: For each attempt, the checkpoint that it committed last and the one that it was restored
    #: from. The scheduler keeps the restored one until the attempt's first commit, and then the
    #: committed one, so uploads may refer to their objects.
    committed: dict[int, CachedCheckpoint] = {}
    restored: dict[int, CachedCheckpoint] = {}
    #: Attempts that have a trial process, and those of them that lost a checkpoint.
    started: set[int] = set()
    given_up: set[int] = set()
    trouble: str = ""
    last_size: int = 0

    def base(self, attempt: int) -> CachedCheckpoint | None:
        """Return the checkpoint whose objects an upload of this attempt may refer to."""
        base = self.committed.get(attempt) or self.restored.get(attempt)
        return base if base is not None and base.sha256 and not base.is_gone else None


class UploadQueues:
    """Upload the checkpoints that trial processes write. Owned by the node's loop.

    Args:
        transfers: performs the uploads.
        cache: contains the checkpoints.
        emit: takes (events stream, encoded event).
    """

    def __init__(self, transfers: TransferClient, cache: CheckpointCache, emit: Emit) -> None:
        #: Called after a commit or loss, and when the state of an upload changes.
        self.on_change: Callable[[], object] = do_nothing
        #: Takes a trial that must fail because its checkpoints cannot be uploaded, and the reason.
        self.on_given_up: Callable[[TrialKey, str], object] = do_nothing
        #: Bytes of all files of uncommitted checkpoints, by events stream.
        self.sizes = Counter[str]()
        self._transfers, self._cache, self._emit = transfers, cache, emit
        self._queues: dict[TrialKey, _TrialQueue] = {}

    @property
    def size(self) -> int:
        """Bytes of all files of uncommitted checkpoints."""
        return self.sizes.total()

    @property
    def experiments(self) -> int:
        """The number of experiments that have running trials or checkpoints to upload."""
        return len({key.events_key for key in self._queues})

    def events_keys(self) -> set[str]:
        """Return the streams of the experiments that have checkpoints to upload."""
        return {key.events_key for key, queue in self._queues.items() if queue.waiting}

    def count(self, trial: TrialKey) -> int:
        """Return how many checkpoints of a trial are written and not committed."""
        queue = self._queues.get(trial)
        return len(queue.waiting) if queue else 0

    def trouble(self, trial: TrialKey | None = None) -> str:
        """Say why the upload of a trial, or of any trial, is delayed; "" if it is not."""
        queues = self._queues.values() if trial is None else [self._queues[trial]]
        return next((queue.trouble for queue in queues if queue.trouble), "")

    def last_size(self, trial: TrialKey) -> int:
        """Return the bytes of the newest checkpoint of a running trial; 0 before its first."""
        return self._queues[trial].last_size

    # --- trial processes ------------------------------------------------------------------------

    def started(self, trial: TrialKey, attempt: int) -> None:
        """Note that this attempt has a trial process; may be called again."""
        queue = self._queues.setdefault(trial, _TrialQueue(trial))
        queue.started.add(attempt)

    def restored(self, trial: TrialKey, attempt: int, cached: CachedCheckpoint) -> None:
        """Note that a running attempt begins from this checkpoint."""
        self._queues[trial].restored[attempt] = cached

    def ended(self, trial: TrialKey, attempt: int) -> None:
        """Note that the attempt's trial process is gone."""
        queue = self._queues.get(trial)
        if queue is not None:
            queue.started.discard(attempt)
            self._tidy(queue)

    # --- checkpoints ----------------------------------------------------------------------------

    def add(
        self, start: messages.TrialSpec, said: messages.CheckpointWritten, cached: CachedCheckpoint
    ) -> None:
        """Upload this checkpoint of a running trial after the earlier ones."""
        queue = self._queues[TrialKey(start.events_key, said.trial)]
        written = _WrittenCheckpoint(said, said.size, cached, start)
        if said.attempt in queue.given_up:  # the process has not ended yet
            self._lose(queue, written, "its trial has lost a checkpoint before this one.")
            return
        queue.waiting.append(written)
        queue.last_size = said.size
        self.sizes[start.events_key] += said.size
        self._begin(queue)

    def correct(self, trial: TrialKey, key: str, size: int) -> None:
        """Set the size of a checkpoint whose process named another one."""
        queue = self._queues.get(trial)
        if queue is None:
            return
        queue.last_size = size
        for written in queue.waiting:
            if written.said.key == key:
                self.sizes[trial.events_key] += size - written.size
                written.size = size

    def _begin(self, queue: _TrialQueue) -> None:
        if queue.transfer is not None or not queue.waiting:
            return
        written = queue.waiting[0]
        said, start = written.said, written.start
        base = queue.base(said.attempt)
        if base is not None:
            self._cache.use(base, _user(said))
        upload = UploadCheckpoint(
            start.store,
            said.key,
            os.path.join(written.cached.root, said.key),
            "" if base is None else os.path.join(base.root, base.key, COMMITTED),
            start.sync_timeout_s,
            "" if base is None else base.sha256,
        )
        queue.transfer = self._transfers.start(
            upload,
            partial(self._committed, queue, base),
            partial(self._given_up, queue, base),
            partial(self._has_trouble, queue),
        )

    def _committed(
        self, queue: _TrialQueue, base: CachedCheckpoint | None, uploaded: UploadResult | None
    ) -> None:
        assert uploaded is not None  # the transfers process reports it for each upload
        written = self._end(queue, base)
        said = written.said
        failpoint("node.before_commit_event")
        committed = messages.CheckpointCommitted(
            said.trial,
            said.attempt,
            said.n,
            said.step,
            said.key,
            uploaded.sha256,
            uploaded.size,
            uploaded.shared,
        )
        self._emit(queue.key.events_key, messages.encode(committed))
        failpoint("node.after_commit_event")
        _log.info("checkpoint.committed key=%s sent=%d", said.key, uploaded.sent)
        self._cache.commit(written.cached, uploaded.sha256)
        queue.committed[said.attempt] = written.cached
        queue.last_size = uploaded.size  # counted; before, the trial process's claim
        self._begin(queue)
        self._tidy(queue)
        self.on_change()

    def _given_up(
        self, queue: _TrialQueue, base: CachedCheckpoint | None, reason: str, _is_corrupt: bool
    ) -> None:
        """Give up the trial's queue: checkpoints are committed in order or not at all."""
        written = self._end(queue, base)
        key = written.said.key
        text = f"checkpoint {key} could not be uploaded: {reason}"
        _log.error("checkpoint.lost key=%s reason=%r", key, reason)
        self._lose(queue, written, reason)
        while queue.waiting:
            behind = queue.waiting.popleft()
            self.sizes[queue.key.events_key] -= behind.size
            self._lose(queue, behind, f"it waited behind {key}, which is lost")
        queue.given_up |= queue.started
        self.on_given_up(queue.key, text)
        self._tidy(queue)
        self.on_change()

    def _has_trouble(self, queue: _TrialQueue, reason: str) -> None:
        queue.trouble = reason
        self.on_change()

    def _end(self, queue: _TrialQueue, base: CachedCheckpoint | None) -> _WrittenCheckpoint:
        written = queue.waiting.popleft()
        self.sizes[queue.key.events_key] -= written.size
        queue.transfer, queue.trouble = None, ""
        if base is not None:
            self._cache.release(base, _user(written.said))
        return written

    def _lose(self, queue: _TrialQueue, written: _WrittenCheckpoint, reason: str) -> None:
        said = written.said
        lost = messages.CheckpointLost(said.trial, said.attempt, said.key, reason, time.time())
        self._emit(queue.key.events_key, messages.encode(lost))
        self._cache.lose(written.cached)

    def _tidy(self, queue: _TrialQueue) -> None:
        """Forget attempts that have no process and no checkpoint to upload."""
        left = queue.started | {written.said.attempt for written in queue.waiting}
        for of_attempt in (queue.committed, queue.restored):
            for attempt in of_attempt.keys() - left:
                del of_attempt[attempt]
        queue.given_up &= queue.started
        if not left:
            self._queues.pop(queue.key, None)
            self.sizes = +self.sizes  # an experiment without such checkpoints needs no entry


def _user(said: messages.CheckpointWritten) -> str:
    return f"upload of {said.key}"
