"""Commands of the runner; the loop executes them after it has journalled the turn.

Commands to the executor say what a node must run. Commands to callbacks (loggers, user callbacks,
the table) report what the journal now contains.
"""

from __future__ import annotations

import msgspec

from tunemq_scheduler.core.trial_decisions import TrialDecision
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.result_conditions import Horizon


class Command(msgspec.Struct, frozen=True):
    """The base class of all commands."""


# --- to the executor ------------------------------------------------------------------------------


class StartTrial(Command, frozen=True):
    """Start a new attempt of a trial on a node.

    The trial restores the first usable checkpoint of ``restore``, or begins from scratch if that is
    empty.

    Attributes:
        time_spent_s: the trial's ``time_total_s`` so far, in seconds; it counts towards the time
            limit.
        devices: the trial's share of each of its GPUs, by UUID, or by number if the node did not
            list UUIDs.
        is_complete: ``last_step`` is the trial's last: it only runs again to save that checkpoint.
    """

    trial: str
    attempt: int
    instance_id: str
    number: int
    config: bytes
    resources: dict[str, float]
    run_until: Horizon
    last_step: int
    restore: tuple[m.CheckpointRef, ...]
    time_spent_s: float = 0.0
    devices: dict[str, float] = {}
    is_complete: bool = False


class ContinueTrial(Command, frozen=True):
    """Let a running trial continue up to a new horizon."""

    trial: str
    attempt: int
    instance_id: str
    run_until: Horizon


class StopTrial(Command, frozen=True):
    """End a running trial: request it, let it save if a checkpoint is due, then TERM, then KILL."""

    trial: str
    attempt: int
    instance_id: str


class PauseTrial(Command, frozen=True):
    """Save a trial and end its process; the trial resumes later, perhaps on another node.

    ``at_checkpoint``: a trial that cannot save on request runs until its next checkpoint.
    """

    trial: str
    attempt: int
    instance_id: str
    at_checkpoint: bool = False


class ReleaseTrial(Command, frozen=True):
    """Tell the node to forget a trial whose process is gone."""

    trial: str
    attempt: int
    instance_id: str


class ReattachTrial(Command, frozen=True):
    """Repeat all commands of an attempt that holds a slot of a node, which may have missed some.

    An existing trial process continues undisturbed; the node starts one if there never was one.
    ``is_wanted`` is False if another attempt replaced this one or the trial has ended: the node
    then kills the process. In each case the node sends `SlotFreed` once nothing of the attempt is
    left.
    """

    start: StartTrial
    pause: bool
    stop: bool
    is_wanted: bool
    at_checkpoint: bool = False


class DropNode(Command, frozen=True):
    """Send nothing more to a lost node instance; it does not come back."""

    instance_id: str


ExecutorCommand = (
    StartTrial | ContinueTrial | StopTrial | PauseTrial | ReleaseTrial | ReattachTrial | DropNode
)

# --- to callbacks ---------------------------------------------------------------------------------


class NotifyTrialAdded(Command, frozen=True):
    """A trial was created."""

    trial: str


class NotifyTrialRevived(Command, frozen=True):
    """An ended trial runs again; with ``is_anew`` from scratch, which begins ``lineage``."""

    trial: str
    lineage: int
    is_anew: bool


class NotifyTrialStart(Command, frozen=True):
    """A trial process began to run the trial, on the node named ``node``."""

    trial: str
    started: m.TrialStarted
    node: str = ""


class NotifyResult(Command, frozen=True):
    """A new result is in the journal; ``done`` marks the trial's last one.

    ``decisions``: those about the trial since its result before, up to those about this one.
    """

    trial: str
    result: m.ResultReported
    done: bool
    decisions: tuple[TrialDecision, ...] = ()


class NotifyCheckpoint(Command, frozen=True):
    """A checkpoint of the trial is in the store and retained."""

    trial: str
    checkpoint: m.CheckpointCommitted


class NotifyFailure(Command, frozen=True):
    """An attempt failed; ``retried`` says whether the trial runs again.

    Attributes:
        kind: the class of the failure (`tunemq_scheduler.core.failure_policy.CLASSES`).
        told: the failure's number and the limit. A lost node counts only if it ends the trial.
    """

    trial: str
    failure: m.TrialFailed | m.TrialProcessDied | m.NodeLost
    hostname: str
    retried: bool
    kind: str = ""
    told: str = ""


class NotifyTrialEnd(Command, frozen=True):
    """A trial has ended: ``status`` is TERMINATED or ERROR, ``reason`` says why.

    ``early``: an algorithm or a user stopped it; ``had_run``: it was neither paused nor new.
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

# --- to the user ----------------------------------------------------------------------------------


class WarnFailingNode(Command, frozen=True):
    """A node keeps failing, so the runner places nothing on it for ``pause_s`` seconds.

    ``trials`` different trials failed on it in a row, the last one for this ``reason``.
    """

    node: str
    hostname: str
    trials: int
    reason: str
    pause_s: float


class WarnTrialEnd(Command, frozen=True):
    """A trial ends whose process failed or disappeared after its last result, of this ``step``.

    Attributes:
        failure: the failure on ``hostname``; None if no component reported one.
        saved: the step of the trial's newest checkpoint; 0 if it has none.
    """

    trial: str
    failure: m.TrialFailed | m.TrialProcessDied | m.NodeLost | None
    hostname: str
    step: int
    saved: int


class StateTaken(Command, frozen=True):
    """The checkpoint for which a trial waits is kept for it; the turn must be journalled."""

    trial: str


class WarnStateLost(Command, frozen=True):
    """A trial cannot continue from the state of ``source`` that it was to take, which was lost.

    It continues from an older one, of ``step``; if that is 0 it keeps its own state, or where
    ``source`` is the trial itself begins from nothing. ``has_none``: ``source`` saves none.
    """

    trial: str
    source: str
    step: int
    has_none: bool = False


# --- to the store ---------------------------------------------------------------------------------


class DeleteCheckpoint(Command, frozen=True):
    """Delete an expired checkpoint: first its manifest, then its objects except those in ``keep``.

    ``keep`` are objects in the checkpoint's own folder that manifests of other checkpoints refer
    to.
    """

    trial: str
    key: str
    keep: tuple[str, ...] = ()


class DeleteObjects(Command, frozen=True):
    """Delete objects of deleted checkpoints that no manifest refers to any more."""

    keys: tuple[str, ...]
