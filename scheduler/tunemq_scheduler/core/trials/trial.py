"""A trial: its states, the one table of legal transitions, and its story."""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec
from msgspec.structs import replace

from tunemq_scheduler.core.trials.kept_checkpoints import CheckpointManager
from tunemq_shared.base.errors import IllegalTransition
from tunemq_shared.protocol.conditions import TO_THE_END, Horizon
from tunemq_shared.protocol.device_use import DeviceUse
from tunemq_shared.protocol.messages import (
    CheckpointCommitted,
    Message,
    NodeLost,
    ResultReported,
    TrialFailed,
    TrialProcessDied,
    TrialStarted,
)

PENDING: Final = "PENDING"
RUNNING: Final = "RUNNING"
PAUSED: Final = "PAUSED"
TERMINATED: Final = "TERMINATED"
ERROR: Final = "ERROR"

STATES: Final = (PENDING, RUNNING, PAUSED, TERMINATED, ERROR)
FINISHED: Final = frozenset((TERMINATED, ERROR))

#: From a state to those that may follow it. PENDING waits for a slot (also to be tried again); one
#: whose search was interrupted may still be told to pause. A finished trial stays so.
TRANSITIONS: Final[dict[str, frozenset[str]]] = {
    PENDING: frozenset((RUNNING, PAUSED, TERMINATED, ERROR)),
    RUNNING: frozenset((PENDING, PAUSED, TERMINATED, ERROR)),
    PAUSED: frozenset((PENDING, RUNNING, TERMINATED, ERROR)),
    TERMINATED: frozenset(),
    ERROR: frozenset(),
}

#: Why a trial is over that had its last result.
REACHED_ITS_END: Final = "it reached its end"

#: Seconds to wait before the next try: at once, then growing while no new result comes.
MAX_BACK_OFF_S: Final = 60.0
#: After so many failures in a row on one node a trial is tried on another one.
FAILURES_ON_A_NODE: Final = 3
#: The wait doubles no more often than this; it is at its longest long before.
_MOST_DOUBLINGS: Final = 10

#: A trial's `Trial.waits` while it waits for nothing.
NO_WAIT: Final = ("", "")

#: How many of its last events a trial can tell.
STORY_LENGTH: Final = 16


