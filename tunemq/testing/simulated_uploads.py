"""`SimulatedUploads`: simulated nodes' uncommitted checkpoints, and their uploads to the store."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable

import msgspec

from tunemq.testing.simulated_store import SimulatedStore
from tunemq_scheduler.core.commands import StartTrial
from tunemq_shared.base.errors import BugError
from tunemq_shared.protocol import messages as m


class UploadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How checkpoints reach the store; without `upload_s` trial processes write them directly.

    Attributes:
        upload_s: the longest duration of an upload in seconds; each takes a random part of it.
        lost: the fraction of uploads that fail for good.
        damaged: the fraction of checkpoints that are damaged when a trial process restores them.
        unchanged: the fraction of uploads that refer to the previous object and send nothing.
    """

    upload_s: float = 0.0
    lost: float = 0.0
    damaged: float = 0.0
    unchanged: float = 0.0


#: (delay, action, arguments): schedule an action.
At = Callable[..., None]
#: (node, events): a node reports these.
Report = Callable[..., None]


class SimulatedUploads:
    """One upload queue for each trial on each node, as on a real node.

    Args:
        on_room: called with trial and node when an upload of the trial has ended.
        on_given_up: called with trial, node and reason.
        store: receives committed checkpoints, and must have those that trials restore; None
            disables this.
    """

    def __init__(
        self,
        settings: UploadSettings,
        seed: int,
        *,
        at: At,
        report: Report,
        on_slot_free: Callable[[str, str], None],
        on_given_up: Callable[[str, str, str], None],
        store: SimulatedStore | None = None,
    ) -> None:
        self._settings = settings
        self._seed = seed
        self._at, self._report = at, report
        self._on_slot_free, self._on_given_up = on_slot_free, on_given_up
        self._store = store
        self._queues: dict[tuple[str, str], deque[m.CheckpointWritten]] = {}
        #: The object to which each attempt's next upload may refer.
        self._bases: dict[tuple[str, int], str] = {}
        #: The checkpoint that holds each committed checkpoint's object.
        self._carriers: dict[str, str] = {}
        self._lost: set[str] = set()

    def waiting(self, trial: str, node: str) -> int:
        """Return how many of the trial's checkpoints on this node are uncommitted."""
        return len(self._queues.get((trial, node), ()))

    def usable(self, order: StartTrial) -> tuple[m.CheckpointRef | None, list[m.CheckpointDamaged]]:
        """Return an order's first usable checkpoint, and the damage reports of those before it.

        Raises:
            BugError: the node neither has it nor can get it.
        """
        damaged: list[m.CheckpointDamaged] = []
        for place, ref in enumerate(order.restore):
            queue = self._queues.get((order.trial, order.instance_id), ())
            is_here = any(written.key == ref.key for written in queue)
            # It may have been committed, or lost, while the order was in transit.
            is_lost = ref.key in self._lost or (not is_here and self._is_missing(ref))
            if not (ref.sha256 or is_here or is_lost or ref.key in self._carriers):
                raise BugError(f"{ref.key} is neither in the store nor on {order.instance_id}")
            is_damaged = self._chance("damaged", ref.key) < self._settings.damaged
            if not (is_damaged or is_lost):
                self._bases[order.trial, order.attempt] = ref.key
                return ref, damaged
            instead = order.restore[place + 1].key if place + 1 < len(order.restore) else ""
            damaged.append(
                m.CheckpointDamaged(order.trial, order.attempt, ref.key, "simulated", instead)
            )
        return None, damaged

    def save(
        self, trial: str, attempt: int, step: int, node: str
    ) -> m.CheckpointWritten | m.CheckpointCommitted:
        """Save a checkpoint of a trial process; return the events to report."""
        key = f"{trial}/checkpoint_{attempt}-{step:06d}"
        if not self._settings.upload_s:
            committed = m.CheckpointCommitted(trial, attempt, step, step, key, "simulated", 1)
            self._put(committed)
            return committed
        written = m.CheckpointWritten(trial, attempt, step, step, key, "written", 1)
        queue = self._queues.setdefault((trial, node), deque())
        queue.append(written)
        if len(queue) == 1:
            self._begin(trial, node)
        return written

    def node_died(self, node: str) -> None:
        """Forget everything that only this node had."""
        for trial, other in list(self._queues):
            if other == node:
                del self._queues[trial, other]

    def _begin(self, trial: str, node: str) -> None:
        written = self._queues[trial, node][0]
        seconds = self._settings.upload_s * self._chance("upload", written.key)
        self._at(seconds, self._done, trial, node, written)

    def _done(self, trial: str, node: str, written: m.CheckpointWritten) -> None:
        queue = self._queues.get((trial, node))
        if queue is None:
            return
        queue.popleft()
        if self._chance("lost", written.key) < self._settings.lost:
            self._give_up(trial, node, written)
            return
        self._report(node, self._committed(written))
        if queue:
            self._begin(trial, node)
        else:
            del self._queues[trial, node]
        self._on_slot_free(trial, node)

    def _committed(self, written: m.CheckpointWritten) -> m.CheckpointCommitted:
        key = carrier = written.key
        base = self._bases.get((written.trial, written.attempt))
        if base is not None and self._chance("unchanged", key) < self._settings.unchanged:
            carrier = self._carriers.get(base, base)
        self._carriers[key] = carrier
        self._bases[written.trial, written.attempt] = key
        shared = (f"{carrier}/object",) if carrier != key else ()
        fields = (written.trial, written.attempt, written.n, written.step, key, "simulated", 1)
        committed = m.CheckpointCommitted(*fields, shared)
        self._put(committed)
        return committed

    def _put(self, committed: m.CheckpointCommitted) -> None:
        if self._store is not None:
            self._store.put(committed)

    def _is_missing(self, ref: m.CheckpointRef) -> bool:
        """Return whether a checkpoint was removed from the store, so that it cannot be restored."""
        return self._store is not None and not self._store.has(ref.key)

    def _give_up(self, trial: str, node: str, written: m.CheckpointWritten) -> None:
        """Give up an upload and, as on a real node, all uploads behind it."""
        lost = [written, *self._queues.pop((trial, node))]
        self._lost.update(one.key for one in lost)
        reason = f"{written.key} could not be uploaded"
        told = [m.CheckpointLost(trial, one.attempt, one.key, reason, 0.0) for one in lost]
        self._report(node, *told)
        self._on_given_up(trial, node, reason)

    def _chance(self, *what: str) -> float:
        drawn = hashlib.blake2b(f"{self._seed}/{'/'.join(what)}".encode(), digest_size=8)
        return int.from_bytes(drawn.digest()) / 2**64
