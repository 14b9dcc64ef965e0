"""`CheckpointRequests`: serve trial processes that save checkpoints to a store or restore them.

This module tracks each trial process's requests and answers. `upload_queues` uploads written
checkpoints, `upload_backpressure` decides when a process may write the next one, and
`checkpoint_fetches` gets checkpoints to restore. Trials whose store is a local folder need none of
this: their processes write into it directly.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from functools import partial
from typing import Final

from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.base.errors import StoreError, TransportError
from tunemq_shared.base.failpoints import failpoint
from tunemq_shared.checkpoints.store import check_key
from tunemq_shared.objects.store_traffic import StoreTraffic
from tunemq_shared.protocol.messages import CheckpointWritten, NodeWarned, encode
from tunemq_workers.broker.event_validation import read_written
from tunemq_workers.checkpoints import cache_disk, checkpoint_messages
from tunemq_workers.checkpoints.cache_disk import CountedBytes
from tunemq_workers.checkpoints.cache_folders import CacheFolders
from tunemq_workers.checkpoints.checkpoint_cache import (
    CachedCheckpoint,
    CacheLimits,
    CheckpointCache,
)
from tunemq_workers.checkpoints.checkpoint_fetches import CheckpointFetches
from tunemq_workers.checkpoints.checkpoint_messages import FetchAnswer, FetchCheckpoint, SaveAnswer
from tunemq_workers.checkpoints.upload_backpressure import UploadBackpressure
from tunemq_workers.checkpoints.upload_queues import UploadQueues
from tunemq_workers.runtime.disk_jobs import DiskJobs
from tunemq_workers.runtime.frames import ASK_SAVE, FETCH, FETCHED, SAVE_ANSWER
from tunemq_workers.runtime.reactor import Reactor, do_nothing
from tunemq_workers.runtime.trial_process_state import Emit, TrialKey, TrialProcess
from tunemq_workers.transfers.transfer_client import TransferClient

#: A checkpoint's size may change by so much once it is written: people may set its metadata.
_METADATA_BYTES: Final = 2**20


class _TrialClient:
    """A trial process that saves or restores checkpoints."""

    def __init__(self, process: TrialProcess) -> None:
        self.process, self.key, self.trial = process, process.key, process.trial
        self.root = ""
        #: The newest checkpoint that it wrote: the next one links to its files.
        self.newest: CachedCheckpoint | None = None
        self.written = 0

    def check_fetch(self, key: str) -> None:
        """Refuse checkpoints that a correct process would not ask for.

        The store denies a request for one that does not exist, as if it refused this node's keys.

        Raises:
            TransportError: it is neither one to restore nor the process's newest.
        """
        newest = self.newest.key if self.newest is not None else ""
        if key != newest and all(key != ref.key for ref in self.process.start.restore):
            raise TransportError(
                f"it asked for checkpoint {key}, which is neither one to restore nor its newest."
            )


class CheckpointRequests:
    """Serve the trial processes of a node. Owned by the node's loop.

    Args:
        timers: schedules timeouts of waiting processes.
        disk: runs disk jobs.
        transfers: uploads and downloads checkpoints.
        emit: takes (events stream, encoded event).
        folder: parent of the caches of experiments that name none.
        limits: limits for all caches together.
    """

    def __init__(
        self,
        timers: Reactor,
        disk: DiskJobs,
        transfers: TransferClient,
        emit: Emit,
        *,
        folder: str,
        limits: CacheLimits,
    ) -> None:
        self._disk, self._transfers, self._emit = disk, transfers, emit
        self._cache = CheckpointCache(disk, limits)
        self._folders = CacheFolders(self._cache, disk, limits, folder)
        self.uploads = UploadQueues(transfers, self._cache, emit)
        self._backpressure = UploadBackpressure(timers, self.uploads, emit, limits)
        self.uploads.on_change = self._backpressure.look
        self._fetches = CheckpointFetches(transfers, self._cache, disk, emit, on_given=self._given)
        self._guests: dict[str, _TrialClient] = {}
        #: Trials for which a count is queued, and the newest checkpoint that they wrote meanwhile.
        self._counting: dict[TrialKey, tuple[_TrialClient, CheckpointWritten] | None] = {}
        self._is_closed = False
        #: The streams that were warned about the death of the transfers process.
        self._told_of_death: set[str] = set()
        transfers.on_death = self._transfers_died

    def start(self) -> None:
        """Open the caches that an earlier node left."""
        self._folders.start()

    def close(self) -> None:
        """Cancel all transfers; uncommitted checkpoints are lost."""
        self._is_closed = True
        self._backpressure.close()
        self._transfers.close()

    # --- trial processes ------------------------------------------------------------------------

    def said(self, process: TrialProcess, kind: int, payload: bytes) -> None:
        """Handle a frame about checkpoints from a trial process.

        Raises:
            TransportError: a correct trial process would not send this.
        """
        if self._is_closed:
            return
        guest = self._guests.get(process.name)
        if guest is None:
            guest = self._guests[process.name] = _TrialClient(process)
            self.uploads.started(guest.trial, process.order.attempt)
        try:
            if kind == ASK_SAVE:
                process.asks(SAVE_ANSWER)
                self._folders.open(process.start, partial(self._ask, guest))
            elif kind == FETCH:
                process.asks(FETCHED)
                asked = checkpoint_messages.decode_fetch(payload)
                check_key(asked.ref.key)
                guest.check_fetch(asked.ref.key)
                self._folders.open(process.start, partial(self._fetch, guest, asked))
            else:
                self._written(guest, payload)
        except (*UNDECODABLE, StoreError) as problem:
            raise TransportError(
                f"what it reported about a checkpoint is impossible: {problem}"
            ) from problem

    def told(self, process: TrialProcess) -> None:
        """Let a trial process that was ordered to stop or pause write at once."""
        if process.is_leaving:
            self._backpressure.look()

    def process_gone(self, name: str) -> None:
        """Clean up after a process that ended or waits for another trial; may be called again."""
        guest = self._guests.pop(name, None)
        if guest is None:
            return
        guest.process.awaits = 0
        if self._backpressure.is_writing(name):
            folder = os.path.basename(guest.process.start.folder)
            job = partial(cache_disk.remove_strays, guest.root, folder, guest.key[1], guest.written)
            self._disk.run(guest.root, job, do_nothing)
        if guest.newest is not None:
            self._cache.release(guest.newest, name)
        self._fetches.leave(name)
        self.uploads.ended(guest.trial, guest.key[1])
        self._backpressure.leave(name)

    # --- experiments ----------------------------------------------------------------------------

    def unsettled(self) -> set[str]:
        """Return the streams of experiments that have checkpoints to upload."""
        return self.uploads.events_keys()

    @property
    def size(self) -> int:
        """Bytes that the cached copies take."""
        return self._cache.size

    @property
    def traffic(self) -> StoreTraffic:
        """Requests to stores and their results, and the bytes that wait for their upload."""
        return self._transfers.traffic.plus(StoreTraffic(queue_bytes=self.uploads.size))

    @property
    def kept(self) -> tuple[str, ...]:
        """The streams of experiments that have a cache folder."""
        return self._folders.events_keys

    def forget_all_but(
        self, used: Collection[str], acknowledged_up_to: Mapping[str, int], lost: Collection[str]
    ) -> set[str]:
        """Forget finished experiments; see `CacheFolders.forget_all_but`."""
        over = self._folders.forget_all_but(used, acknowledged_up_to, lost)
        self._told_of_death -= over
        return over

    # --- requests of trial processes ------------------------------------------------------------

    def _ask(self, guest: _TrialClient, root: str, problem: str) -> None:
        process = guest.process
        if self._guests.get(process.name) is not guest:
            return  # it ended meanwhile
        guest.root = root
        if problem:
            process.answer(checkpoint_messages.encode(SaveAnswer("", problem)))
        else:
            self._backpressure.ask(process, root)

    def _fetch(self, guest: _TrialClient, asked: FetchCheckpoint, root: str, problem: str) -> None:
        process = guest.process
        if self._guests.get(process.name) is not guest:
            return
        if problem:
            process.answer(checkpoint_messages.encode(FetchAnswer("", problem)))
        else:
            self._fetches.fetch(process, root, asked)

    def _given(self, process: TrialProcess, cached: CachedCheckpoint) -> None:
        if any(cached.key == ref.key for ref in process.start.restore):
            self.uploads.restored(process.trial, process.order.attempt, cached)

    def _written(self, guest: _TrialClient, payload: bytes) -> None:
        name, process = guest.process.name, guest.process
        said = read_written(process, payload, guest.written)
        if not self._backpressure.is_writing(name):
            raise TransportError(f"{said.key} was written without permission.")
        failpoint("node.before_written_event")
        self._emit(process.start.events_key, payload)
        failpoint("node.after_written_event")
        cached = CachedCheckpoint(guest.root, said.key, written=said.sha256)
        self._cache.add(cached)
        self._cache.use(cached, name)
        before, guest.newest, guest.written = guest.newest, cached, said.n
        if before is not None:
            self._cache.release(before, name)
        self.uploads.add(process.start, said, cached)
        self._backpressure.written(name)
        self._count(guest, said)

    def _count(self, guest: _TrialClient, said: CheckpointWritten) -> None:
        """Count a checkpoint's bytes after those of the trial's checkpoint that is being counted.

        Of several that wait, only the newest is counted: a trial may write them faster.
        """
        if guest.trial in self._counting:
            self._counting[guest.trial] = guest, said
            return
        self._counting[guest.trial] = None
        job = partial(cache_disk.count_bytes, guest.root, said.key)
        self._disk.run(guest.root, job, partial(self._counted, guest, said))

    def _counted(self, guest: _TrialClient, said: CheckpointWritten, counted: CountedBytes) -> None:
        """Correct the size that a process named for its checkpoint; a false one fails the trial."""
        newer = self._counting.pop(guest.trial)
        if newer is not None and self._cache.find(newer[0].root, newer[1].key) is not None:
            self._count(*newer)
        size = counted.size if counted.is_complete else max(counted.size, said.size)
        if size == said.size:
            return
        self.uploads.correct(guest.trial, said.key, size)
        is_false = counted.is_complete and abs(size - said.size) > _METADATA_BYTES
        if is_false and self._guests.get(guest.process.name) is guest:
            reason = f"checkpoint {said.key} has {size} bytes, and its trial's process said"
            self.uploads.on_given_up(guest.trial, f"{reason} {said.size}.")
        self._backpressure.look()

    def _transfers_died(self, why: str) -> None:
        """Warn each experiment: stores keep the parts of interrupted multipart uploads."""
        for events_key in self.uploads.events_keys() - self._told_of_death:
            self._told_of_death.add(events_key)
            warned = NodeWarned(f"{why}; uploads continue in another.", has_leftovers=True)
            self._emit(events_key, encode(warned))
