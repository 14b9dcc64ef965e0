"""A trial: its states, the table of legal transitions, and its recent events."""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec.structs import replace

from tunemq_scheduler.core.trial_decisions import MOST_DECISIONS, TrialDecision
from tunemq_scheduler.core.trials.kept_checkpoints import CheckpointManager
from tunemq_shared.base.errors import IllegalTransition
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.device_use import DeviceUse
from tunemq_shared.protocol.result_conditions import TO_THE_END, Horizon

PENDING: Final = "PENDING"
RUNNING: Final = "RUNNING"
PAUSED: Final = "PAUSED"
TERMINATED: Final = "TERMINATED"
ERROR: Final = "ERROR"

STATES: Final = (PENDING, RUNNING, PAUSED, TERMINATED, ERROR)
FINISHED: Final = frozenset((TERMINATED, ERROR))

#: From each state to its legal successors. PENDING trials wait for a slot, also for a retry; after
#: its run was interrupted a PENDING trial may still become PAUSED. A finished trial stays so.
TRANSITIONS: Final[dict[str, frozenset[str]]] = {
    PENDING: frozenset((RUNNING, PAUSED, TERMINATED, ERROR)),
    RUNNING: frozenset((PENDING, PAUSED, TERMINATED, ERROR)),
    PAUSED: frozenset((PENDING, RUNNING, TERMINATED, ERROR)),
    TERMINATED: frozenset(),
    ERROR: frozenset(),
}

#: The reason of a trial that ended with its last result.
REACHED_ITS_END: Final = "it reached its end"

#: The longest wait before a retry, in seconds. The first retry starts at once; the wait then grows
#: until a new result comes.
MAX_BACK_OFF_S: Final = 60.0
#: After this many failures in a row on one node a trial is tried on another one.
FAILURES_ON_A_NODE: Final = 3
#: The most times the wait doubles; it reaches its maximum long before.
_MOST_DOUBLINGS: Final = 10

#: A trial's `Trial.waits` while it waits for nothing.
NO_WAIT: Final = ("", "")

#: The number of recent events that a trial keeps for error messages.
STORY_LENGTH: Final = 16


class ResultReview(enum.Enum):
    """Whether a result counts, and which components it concerns."""

    STALE = "of an older attempt, or after the trial's end: dropped"
    REPEATED = "a recorded step, or a step after the trial's last: dropped"
    BEFORE_HORIZON = "before the horizon: recorded without a decision"
    DUE = "at the horizon: the algorithms decide"
    FINAL = "the trial's last: recorded, and passed to the algorithms"


class InheritedState(msgspec.Struct, frozen=True, array_like=True):
    """The state from which a trial continues by a decision; it began the trial's lineage.

    Attributes:
        source: the trial whose state it is.
        lineage: the lineage of that trial, and the first attempt of that, ``first_attempt``.
        step: the step of that state; while it is awaited, the highest that it may have.
        announced: the newest step whose checkpoint is known to be saved; the source may save a
            later one as it pauses.
        time_total_s: the ``time_total_s`` of the source's newest result.
        attempt: no attempt of the lineages before has a higher number.
        left: the attempt that the trial left for that state; 0 if it had not begun.
        left_from: the first attempt of the lineage before.
        last_step: the last recorded step of the lineage before.
        key: the key of the awaited checkpoint; empty until one is chosen.
        checkpoint: the checkpoint with that state, which stays in the store; None while it is not
            committed, and once the trial has committed one.
        is_awaited: the trial cannot begin yet: the checkpoint is not committed, or the process that
            it left is not gone.
    """

    source: str
    lineage: int
    first_attempt: int
    step: int
    announced: int
    time_total_s: float
    attempt: int
    left: int
    left_from: int
    last_step: int
    key: str = ""
    checkpoint: m.CheckpointRef | None = None
    is_awaited: bool = False


def continued_from(state: InheritedState | None) -> tuple[str, int, int] | None:
    """Return the trial, its lineage and the step whose state this is; None if it is none."""
    return None if state is None else (state.source, state.lineage, state.step)


class FormerConfig(msgspec.Struct, frozen=True, array_like=True):
    """A configuration that a trial had until a decision changed it, or its lineage.

    Attributes:
        config: packed.
        lineage: the lineage in which the trial had it.
        until: the last recorded step of that lineage then.
        source: where that lineage continued from, as `continued_from` returns it.
    """

    config: bytes
    lineage: int
    until: int
    source: tuple[str, int, int] | None


