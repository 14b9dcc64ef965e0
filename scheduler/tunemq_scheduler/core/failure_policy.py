"""What a failure is, and what follows from it: of which budget, and whether the trial goes on.

A class of failures belongs to one of five budgets:

* `FAILURES`: `max_failures` bounds how many a trial may have in all;
* `IN_A_ROW`: bounded for each class of its own, counted anew after each new result. Such failures
  come from the surroundings of a trial, and one that gets on in between is not what is wrong;
* `NODES`: losses of the node or of its forkserver, of which `max_node_losses` bounds how many in a
  row while no other trial was there (`failure_events`); more than that make the trial *poison*;
* `NEVER`: a further try would end in the same way;
* `UNCOUNTED`: the fault is the node's alone, and the trial is tried for ever.

Two things come before these: a line of its output that, by a log policy, means that a trial is not
tried again, or not on that node; and a GPU's memory that was too little while others had parts of
it, too, where that is to be tried once without them. Such a failure is of no budget
(`tunemq_scheduler.core.events.failure_events`).

Whatever is tried again is tried at once the first time, and then after growing pauses until a new
result comes (`tunemq_scheduler.core.trials.trial.Trial.back_off`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from tunemq_scheduler.core.placement.resource_request import TOLERANCE
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.trials.trial import Trial
from tunemq_shared.protocol.messages import FORKSERVER_LOST, NodeLost, TrialFailed, TrialProcessDied
from tunemq_shared.trainable.resource_names import GPU, GPU_MEMORY

FAILURES: Final = "failures"
IN_A_ROW: Final = "in a row"
NODES: Final = "nodes"
NEVER: Final = "never"
UNCOUNTED: Final = "uncounted"


class FailureClass(msgspec.Struct, frozen=True):
    """One class of failures.

    Attributes:
        kind: its name in messages, as in `TrialFailed.kind`.
        budget: which of the budgets it is of.
        words: what people read; a few words without an article.
        fix: what they can do about it, empty where the error itself says all.
        blames_node: several of different trials in a row speak against the node.
    """

    kind: str
    budget: str
    description: str
    fix: str = ""
    blames_node: bool = False


_MEMORY_FIX: Final = "let it hold less, or raise TrialLimits(memory=...) where it is set"
_STORE_FIX: Final = (
    "see that the store can be reached, or raise FailureConfig(max_storage_failures)"
)
_FETCH_FIX: Final = (
    "see that its node can reach the store (`tunemq doctor`), or has the shared folder mounted"
)
_RESTORE_FIX: Final = (
    f"{_STORE_FIX}; Tuner.restore(..., restart_errored=True) begins the trial anew"
)

_ALL: Final = (
    FailureClass("user", FAILURES, "error in the trial's code"),
    FailureClass("metric", FAILURES, "unusable result"),
    FailureClass("load", FAILURES, "code that cannot be loaded"),
    FailureClass("start", FAILURES, "no process on its node", blames_node=True),
    FailureClass("died", FAILURES, "death of its process", blames_node=True),
    FailureClass("memory", FAILURES, "out of memory", _MEMORY_FIX),
    FailureClass("processes", FAILURES, "too many processes", "raise TrialLimits(processes=...)"),
    FailureClass("time_limit", FAILURES, "step too long", "raise TrialLimits(step_s=...)"),
    FailureClass("stalled", FAILURES, "stalled", "raise TrialLimits(stall_s=...)"),
    FailureClass(
        "cuda_memory",
        NEVER,
        "out of GPU memory",
        "let it hold less on the GPU, or set FailureConfig(retry_cuda_memory=True)",
    ),
    FailureClass("trial_limit", NEVER, "time used up", "raise TrialLimits(trial_s=...)"),
    FailureClass("fetch", IN_A_ROW, "code not on its node", _FETCH_FIX, blames_node=True),
    FailureClass("disk", UNCOUNTED, "full or read-only disk of its node", blames_node=True),
    FailureClass("storage", IN_A_ROW, "checkpoint not kept", _STORE_FIX, blames_node=True),
    FailureClass("restore", IN_A_ROW, "checkpoint not restored", _RESTORE_FIX, blames_node=True),
    FailureClass(
        FORKSERVER_LOST,
        NODES,
        "death of its node's forkserver",
        "free memory on the node, or see what RunConfig(preload=...) does there",
        blames_node=True,
    ),
    FailureClass(
        "node",
        NODES,
        "poison",
        "see the nodes' logs; FailureConfig(max_node_losses=-1) tries it for ever",
    ),
)

#: Every class by its kind.
CLASSES: Final = {one.kind: one for one in _ALL}


class LogMatch(NamedTuple):
    """A line that a trial printed, and the pattern of a log policy that it matches."""

    pattern: str
    line: str

    def __str__(self) -> str:
        return f"it printed {self.line!r}, which matches {self.pattern!r}"


class RetryDecision(msgspec.Struct, frozen=True):
    """What follows from a failure.

    Attributes:
        is_retried: whether the trial may be tried again.
        told: which failure of how many it is, or why there is no further try.
    """

    is_retried: bool
    told: str


def classify(event: TrialFailed | TrialProcessDied | NodeLost) -> FailureClass:
    """The class of a failure; what a newer node may say is taken as the user's."""
    if isinstance(event, NodeLost):
        return CLASSES["node"]
    if isinstance(event, TrialProcessDied):
        return CLASSES[event.cause if event.cause in {"memory", "cuda_memory"} else "died"]
    return CLASSES.get(event.kind, CLASSES["user"])


def judge(failure: FailureClass, trial: Trial, settings: RunnerSettings) -> RetryDecision:
    """What follows from a failure that the trial has counted (`Trial.count_failure`)."""
    budget = failure.budget
    if failure.kind == "cuda_memory" and settings.retry_cuda_memory is True:
        budget = FAILURES
    if budget == NEVER:
        return RetryDecision(
            is_retried=False, told="not tried again, for that would change nothing"
        )
    if budget == UNCOUNTED:
        return RetryDecision(
            is_retried=True, told="not counted, for the fault is the disk of its node"
        )
    if budget == FAILURES:
        number = sum(
            count
            for kind, count in trial.failures.items()
            if CLASSES[kind].budget in {FAILURES, NEVER}
        )
        return _within("failure", number, settings.max_failures, "")
    number = trial.in_a_row[failure.kind]
    limit = settings.max_storage_failures
    return _within(f"{failure.kind} failure", number, limit, " in a row")


def match_of(trial: Trial, settings: RunnerSettings, action: str) -> LogMatch | None:
    """The first thing that the trial's newest attempt printed for which this action follows."""
    for pattern, line in trial.matched.items():
        if settings.action_of(pattern) == action:
            return LogMatch(pattern, line)
    return None


def whole_gpus(request: Mapping[str, float]) -> dict[str, float] | None:
    """The request, with a whole GPU instead of the part that it asks for; None if it asks for none.

    ``gpu_memory`` beside a whole one means how large it has to be, and stays.
    """
    share = request.get(GPU, 0.0)
    is_part = 0 < share < 1 - TOLERANCE or (not share and request.get(GPU_MEMORY))
    return {**request, GPU: 1.0} if is_part else None


def _within(what: str, number: int, limit: int, how: str) -> RetryDecision:
    """Whether one more try is allowed where ``limit`` are; -1 are any number."""
    if limit < 0:
        return RetryDecision(
            is_retried=True, told=f"{what} {number}{how}, and there may be any number"
        )
    return RetryDecision(number <= limit, f"{what} {number} of at most {limit + 1}{how}")
