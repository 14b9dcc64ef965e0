"""Orders that the runner gives; the loop has them carried out after the turn is journalled.

Orders to the executor say what a node is to host. Orders to callbacks (loggers,
callbacks, the table) say what has become a fact.
"""

from __future__ import annotations

import msgspec

from tunemq_shared.protocol.conditions import Horizon
from tunemq_shared.protocol.messages import (
    CheckpointCommitted,
    CheckpointRef,
    NodeLost,
    ResultReported,
    TrialFailed,
    TrialProcessDied,
    TrialStarted,
)


class Command(msgspec.Struct, frozen=True):
    """The base of all orders."""


# --- to the executor ------------------------------------------------------------------------------


class StartTrial(Command, frozen=True):
    """Host a trial on a node: a new attempt (epoch) of it.

    It goes on from the first of ``restore`` that is usable, from nothing where that is empty.
    ``time_spent_s``: its ``time_total_s`` so far, which counts towards its limit. ``devices``: its
    share of each of its GPUs, by UUID, or by number where the node did not list them.
    """

    trial: str
    attempt: int
    instance_id: str
    number: int
    config: bytes
    resources: dict[str, float]
    run_until: Horizon
    last_step: int
    restore: tuple[CheckpointRef, ...]
    time_spent_s: float = 0.0
    devices: dict[str, float] = {}


class ContinueTrial(Command, frozen=True):
    """Let a hosted trial run on to a new horizon."""

    trial: str
    attempt: int
    instance_id: str
    run_until: Horizon


class StopTrial(Command, frozen=True):
    """End a hosted trial: asked, saved if that is due, then TERM, then KILL."""

    trial: str
    attempt: int
    instance_id: str


class PauseTrial(Command, frozen=True):
    """Save a hosted trial and end its host; it goes on later, perhaps elsewhere.

    ``at_checkpoint``: what cannot save when it is asked runs on until it has saved.
    """

    trial: str
    attempt: int
    instance_id: str
    at_checkpoint: bool = False


class ReleaseTrial(Command, frozen=True):
    """The trial's host is gone: the node need not hear of it any more."""

    trial: str
    attempt: int
    instance_id: str


class ReattachTrial(Command, frozen=True):
    """A node has a slot taken for this, and may have missed orders: all of them once more.

    A host that is there goes on as if nothing had been; where there is none, and never was one, it
    is started. ``is_wanted`` is False where another attempt took over, or the trial is over:
    its host is killed. In any case its `SlotFreed` follows when nothing of it is left.
    """

    start: StartTrial
    pause: bool
    stop: bool
    is_wanted: bool
    at_checkpoint: bool = False


class DropNode(Command, frozen=True):
    """A node instance is lost and does not come back: nothing more is sent to it."""

    instance_id: str


ExecutorCommand = (
    StartTrial | ContinueTrial | StopTrial | PauseTrial | ReleaseTrial | ReattachTrial | DropNode
)

# --- to callbacks ---------------------------------------------------------------------------------
# ------------------------------------------------------------------------


class NotifyTrialAdded(Command, frozen=True):
    """A new trial exists."""

    trial: str


class NotifyTrialRevived(Command, frozen=True):
    """A trial that was over goes on; ``is_anew``: from nothing, which begins ``lineage``."""

    trial: str
    lineage: int
    is_anew: bool


class NotifyTrialStart(Command, frozen=True):
    """A host began to run the trial, on the node of this name."""

    trial: str
    started: TrialStarted
    node: str = ""


class NotifyResult(Command, frozen=True):
    """A result stands in the journal, for the first time; ``done``: it is the trial's last."""

    trial: str
    result: ResultReported
    done: bool


class NotifyCheckpoint(Command, frozen=True):
    """A checkpoint of the trial is in the store, and kept."""

    trial: str
    checkpoint: CheckpointCommitted


class NotifyFailure(Command, frozen=True):
    """An attempt failed; ``retried`` says whether the trial goes on.

    ``kind`` is the class of the failure (`tunemq_scheduler.core.failure_policy.CLASSES`), ``told``
    which one it is of how many. A lost node is one only where it ends the trial.
    """

    trial: str
    failure: TrialFailed | TrialProcessDied | NodeLost
    hostname: str
    retried: bool
    kind: str = ""
    told: str = ""


class NotifyTrialEnd(Command, frozen=True):
    """The trial is finished: ``status`` is TERMINATED or ERROR, ``reason`` says why.

    ``early``: an algorithm or a person stopped it; ``had_run``: it was neither paused nor new.
    """

    trial: str
    status: str
    reason: str
    early: bool = False
    had_run: bool = True


NotifyCommand = (
    NotifyTrialAdded
    | NotifyTrialRevived
    | NotifyTrialStart
    | NotifyResult
    | NotifyCheckpoint
    | NotifyFailure
    | NotifyTrialEnd
)

# --- to the person at the terminal ----------------------------------------------------------------


class WarnFailingNode(Command, frozen=True):
    """A node keeps failing, and nothing is placed on it for ``pause_s`` seconds.

    ``trials`` different ones failed on it in a row, the last for this ``reason``.
    """

    node: str
    hostname: str
    trials: int
    reason: str
    pause_s: float


class WarnTrialEnd(Command, frozen=True):
    """A trial ends whose process failed, or was gone, after its last result, of this ``step``.

    ``failure`` says how, on ``hostname``; None where nobody did. ``saved`` is the step of its
    newest checkpoint, 0 without.
    """

    trial: str
    failure: TrialFailed | TrialProcessDied | NodeLost | None
    hostname: str
    step: int
    saved: int


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
