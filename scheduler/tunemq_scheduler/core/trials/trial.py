"""A trial: its states, the table of legal transitions, and its recent events."""

from __future__ import annotations

import enum
from collections import deque
from typing import Final

import msgspec
from msgspec.structs import replace

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


#: What a trial waits for while its checkpoints cannot be uploaded or fetched.
STORE: Final = "the store"


def awaited(what: str) -> str:
    """Return what a trial waits for, for messages; ``what`` as in `TrialWaits`."""
    return "its GPU" if what == "device" else STORE


class Trial(msgspec.Struct, kw_only=True, eq=False):
    """One configuration and its progress; only the runner changes it.

    Attributes:
        trial_id: unique in the experiment.
        number: the position of its configuration in the search, from 0.
        config: packed (`tunemq_shared.code.config_packing`); the core never looks inside.
        attempt: the number of its newest attempt; 0 before the first.
        lineage: how often it began again from scratch; its results count from 1 each time.
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
        pausing: why it is being paused; empty if it is not.
        failure: the failure that ended it in ERROR, on the machine ``failed_on``.
        restoring: the key of the checkpoint from which its process begins, until it has begun.
        waits: the store operation it waits for, ``save`` or ``restore``, and why; two empty strings
            if it does not wait.
        matched: the log policies' patterns that its newest attempt matched, and the matching lines.
        excluded: the names of the nodes on which it is no longer placed; ``excused``: the number of
            failures that therefore did not count as its own.
        failed_at: the names of the nodes of its newest failures, newest last.
        devices_used: the use of each GPU by all of its ended attempts together.
        is_alone: it holds whole GPUs now because a part of one had too little memory.
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
    restoring: str = ""
    waits: tuple[str, str] = NO_WAIT
    matched: dict[str, str] = {}
    excluded: list[str] = []
    excused: int = 0
    failed_at: list[str] = []
    is_alone: bool = False
    devices_used: tuple[DeviceUse, ...] = ()
    story: deque[m.Message] = msgspec.field(default_factory=lambda: deque(maxlen=STORY_LENGTH))

    @property
    def last_step(self) -> int:
        """The highest recorded training_iteration; 0 before the first result."""
        return self.last_result.step if self.last_result is not None else 0

    @property
    def is_complete(self) -> bool:
        """Whether its newest recorded result is its last, by stop criteria or by its own report."""
        return self.last_result is not None and self.last_result.done

    @property
    def end_reason(self) -> str:
        """The reason of its end if it ends without an error."""
        return self.ending or (REACHED_ITS_END if self.is_complete else "it finished")

    @property
    def time_spent_s(self) -> float:
        """Its ``time_total_s``: the duration of its recorded steps in seconds."""
        return self.last_result.time_total_s if self.last_result is not None else 0.0

    @property
    def is_finished(self) -> bool:
        """Whether it is TERMINATED or in ERROR."""
        return self.status in FINISHED

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
        wanted = [kept for kept in self.checkpoints if kept.is_wanted]
        return bool(wanted) and all(kept.is_damaged for kept in wanted)

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
        self.restoring, self.waits = "", NO_WAIT

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

    def summary(self) -> TrialSummary:
        """Return its current summary."""
        same = {name: getattr(self, name) for name in _IN_SUMMARY}
        return TrialSummary(
            **same,
            checkpoints=tuple(self.checkpoints.kept()),
            ranks=tuple(self.checkpoints.ranks()),
            failures=dict(self.failures),
            excluded=tuple(self.excluded),
        )


#: The fields that a summary has unchanged.
_IN_SUMMARY: Final = frozenset(TrialSummary.__struct_fields__) - {
    *("checkpoints", "ranks", "failures", "excluded"),
}
