"""Classes of failures, their retry budgets, and the decision whether a trial is retried.

Each class of failures belongs to one of five budgets:

* `FAILURES`: `max_failures` limits the total per trial;
* `IN_A_ROW`: limited per class, and reset by each new result. The environment causes such failures,
  and a trial that makes progress in between is not the culprit;
* `NODES`: losses of the node or of its forkserver; `max_node_losses` limits how many occur in a row
  while no other trial was there (`failure_events`); more make the trial *poison*. A node that was
  told to end is not lost because of its trial, `EXCUSED_TRIES` times in a row;
* `NEVER`: a retry would fail in the same way;
* `UNCOUNTED`: the fault is the node's alone, and the trial is retried without limit.

Two rules come before these. A line of the trial's output may, by a log policy, forbid a retry, or a
retry on that node. A trial that ran out of memory on a shared GPU may be retried once with the
whole GPU. Such failures count towards no budget (`tunemq_scheduler.core.handlers.failure_events`).

The first retry starts at once; later ones wait for growing pauses until a new result comes
(`tunemq_scheduler.core.trials.trial.Trial.back_off`).
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

#: How often in a row a trial may lose nodes that were told to end before such losses count, too: a
#: trial may send SIGTERM to its own node, or forge the node's message.
EXCUSED_TRIES: Final = 10


class FailureClass(msgspec.Struct, frozen=True):
    """One class of failures.

    Attributes:
        kind: its name in messages, as in `TrialFailed.kind`.
        budget: the retry budget that it counts towards.
        description: a few words for the user, without an article.
        fix: what the user can do about it; empty if the error itself says so.
        blames_node: several failures of different trials in a row indicate a faulty node.
    """

    kind: str
    budget: str
    description: str
    fix: str = ""
    blames_node: bool = False


_MEMORY_FIX: Final = "reduce its memory, or raise TrialLimits(memory=...) where it is set"
_STORE_FIX: Final = (
    "check that the store can be reached, or raise FailureConfig(max_storage_failures)"
)
_FETCH_FIX: Final = (
    "check that its node can reach the store (`tunemq doctor`), or has mounted the shared folder"
)
_RESTORE_FIX: Final = f"{_STORE_FIX}; Tuner.restore(..., restart_errored=True) restarts the trial"

#: In the order in which failures are shown: what often explains others comes first.
_ALL: Final = (
    FailureClass("user", FAILURES, "error in the trial's code"),
    FailureClass("metric", FAILURES, "invalid result"),
    FailureClass("load", FAILURES, "code that cannot be loaded"),
    FailureClass("memory", FAILURES, "out of memory", _MEMORY_FIX),
    FailureClass("processes", FAILURES, "too many processes", "raise TrialLimits(processes=...)"),
    FailureClass(
        "cuda_memory",
        NEVER,
        "out of GPU memory",
        "reduce its memory on the GPU, or set FailureConfig(retry_cuda_memory=True)",
    ),
    FailureClass("time_limit", FAILURES, "step too long", "raise TrialLimits(step_s=...)"),
    FailureClass("stalled", FAILURES, "stalled", "raise TrialLimits(stall_s=...)"),
    FailureClass("trial_limit", NEVER, "time limit reached", "raise TrialLimits(trial_s=...)"),
    FailureClass("died", FAILURES, "death of its process", blames_node=True),
    FailureClass("unreported", NEVER, "no report of how its process ended"),
    FailureClass(
        "node",
        NODES,
        "poison",
        "see the nodes' logs; FailureConfig(max_node_losses=-1) retries without a limit",
    ),
    FailureClass("start", FAILURES, "no process on its node", blames_node=True),
    FailureClass(
        FORKSERVER_LOST,
        NODES,
        "death of its node's forkserver",
        "free memory on the node, or check what RunConfig(preload=...) loads there",
        blames_node=True,
    ),
    FailureClass("fetch", IN_A_ROW, "code not on its node", _FETCH_FIX, blames_node=True),
    FailureClass("disk", UNCOUNTED, "full or read-only disk of its node", blames_node=True),
    FailureClass("storage", IN_A_ROW, "checkpoint not saved", _STORE_FIX, blames_node=True),
    FailureClass("restore", IN_A_ROW, "checkpoint not restored", _RESTORE_FIX, blames_node=True),
)

#: All failure classes by kind.
CLASSES: Final = {one.kind: one for one in _ALL}


class LogMatch(NamedTuple):
    """A line that a trial printed, and the log policy's pattern that it matches."""

    pattern: str
    line: str

    def __str__(self) -> str:
        return f"it printed {self.line!r}, which matches {self.pattern!r}"


class RetryDecision(msgspec.Struct, frozen=True):
    """The decision about a failed trial.

    Attributes:
        told: the failure's number and the limit, or why there is no retry.
        is_retried: whether the trial may be retried.
    """

    told: str
    is_retried: bool = True


def classify(event: TrialFailed | TrialProcessDied | NodeLost) -> FailureClass:
    """Return the class of a failure; an unknown kind, of a newer node, counts as a user error."""
    if isinstance(event, NodeLost):
        return CLASSES["node"]
    if isinstance(event, TrialProcessDied):
        return CLASSES[event.cause if event.cause in {"memory", "cuda_memory"} else "died"]
    return CLASSES.get(event.kind, CLASSES["user"])


def judge(failure: FailureClass, trial: Trial, settings: RunnerSettings) -> RetryDecision:
    """Decide about a retry after a failure that the trial has counted (`Trial.count_failure`)."""
    budget = failure.budget
    if failure.kind == "cuda_memory" and settings.retry_cuda_memory is True:
        budget = FAILURES
    if budget == NEVER:
        return RetryDecision("not retried, because that would not help", is_retried=False)
    if budget == UNCOUNTED:
        return RetryDecision("not counted, because the disk of its node is the cause")
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
    """Return the first line of the newest attempt that triggers this action, or None."""
    for pattern, line in trial.matched.items():
        if settings.action_of(pattern) == action:
            return LogMatch(pattern, line)
    return None


def whole_gpus(request: Mapping[str, float]) -> dict[str, float] | None:
    """Return the request with a whole GPU instead of a part; None if it asks for no part.

    ``gpu_memory`` beside a whole GPU is the minimum size of that GPU, and stays.
    """
    share = request.get(GPU, 0.0)
    is_part = 0 < share < 1 - TOLERANCE or (not share and request.get(GPU_MEMORY))
    return {**request, GPU: 1.0} if is_part else None


def _within(what: str, number: int, limit: int, how: str) -> RetryDecision:
    """Allow a retry while ``number`` is within ``limit``; -1 means no limit."""
    if limit < 0:
        return RetryDecision(f"{what} {number}{how}, without a limit")
    return RetryDecision(f"{what} {number} of at most {limit + 1}{how}", number <= limit)