class TrialSummary(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a trial; of one that is over it is kept packed, for there may be many."""

    number: int
    config: bytes
    tag: str
    resources: dict[str, float]
    status: str = PENDING
    reason: str = ""
    attempt: int = 0
    num_failures: int = 0
    started: TrialStarted | None = None
    last_result: ResultReported | None = None
    checkpoints: tuple[CheckpointCommitted, ...] = ()
    #: Score and order of each of them, by which they are kept.
    ranks: tuple[tuple[float, int], ...] = ()
    lineage: int = 0
    #: What ended it in ERROR, and where that happened.
    failure: TrialFailed | TrialProcessDied | NodeLost | None = None
    failed_on: str = ""
    #: How many failures of each class.
    failures: dict[str, int] = {}
    preemptions: int = 0
    repeated: int = 0
    #: The names of the nodes that it was not placed on any more.
    excluded: tuple[str, ...] = ()
    #: What it used of each GPU that it had.
    devices_used: tuple[DeviceUse, ...] = ()


#: What a trial waits for whose checkpoints cannot be sent or fetched.
STORE: Final = "the store"


def awaited(what: str) -> str:
    """What a trial waits for, for people; ``what`` as in `TrialWaits`."""
    return "its GPU" if what == "device" else STORE


class Trial(msgspec.Struct, kw_only=True, eq=False):
    """One configuration on its way; only the runner changes it.

    Attributes:
        trial_id: unique in the experiment.
        number: the place of its configuration in the search, from 0.
        config: packed (`tunemq_shared.code.config_packing`); the core never looks inside.
        epoch: its newest attempt; 0 before the first.
        lineage: how often it was begun anew from nothing; its results count from 1 in each.
        run_until: how far it may go before somebody has to decide.
        last_result: the newest recorded result; its step is the highest recorded one.
        not_before: elapsed seconds of the experiment before which it is not tried again.
        fruitless: how often in a row it failed with no new result in between.
        num_failures: how many failures it had; losses of its node are none.
        preemptions: how often it gave way to others that its farm put first.
        repeated: how many results it reported of steps that were recorded.
        failures: how many of each class; ``in_a_row``: since its last new result.
        fell_with: the nodes that were lost while they ran it, since its last new result;
            ``fell_alone``: those of them that ran no other trial, of any experiment.
        ending: why it is about to end, while its host still has to say that all is kept.
        stop_ordered: whether it ends because somebody asked for it.
        pausing: why it is being paused; empty while it is not.
        failure: what ended it in ERROR, on the machine ``failed_on``.
        restoring: the key of the checkpoint that its host begins from, until it has.
        waits: for what of the store it waits, ``save`` or ``restore``, and why; two empty texts
            while it does not.
        matched: the log policies' patterns that its newest attempt printed a match of, and
            what it printed.
        excluded: the names of the nodes that it is not placed on any more; ``excused``: how many
            failures were not counted as its own for that.
        failed_at: the names of the nodes of its newest failures, the newest last.
        devices_used: what its attempts that are over used of each GPU, all together.
        is_alone: it has whole GPUs to itself now, for a part of one had too little memory.
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
    last_result: ResultReported | None = None
    started: TrialStarted | None = None
    failure: TrialFailed | TrialProcessDied | NodeLost | None = None
    failed_on: str = ""
    num_failures: int = 0
    failures: dict[str, int] = {}
    in_a_row: dict[str, int] = {}
    fell_with: list[str] = []
    fell_alone: list[str] = []
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
    story: deque[Message] = msgspec.field(default_factory=lambda: deque(maxlen=STORY_LENGTH))

    @property
    def last_step(self) -> int:
        """The highest recorded training_iteration; 0 before the first result."""
        return self.last_result.step if self.last_result is not None else 0

    @property
    def is_complete(self) -> bool:
        """Whether its newest recorded result is its last, by its stop criteria or its own word."""
        return self.last_result is not None and self.last_result.done

    @property
    def end_reason(self) -> str:
        """Why it ends, if it does so without an error."""
        return self.ending or (REACHED_ITS_END if self.is_complete else "it finished")

    @property
    def time_spent_s(self) -> float:
        """Its ``time_total_s``: what its recorded steps took."""
        return self.last_result.time_total_s if self.last_result is not None else 0.0

    @property
    def is_finished(self) -> bool:
        """Whether it is TERMINATED or in ERROR."""
        return self.status in FINISHED

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint of it is on its way to the store, or waits for room."""
        return self.checkpoints.uploading > 0 or self.waits[0] == "save"

    @property
    def is_restoring(self) -> bool:
        """Whether its host has a checkpoint to begin from, and has not begun."""
        return bool(self.restoring)

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is anything that it could go on from."""
        return any(kept.is_wanted for kept in self.checkpoints)

    @property
    def has_only_damaged_checkpoints(self) -> bool:
        """Whether it had checkpoints, and no host can go on from what is left of them."""
        wanted = [kept for kept in self.checkpoints if kept.is_wanted]
        return bool(wanted) and all(kept.is_damaged for kept in wanted)

    def move_to(self, status: str) -> None:
        """Change the state.

        Raises:
            IllegalTransition: with the trial's last events.
        """
        if status not in TRANSITIONS[self.status]:
            raise IllegalTransition(
                self.trial_id, self.status, status, [repr(m) for m in self.story]
            )
        self.status = status
        self.restoring, self.waits = "", NO_WAIT

    def reopen(self) -> None:
        """It may go further than it might: its newest result is not its last any more."""
        self.ending = ""
        if self.last_result is not None:
            self.last_result = replace(self.last_result, done=False)

    def count_failure(self, kind: str) -> None:
        """It failed, in a way of this class."""
        self.num_failures += 1
        for counts in (self.failures, self.in_a_row):
            counts[kind] = counts.get(kind, 0) + 1

    @property
    def unlucky_on(self) -> str:
        """The name of the node on which its newest failures all were; empty for too few of them."""
        is_one = len(self.failed_at) == FAILURES_ON_A_NODE and len(set(self.failed_at)) == 1
        return self.failed_at[0] if is_one else ""

    def failed_on_node(self, name: str) -> None:
        """It failed on the node of this name."""
        self.failed_at = [*self.failed_at, name][-FAILURES_ON_A_NODE:]

    def excuse_failure(self) -> None:
        """It failed, which is of none of its budgets."""
        self.num_failures += 1

    def got_on(self) -> None:
        """It reported a new result: what went wrong before is not what is wrong with it."""
        if self.fruitless or self.in_a_row or self.fell_with:
            self.fruitless = 0
            self.in_a_row.clear()
            self.fell_with.clear()
            self.fell_alone.clear()

    def back_off(self, elapsed: float) -> None:
        """It failed at this time: settle when it is tried again."""
        doublings = min(self.fruitless, _MOST_DOUBLINGS) - 1
        pause = 0.0 if self.fruitless == 0 else min(MAX_BACK_OFF_S, 2.0**doublings)
        self.fruitless += 1
        self.not_before = elapsed + pause

    def summary(self) -> TrialSummary:
        """What is known of it now."""
        return TrialSummary(
            number=self.number,
            config=self.config,
            tag=self.tag,
            resources=self.resources,
            status=self.status,
            reason=self.reason,
            attempt=self.attempt,
            num_failures=self.num_failures,
            started=self.started,
            last_result=self.last_result,
            checkpoints=tuple(self.checkpoints.kept()),
            ranks=tuple(self.checkpoints.ranks()),
            lineage=self.lineage,
            failure=self.failure,
            failed_on=self.failed_on,
            failures=dict(self.failures),
            preemptions=self.preemptions,
            repeated=self.repeated,
            excluded=tuple(self.excluded),
            devices_used=self.devices_used,
        )