class TrialSummary(msgspec.Struct, frozen=True, array_like=True):
    """A trial's summary; ended trials are stored packed in this form, since there may be many."""

    number: int
    config: bytes
    tag: str
    resources: dict[str, float]
    status: str = PENDING
    reason: str = ""
    attempt: int = 0
    num_failures: int = 0
    started: m.TrialStarted | None = None
    last_result: m.ResultReported | None = None
    checkpoints: tuple[m.CheckpointCommitted, ...] = ()
    #: Score and order of each checkpoint, by which retention ranks them.
    ranks: tuple[tuple[float, int], ...] = ()
    lineage: int = 0
    #: The failure that ended the trial in ERROR, and the machine where it happened.
    failure: m.TrialFailed | m.TrialProcessDied | m.NodeLost | None = None
    failed_on: str = ""
    #: The number of failures of each class.
    failures: dict[str, int] = {}
    preemptions: int = 0
    repeated: int = 0
    #: The names of the nodes on which the trial was no longer placed.
    excluded: tuple[str, ...] = ()
    #: The trial's use of each GPU.
    devices_used: tuple[DeviceUse, ...] = ()
    #: The state from which its lineage continued.
    inherited: InheritedState | None = None
    #: The configurations that it had before; oldest first.
    former: tuple[FormerConfig, ...] = ()
    #: How many of those it has left since its newest result.
    changes_since_result: int = 0
    #: The newest decisions about it, and the number of older ones that are not kept.
    decisions: tuple[TrialDecision, ...] = ()
    decisions_before: int = 0

    @property
    def reported_config(self) -> bytes:
        """The configuration of its newest result."""
        changes = self.changes_since_result
        return self.former[-changes].config if changes else self.config

    @property
    def checkpoint(self) -> m.CheckpointCommitted | m.CheckpointRef | None:
        """The newest committed checkpoint of the lineage of its newest result."""
        return _checkpoint_of_result(self.checkpoints, self.last_result, self.inherited)


def _checkpoint_of_result(
    checkpoints: Iterable[m.CheckpointCommitted],
    newest: m.ResultReported | None,
    inherited: InheritedState | None,
) -> m.CheckpointCommitted | m.CheckpointRef | None:
    """Return the newest checkpoint that belongs to the lineage of a trial's newest result."""
    first, last, begin = 0, math.inf, None
    if inherited is not None and newest is not None:
        if newest.attempt > inherited.attempt:
            first, begin = inherited.attempt + 1, inherited.checkpoint
        else:
            first, last = inherited.left_from, inherited.attempt
    found = [one for one in checkpoints if first <= one.attempt <= last]
    return found[-1] if found else begin


#: What a trial waits for while its checkpoints cannot be uploaded or fetched.
STORE: Final = "the store"
#: A trial's `Trial.waits` while the state that it inherits is not in the store, and of which trial.
STATE: Final = "state"


def awaited(what: str) -> str:
    """Return what a trial waits for, for messages; ``what`` as in `Trial.waits`."""
    return {"device": "its GPU", STATE: "another trial's checkpoint"}.get(what, STORE)


