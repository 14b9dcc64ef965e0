"""A node's checkpoint handling with real folders, and fake trial processes."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tests.unit.workers.fakes import Clock, FakeConnection, FakeDisk, FakeTransfers, order, start
from tunemq_shared.checkpoints.checkpoint_sink import checkpoint_key
from tunemq_shared.checkpoints.local_store import LocalCheckpointStore
from tunemq_shared.checkpoints.manifest import CheckpointInfo
from tunemq_shared.protocol.messages import (
    CheckpointCommitted,
    CheckpointLost,
    CheckpointRef,
    CheckpointWritten,
    TrialWaits,
    decode_node_event,
    encode,
)
from tunemq_workers.checkpoints import checkpoint_messages
from tunemq_workers.checkpoints.checkpoint_cache import CacheLimits
from tunemq_workers.checkpoints.checkpoint_messages import FetchCheckpoint
from tunemq_workers.checkpoints.trial_checkpoint_requests import CheckpointRequests
from tunemq_workers.runtime import frames
from tunemq_workers.runtime.trial_process_state import TrialProcess

STORE = "s3://bucket/exp?endpoint=http://127.0.0.1:9"
KEY = "tunemq:events:exp"


class World:
    """The checkpoints of a node, with surroundings that a test controls."""

    def __init__(self, folder, *, cache_bytes=2**30, uploads_bytes=2**30, disk_bytes=0):
        self.folder = folder
        self.cache_bytes = cache_bytes
        self.limits = CacheLimits(cache_bytes, uploads_bytes, disk_bytes)
        self.clock = Clock()
        self.said = []
        self.given_up = []
        self._names = 0
        self.begin()

    def begin(self, *, settles=True):
        """Start the node; ``settles`` lets it open the folders that it finds."""
        self.disk, self.transfers = FakeDisk(), FakeTransfers()
        self.checkpoints = CheckpointRequests(
            self.clock,
            self.disk,
            self.transfers,
            lambda key, event: self.said.append((key, decode_node_event(event))),
            folder=str(self.folder / "node"),
            limits=self.limits,
        )
        self.checkpoints.uploads.on_given_up = lambda trial, reason: self.given_up.append(
            (trial, reason)
        )
        self.checkpoints.start()
        if settles:
            self.disk.settle()

    @property
    def cache(self):
        return self.checkpoints._cache

    def process(self, trial="t", attempt=1, *, restore=(), waiting=1, **how):
        """Return a trial process; ``waiting`` checkpoints may wait behind the one in flight."""
        self._names += 1
        how = {"key": KEY, "store": STORE, "sync_timeout_s": 60.0, **how}
        begin = start(folder=f"/f/{trial}", restore=restore, uploads_waiting=waiting, **how)
        return FakeTrialProcess(self, f"h{self._names}", trial, attempt, begin)

    def events(self, *kinds):
        return [event for _, event in self.said if not kinds or isinstance(event, kinds)]

    def keys(self, kind, trial="t"):
        return [event.key for event in self.events(kind) if event.trial == trial]

    @property
    def written(self):
        return self.keys(CheckpointWritten)

    @property
    def committed(self):
        return self.keys(CheckpointCommitted)

    @property
    def lost(self):
        return self.keys(CheckpointLost)

    @property
    def waits(self):
        return [(event.what, event.reason) for event in self.events(TrialWaits)]

    def finish(self, key):
        self.transfers.finish(key)
        self.disk.settle()

    def fail(self, key, *how, **more):
        self.transfers.fail(key, *how, **more)
        self.disk.settle()

    def on_disk(self):
        """Return the keys of the checkpoints in the folder that the node chose."""
        return [
            key
            for root in sorted((self.folder / "node").iterdir())
            for key in LocalCheckpointStore(root).list_checkpoints()
        ]


class FakeTrialProcess:
    """The process of one trial, which sends what a real one sends."""

    def __init__(self, world, name, trial, attempt, begin):
        self._world = world
        self.connection = FakeConnection()
        self.process = TrialProcess(name, order(trial, attempt=attempt), begin, self.connection)
        self.trial, self.attempt, self.n = trial, attempt, 0
        self.previous = None
        self.is_waiting = False

    def _said(self, kind, payload=b"", *, settle=True):
        self._world.checkpoints.said(self.process, kind, payload)
        if settle:
            self._world.disk.settle()

    @property
    def answers(self):
        return [answer for _, answer in self.connection.sent]

    def ask(self):
        """Request space for a checkpoint; return whether the node grants it."""
        asked = len(self.connection.sent)
        self._said(frames.ASK_SAVE)
        return len(self.connection.sent) > asked

    def write(self, content=b"x" * 10, *, said_size=None, settle=True, **files):
        """Write a checkpoint to the granted path, report it and return its key.

        Args:
            said_size: the reported size in bytes, if it differs from the real one.
            settle: whether the disk is done with the node's jobs afterwards.
        """
        cache = self.answers[-1].cache
        source = self._world.folder / f"source-{self.trial}"
        source.mkdir(exist_ok=True)
        for name, data in {"weights": content, **files}.items():
            (source / name).write_bytes(data)
        self.n += 1
        key = checkpoint_key(self.trial, self.attempt, self.n)
        info = CheckpointInfo(
            trial=self.trial, attempt=self.attempt, n=self.n, step=self.n, metrics={}, state={}
        )
        Path(cache).mkdir(parents=True, exist_ok=True)
        store = LocalCheckpointStore(cache, durable=False, linking=True)
        put = store.put_checkpoint(key, source, info, base=self.previous)
        self.previous = key
        self._said(
            frames.WRITTEN,
            encode(
                CheckpointWritten(
                    self.trial,
                    self.attempt,
                    self.n,
                    self.n,
                    key,
                    put.sha256,
                    put.size if said_size is None else said_size,
                )
            ),
            settle=settle,
        )
        return key

    def save(self, content=b"x" * 10, **files):
        """Request space and write a checkpoint; the node must grant the space."""
        assert self.ask(), "there is no space"
        return self.write(content, **files)

    def fetch(self, ref, *, again=False):
        """Request a checkpoint and return the answer, if there is one."""
        asked = len(self.connection.sent)
        self._said(frames.FETCH, checkpoint_messages.encode(FetchCheckpoint(ref, again)))
        return self.answers[-1] if len(self.connection.sent) > asked else None

    def told(self, **how):
        self.process.order = order(self.trial, attempt=self.attempt, **how)
        self._world.checkpoints.told(self.process)
        self._world.disk.settle()

    def die(self):
        self._world.checkpoints.process_gone(self.process.name)
        self._world.disk.settle()


def committed_ref(world, key):
    """Return a reference to a committed checkpoint."""
    event = next(event for event in world.events(CheckpointCommitted) if event.key == key)
    return CheckpointRef(key, event.sha256, event.step)


def written_ref(world, key):
    """Return a reference to a written checkpoint."""
    event = next(event for event in world.events(CheckpointWritten) if event.key == key)
    return CheckpointRef(key, "", event.step, event.sha256)


def elsewhere(world, key="s/checkpoint_1-000007"):
    """Return a reference to a checkpoint that another node has committed."""
    world.transfers.store[key] = b"a manifest"
    return CheckpointRef(key, hashlib.sha256(b"a manifest").hexdigest(), 7)
