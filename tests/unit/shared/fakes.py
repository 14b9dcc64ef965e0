"""The surroundings of a trial in memory: a channel, a checkpoint sink and a session on both."""

from __future__ import annotations

import os
import shutil
from collections import deque
from pathlib import Path

from tunemq_shared.base.errors import CheckpointCorrupt
from tunemq_shared.protocol.messages import (
    BlobRef,
    CheckpointCommitted,
    CheckpointDamaged,
    CheckpointRef,
    CheckpointWritten,
    Environment,
    NodeEvent,
    ResultReported,
    TrialFailed,
    TrialOrder,
    TrialSpec,
    decode_node_event,
    encode,
)
from tunemq_shared.protocol.result_conditions import TO_THE_END, Condition, Horizon
from tunemq_shared.trial.trial_channel import TrialChannel
from tunemq_shared.trial.trial_session import TrialSession


class MemoryChannel(TrialChannel):
    """Keeps the messages as the receiver decodes them, and returns the orders of the test."""

    def __init__(self) -> None:
        self.sent: list[NodeEvent] = []
        self.notices: deque[TrialOrder] = deque()
        self.waited_for: deque[TrialOrder] = deque()
        self.saving: list[bool] = []

    def saves(self, *, is_saving: bool) -> None:
        self.saving.append(is_saving)

    def send(self, event: NodeEvent) -> None:
        self.sent.append(decode_node_event(encode(event)))

    def poll(self) -> TrialOrder | None:
        return self.notices.popleft() if self.notices else None

    def wait(self) -> TrialOrder:
        if not self.waited_for:
            raise EOFError("the trial waits for an order that will not come")
        return self.waited_for.popleft()

    @property
    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.sent]

    @property
    def results(self) -> list[ResultReported]:
        return [event for event in self.sent if isinstance(event, ResultReported)]

    @property
    def checkpoints(self) -> list[CheckpointWritten | CheckpointCommitted]:
        kinds = CheckpointWritten | CheckpointCommitted
        return [event for event in self.sent if isinstance(event, kinds)]

    @property
    def damages(self) -> list[tuple[str, str]]:
        events = (event for event in self.sent if isinstance(event, CheckpointDamaged))
        return [(event.key, event.instead) for event in events]

    @property
    def failure(self) -> TrialFailed:
        (failed,) = (event for event in self.sent if isinstance(event, TrialFailed))
        return failed


class MemorySink:
    """Copies checkpoints below ``root``, or raises ``error`` if it is set.

    It is a store itself, or with ``is_cache`` a cache of one; ``damaged`` lists the keys of
    damaged checkpoints.
    """

    def __init__(self, root: Path, *, is_cache: bool = False) -> None:
        self.root = root
        self.is_cache = is_cache
        self.damaged: set[str] = set()
        self.opened: list[CheckpointRef] = []
        self.states: dict[str, dict] = {}
        self.metrics: dict[str, dict] = {}
        self.error: Exception | None = None

    def when_available(self, call) -> None:
        call()

    def make_folder(self, folder) -> None:
        os.makedirs(folder, exist_ok=True)

    def save(self, source, info) -> CheckpointWritten | CheckpointCommitted:
        if self.error is not None:
            raise self.error
        key = f"trial/{info.attempt}-{info.n}"
        shutil.copytree(source, self.root / key)
        self.states[key], self.metrics[key] = info.state, info.metrics
        kind = CheckpointWritten if self.is_cache else CheckpointCommitted
        return kind("t1", info.attempt, info.n, info.step, key, "sha", 1)

    def get(self, ref: CheckpointRef, target: Path):
        if self.error is not None:
            raise self.error
        self.opened.append(ref)
        if ref.key in self.damaged:
            raise CheckpointCorrupt(f"checkpoint {ref.key}: model is damaged.")
        shutil.copytree(self.root / ref.key, target, copy_function=shutil.copyfile)
        return self.states[ref.key]


def start(folder: Path, **changes) -> TrialSpec:
    folder.mkdir(parents=True, exist_ok=True)
    fields = {
        "experiment": "exp",
        "events_key": "tunemq:events:exp",
        "trial_name": "train_00000",
        "trial_number": 0,
        "folder": str(folder),
        "code": BlobRef("sha", 0, ""),
        "config": b"",
        "resources": {"cpu": 1.0},
        "environment": Environment("python", (), {}, ()),
        "store": "",
    }
    return TrialSpec(**(fields | changes))


class World:
    """One trial's surroundings; `session` begins a new attempt with the state of the last one."""

    def __init__(self, folder: Path, *, has_cache: bool = False) -> None:
        self.folder = folder
        self.channel = MemoryChannel()
        self.sink = MemorySink(folder / "store", is_cache=has_cache)
        self.attempt = 0

    def session(
        self, config: dict | None = None, run_until: Horizon = TO_THE_END, **changes
    ) -> TrialSession:
        self.attempt += 1
        began = start(self.folder / "trial", **changes)
        order = TrialOrder("t1", self.attempt, run_until, start=began)
        return TrialSession(order, config or {}, self.channel, self.sink)

    def restored(self, **changes) -> TrialSession:
        kept = reversed(self.channel.checkpoints)
        refs = tuple(CheckpointRef(event.key, event.sha256, event.step) for event in kept)
        return self.session(restore=refs, **changes)

    def touched_when_sent(self, name: str) -> Path:
        """Return a path at which a file appears as soon as the trial sends a message."""
        file, sent = self.folder / name, self.channel.send

        def send(event: NodeEvent) -> None:
            sent(event)
            file.touch()

        self.channel.send = send
        return file

    def order(self, run_until: Horizon = TO_THE_END, **told: bool) -> TrialOrder:
        return TrialOrder("t1", self.attempt, run_until, **told)


def up_to(step: int) -> Horizon:
    return (Condition("training_iteration", step),)
