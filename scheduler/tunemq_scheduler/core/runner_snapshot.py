"""Serializes the state of an experiment for resuming, and reads it again.

``load(dump(runner))`` behaves as the runner would have. A dump omits the summaries of ended trials,
which the caller stores separately, so its size depends on live trials only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from tunemq_scheduler.core.checkpoints.checkpoint_book import CheckpointBookState
from tunemq_scheduler.core.nodes.away_nodes import AwayNode
from tunemq_scheduler.core.nodes.failing_nodes import NodeFailures
from tunemq_scheduler.core.nodes.slots import SlotTableState
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.runner_state import RunnerState
from tunemq_scheduler.core.trials.kept_checkpoints import (
    CheckpointManager,
    RetentionPolicy,
    TrialCheckpoint,
)
from tunemq_scheduler.core.trials.trial import STORY_LENGTH, Trial
from tunemq_scheduler.core.trials.waiting_trials import PassedOverLines
from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.base.errors import JournalError
from tunemq_shared.protocol import messages as m

#: The format version that `dump` writes; `restore` rejects others.
STATE_VERSION: Final = 1


class _State(msgspec.Struct, kw_only=True):
    version: int
    settings: RunnerSettings
    live: list[Trial]
    pending: list[str]
    paused: list[str]
    counts: dict[str, int]
    nodes: list[m.NodeJoined]
    away: list[tuple[str, AwayNode]]
    health: list[tuple[str, NodeFailures]]
    aside: dict[str, float]
    slots: SlotTableState
    book: CheckpointBookState
    elapsed: float
    run: int
    cold_run: int
    attempts_from: int
    suggested: int
    exhausted: bool
    stopping: str
    interrupted: str
    stale: int
    repeated: int
    acknowledged: dict[str, int]
    cursor: str
    offers: dict[str, m.NodeOffered]
    giving_way: dict[str, float]
    alone: dict[str, str]
    passed_over: PassedOverLines


class _Version(msgspec.Struct):
    version: int


def _read(kind: type, items: list[Any]) -> CheckpointManager | deque[m.Message]:
    if kind is not CheckpointManager:
        return deque(msgspec.convert(items, list[m.Event]), STORY_LENGTH)
    checkpoints = CheckpointManager(RetentionPolicy())
    checkpoints.take_back(msgspec.convert(items, list[TrialCheckpoint]))
    return checkpoints


_encode = msgspec.msgpack.Encoder(enc_hook=list).encode
_decode = msgspec.msgpack.Decoder(_State, dec_hook=_read).decode
_version_of = msgspec.msgpack.Decoder(_Version).decode
#: Attributes of the same name in `RunnerState` and `_State`, copied unchanged.
_SAME: Final = frozenset(_State.__struct_fields__) - {
    *("version", "settings", "live", "pending", "paused", "passed_over"),
    *("nodes", "away", "health", "slots", "book"),
}


def dump(runner: RunnerState) -> bytes:
    """Serialize the state for `load`, without the summaries of ended trials."""
    pending, paused = runner.queue.dumped()
    return _encode(
        _State(
            version=STATE_VERSION,
            settings=runner.settings,
            live=list(runner.live.values()),
            pending=pending,
            paused=paused,
            nodes=list(runner.nodes.values()),
            away=list(runner.away.items()),
            health=runner.health.state(),
            slots=runner.slots.dumped(),
            book=runner.book.dumped(),
            passed_over=runner.queue.passed_over(),
            **{name: getattr(runner, name) for name in _SAME},
        )
    )


def restore(runner: RunnerState, state: bytes, finished: Mapping[str, bytes]) -> None:
    """Restore the state of a fresh runner from ``state``.

    Args:
        runner: a new runner, changed in place.
        state: the bytes from `dump`.
        finished: the summaries of ended trials that were stored beside it.

    Raises:
        JournalError: another version wrote the state.
    """
    try:
        version = _version_of(state).version
        if version != STATE_VERSION:
            raise JournalError(
                f"the snapshot's state is of version {version}, this TuneMQ reads {STATE_VERSION}."
            )
        read = _decode(state)
    except UNDECODABLE as error:
        raise JournalError(f"the snapshot's state cannot be read: {error}.") from error
    runner.settings = read.settings
    for name in _SAME:
        setattr(runner, name, getattr(read, name))
    for trial in read.live:
        trial.checkpoints.rule = read.settings.keep
        runner.live[trial.trial_id] = trial
        if trial.inherited is not None and trial.awaits_state:
            runner.awaited.setdefault(trial.inherited.source, {})[trial.trial_id] = None
    runner.finished.update(
        (trial, packed) for trial, packed in finished.items() if trial not in runner.live
    )
    runner.nodes.update((node.instance_id, node) for node in read.nodes)
    runner.away.update(read.away)
    runner.health.load(read.health)
    runner.slots.take_back(read.slots)
    runner.book.take_back(read.book)
    for node in runner.away:
        runner.leave_behind(node)
    live = runner.live
    runner.queue.take_back(
        [live[trial] for trial in read.pending],
        [live[trial] for trial in read.paused],
        read.passed_over,
        read.elapsed,
    )
