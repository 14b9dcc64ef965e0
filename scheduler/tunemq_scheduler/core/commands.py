"""Orders that the runner gives; the loop has them carried out after the turn is journalled.

Orders to the executor say what a node is to host. Orders to the record keepers (loggers, callbacks,
the table) say what has become a fact.
"""

from __future__ import annotations

import msgspec

from tunemq_shared.conditions import Horizon
from tunemq_shared.messages import (
    CheckpointCommitted,
    CheckpointRef,
    HostDied,
    ResultReported,
    TrialFailed,
    TrialStarted,
)


class Command(msgspec.Struct, frozen=True):
    """The base of all orders."""


# --- to the executor ------------------------------------------------------------------------------


class StartTrial(Command, frozen=True):
    """Host a trial on a node: a new incarnation (epoch) of it.

    It goes on from the first of ``restore`` that is usable, from nothing where that is empty.
    """

    trial: str
    epoch: int
    incarnation: str
    number: int
    config: bytes
    resources: dict[str, float]
    run_until: Horizon
    last_step: int
    restore: tuple[CheckpointRef, ...]


class ContinueTrial(Command, frozen=True):
    """Let a hosted trial run on to a new horizon."""

    trial: str
    epoch: int
    incarnation: str
    run_until: Horizon


class StopTrial(Command, frozen=True):
    """End a hosted trial: asked, saved if that is due, then TERM, then KILL."""

    trial: str
    epoch: int
    incarnation: str


class PauseTrial(Command, frozen=True):
    """Save a hosted trial and end its host; it goes on later, perhaps elsewhere."""

    trial: str
    epoch: int
    incarnation: str


class ReleaseTrial(Command, frozen=True):
    """The trial's host is gone: the node need not hear of it any more."""

    trial: str
    epoch: int
    incarnation: str


class DropNode(Command, frozen=True):
    """A node incarnation is lost: nothing more is sent to it."""

    incarnation: str


ExecutorCommand = StartTrial | ContinueTrial | StopTrial | PauseTrial | ReleaseTrial | DropNode

# --- to the record keepers ------------------------------------------------------------------------


class RecordTrialAdded(Command, frozen=True):
    """A new trial exists."""

    trial: str


class RecordStart(Command, frozen=True):
    """A host began to run the trial."""

    trial: str
    started: TrialStarted


class RecordResult(Command, frozen=True):
    """A result stands in the journal, for the first time; ``done``: it is the trial's last."""

    trial: str
    result: ResultReported
    done: bool


class RecordCheckpoint(Command, frozen=True):
    """A checkpoint of the trial is in the store, and kept."""

    trial: str
    checkpoint: CheckpointCommitted


class RecordFailure(Command, frozen=True):
    """An incarnation failed; ``retried`` says whether the trial goes on."""

    trial: str
    failure: TrialFailed | HostDied
    hostname: str
    retried: bool


class RecordEnd(Command, frozen=True):
    """The trial is finished: ``status`` is TERMINATED or ERROR, ``reason`` says why.

    ``early``: an algorithm or a person stopped it.
    """

    trial: str
    status: str
    reason: str
    early: bool = False


RecordCommand = (
    RecordTrialAdded | RecordStart | RecordResult | RecordCheckpoint | RecordFailure | RecordEnd
)

# --- to the store ---------------------------------------------------------------------------------


class DeleteCheckpoint(Command, frozen=True):
    """A checkpoint is no longer kept: its manifest goes, then its objects but those in ``keep``.

    ``keep`` are names in its own folder that manifests of other checkpoints refer to.
    """

    trial: str
    key: str
    keep: tuple[str, ...] = ()


class DeleteObjects(Command, frozen=True):
    """Objects of checkpoints that are gone, to which nobody refers any longer."""

    keys: tuple[str, ...]