class Trial(msgspec.Struct, kw_only=True, eq=False):
    """One configuration and its progress; only the runner changes it.

    Attributes:
        trial_id: unique in the experiment.
        number: the position of its configuration in the search, from 0.
        config: packed (`tunemq_shared.code.config_packing`); the core never looks inside.
        attempt: the number of its newest attempt; 0 before the first.
        lineage: how often it began again, by a decision, from another state than its newest: from
            scratch, or from the ``inherited`` state of a trial. Results of other lineages, and
            their checkpoints, do not count for its progress.
        former: the configurations that it had before.
        saved_step: the newest step of its lineage whose result announced a checkpoint; 0 before the
            first.
        saves_nothing: it paused after results, and has never saved a checkpoint.
        run_until: the horizon up to which it may run before the algorithms decide.
        last_result: the newest recorded result; its step is the highest recorded one.
        repeated_result: the result that it reported since, for a step that was already recorded.
        not_before: the earliest time of its next retry, in elapsed seconds of the experiment.
        fruitless: the number of failures in a row with no new result in between.
        num_failures: the number of failures; losses of its node do not count.
        preemptions: how often it gave way to others that its farm put first.
        repeated: the number of results it reported for steps that were already recorded.
        failures: the number of failures of each class; ``in_a_row``: since its last new result.
        fell_with: the nodes lost while they ran it, since its last new result; ``fell_alone``:
            those of them that ran no other trial, of any experiment.
        excused_tries: the number of nodes that were told to end while they ran it, since its last
            new result, and that therefore do not count.
        ending: why it is about to end, until its process confirms that all checkpoints are saved;
            a decision ends the trial itself before.
        stop_ordered: whether it ends because of a stop request.
        pausing: why it is being paused; empty if it is not. ``resuming``: it is to wait for a slot
            again as soon as it has paused.
        failure: the failure that ended it in ERROR, on the machine ``failed_on``.
        restoring: the key of the checkpoint from which its process begins, until it has begun.
        waits: the operation it waits for, ``save``, ``restore``, ``code``, ``device`` or `STATE`,
            and why; two empty strings if it does not wait.
        matched: the log policies' patterns that its newest attempt matched, and the matching lines.
        excluded: the names of the nodes on which it is no longer placed; ``excused``: the number of
            failures that therefore did not count as its own.
        failed_at: the names of the nodes of its newest failures, newest last.
        devices_used: the use of each GPU by all of its ended attempts together.
        is_alone: it holds whole GPUs now because a part of one had too little memory.
        decisions: the newest decisions about it, oldest first; ``decisions_before``: the number of
            older ones that are not kept; ``decisions_due``: the number since its newest result.
    """

    trial_id: str
    number: int
    config: bytes
    tag: str
    resources: dict[str, float]
    checkpoints: CheckpointManager
    status: str = PENDING
    reason: str = ""
    attempt: int = 0
    lineage: int = 0
    inherited: InheritedState | None = None
    former: tuple[FormerConfig, ...] = ()
    changes_since_result: int = 0
    saved_step: int = 0
    saves_nothing: bool = False
    run_until: Horizon = TO_THE_END
    last_result: m.ResultReported | None = None
    repeated_result: m.ResultReported | None = None
    started: m.TrialStarted | None = None
    failure: m.TrialFailed | m.TrialProcessDied | m.NodeLost | None = None
    failed_on: str = ""
    num_failures: int = 0
    failures: dict[str, int] = {}
    in_a_row: dict[str, int] = {}
    fell_with: list[str] = []
    fell_alone: list[str] = []
    excused_tries: int = 0
    fruitless: int = 0
    repeated: int = 0
    preemptions: int = 0
    not_before: float = 0.0
    ending: str = ""
    stop_ordered: bool = False
    pausing: str = ""
    resuming: bool = False
    restoring: str = ""
    waits: tuple[str, str] = NO_WAIT
    matched: dict[str, str] = {}
    excluded: list[str] = []
    excused: int = 0
    failed_at: list[str] = []
    is_alone: bool = False
    devices_used: tuple[DeviceUse, ...] = ()
    decisions: list[TrialDecision] = []
    decisions_before: int = 0
    decisions_due: int = 0
    story: deque[m.Message] = msgspec.field(default_factory=lambda: deque(maxlen=STORY_LENGTH))

    @property
    def last_step(self) -> int:
        """The highest recorded training_iteration of its lineage; 0 before the first result."""
        if (newest := self.newest) is not None:
            return newest.step
        return self.inherited.step if self.inherited is not None else 0

    @property
    def newest(self) -> m.ResultReported | None:
        """The newest recorded result of its lineage."""
        newest, inherited = self.last_result, self.inherited
        if newest is None or inherited is None or newest.attempt > inherited.attempt:
            return newest
        return None

    @property
    def is_complete(self) -> bool:
        """Whether its newest recorded result is its last, by stop criteria or by its own report."""
        return (newest := self.newest) is not None and newest.done

    @property
    def awaits_state(self) -> bool:
        """Whether it waits for a checkpoint of another trial, from which it is to continue."""
        return self.inherited is not None and self.inherited.is_awaited

    @property
    def inherited_key(self) -> str:
        """The key of the checkpoint with its inherited state; empty if that is not kept for it."""
        kept = None if self.inherited is None else self.inherited.checkpoint
        return "" if kept is None else kept.key

    @property
    def first_attempt(self) -> int:
        """The lowest number that an attempt of its lineage may have."""
        return 0 if self.inherited is None else self.inherited.attempt + 1

    @property
    def end_reason(self) -> str:
        """The reason of its end if it ends without an error."""
        return self.ending or (REACHED_ITS_END if self.is_complete else "it finished")

    @property
    def time_spent_s(self) -> float:
        """Its ``time_total_s``: the duration of its recorded steps in seconds."""
        if (newest := self.newest) is not None:
            return newest.time_total_s
        return self.inherited.time_total_s if self.inherited is not None else 0.0

    @property
    def is_finished(self) -> bool:
        """Whether it is TERMINATED or in ERROR."""
        return self.status in FINISHED

    @property
    def status_without_process(self) -> str:
        """The status that it has once its process is gone: PAUSED if it was to stay paused."""
        return PAUSED if self.pausing and not self.resuming else PENDING

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint of it is being uploaded, or waits for room."""
        return self.checkpoints.uploading > 0 or self.waits[0] == "save"

    @property
    def is_restoring(self) -> bool:
        """Whether its process has a checkpoint to restore, and has not begun."""
        return bool(self.restoring)

    @property
    def has_checkpoint(self) -> bool:
        """Whether it has a checkpoint to resume from."""
        return any(kept.is_wanted for kept in self.checkpoints)

    @property
    def has_only_damaged_checkpoints(self) -> bool:
        """Whether it had checkpoints, and all that remain are damaged."""
        wanted = [kept for kept in self.checkpoints.since(self.first_attempt) if kept.is_wanted]
        return bool(wanted) and all(kept.is_damaged for kept in wanted)

    @property
    def checkpoint(self) -> m.CheckpointCommitted | m.CheckpointRef | None:
        """The newest committed checkpoint of the lineage of its newest result."""
        return _checkpoint_of_result(self.checkpoints.kept(), self.last_result, self.inherited)

    def move_to(self, status: str) -> None:
        """Change the state.

        Raises:
            IllegalTransition: the table forbids it; the error contains the trial's last events.
        """
        if status not in TRANSITIONS[self.status]:
            raise IllegalTransition(
                self.trial_id, self.status, status, [repr(one) for one in self.story]
            )
        self.status = status
        self.restoring = ""
        if not self.awaits_state:
            self.waits = NO_WAIT

    def leave_config(self) -> None:
        """Note its configuration, because its lineage or the configuration is about to change."""
        source = continued_from(self.inherited)
        left = FormerConfig(self.config, self.lineage, self.last_step, source)
        self.former = (*self.former, left)
        self.changes_since_result += self.last_result is not None

    def reopen(self) -> None:
        """Allow it to run further: its newest result is no longer its last."""
        self.ending = ""
        if self.last_result is not None:
            self.last_result = replace(self.last_result, done=False)

    def count_failure(self, kind: str) -> None:
        """Count a failure of this class."""
        self.num_failures += 1
        for counts in (self.failures, self.in_a_row):
            counts[kind] = counts.get(kind, 0) + 1

    @property
    def unlucky_on(self) -> str:
        """The name of the node of all of its newest failures; empty if those are too few."""
        is_one = len(self.failed_at) == FAILURES_ON_A_NODE and len(set(self.failed_at)) == 1
        return self.failed_at[0] if is_one else ""

    def failed_on_node(self, name: str) -> None:
        """Record a failure on the node of this name."""
        self.failed_at = [*self.failed_at, name][-FAILURES_ON_A_NODE:]

    def excuse_failure(self) -> None:
        """Count a failure that belongs to no retry budget."""
        self.num_failures += 1

    def got_on(self) -> None:
        """Reset the counts of failures in a row after a new result, which proves progress."""
        if self.fruitless or self.in_a_row or self.fell_with or self.excused_tries:
            self.fruitless = self.excused_tries = 0
            self.in_a_row.clear()
            self.fell_with.clear()
            self.fell_alone.clear()

    def back_off(self, elapsed: float) -> None:
        """Set the time of the next retry after a failure at this time."""
        doublings = min(self.fruitless, _MOST_DOUBLINGS) - 1
        pause = 0.0 if self.fruitless == 0 else min(MAX_BACK_OFF_S, 2.0**doublings)
        self.fruitless += 1
        self.not_before = elapsed + pause

    def keep_decision(self, decision: TrialDecision) -> None:
        """Keep a decision in place of the oldest one if there are too many."""
        self.decisions.append(decision)
        if len(self.decisions) > MOST_DECISIONS:
            del self.decisions[0]
            self.decisions_before += 1
        self.decisions_due = min(self.decisions_due + 1, MOST_DECISIONS)

    def take_due_decisions(self) -> tuple[TrialDecision, ...]:
        """Return the decisions since its newest result, for the next one."""
        due, self.decisions_due = self.decisions_due, 0
        return tuple(self.decisions[-due:]) if due else ()

    def summary(self) -> TrialSummary:
        """Return its current summary."""
        same = {name: getattr(self, name) for name in _IN_SUMMARY}
        return TrialSummary(
            **same,
            checkpoints=tuple(self.checkpoints.kept()),
            ranks=tuple(self.checkpoints.ranks()),
            failures=dict(self.failures),
            excluded=tuple(self.excluded),
            decisions=tuple(self.decisions),
            inherited=self.inherited and replace(self.inherited, is_awaited=False),
        )


#: The fields that a summary has unchanged.
_IN_SUMMARY: Final = frozenset(TrialSummary.__struct_fields__) - {
    *("checkpoints", "ranks", "failures", "excluded", "inherited", "decisions"),
}
