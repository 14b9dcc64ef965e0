"""`QueueEntry`: one experiment in a farm's queue, and the legal changes of its state."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import msgspec

from tunemq_scheduler.api.farm_answer_types import ExperimentState as State
from tunemq_shared.protocol.farm_requests import ExperimentEnvironment, ScriptCode, SubmittedCode
from tunemq_shared.protocol.node_orders import BlobRef

ENTRY_VERSION: Final = 1
#: The length of `QueueEntry.id`.
ID_DIGITS: Final = 5

#: The legal next states. A restarted supervisor finds its predecessor's experiments RUNNING, and
#: keeps that state.
LEGAL: Final = MappingProxyType(
    {
        State.QUEUED: frozenset({State.RUNNING, State.PAUSED, State.STOPPED, State.FAILED}),
        State.RUNNING: frozenset(
            {
                *(State.QUEUED, State.PAUSED, State.STOPPING),
                *(State.FINISHED, State.STOPPED, State.FAILED),
            }
        ),
        State.PAUSED: frozenset(
            {
                *(State.QUEUED, State.RUNNING, State.STOPPING),
                *(State.FINISHED, State.STOPPED, State.FAILED),
            }
        ),
        State.STOPPING: frozenset({State.FINISHED, State.STOPPED, State.FAILED}),
        State.FINISHED: frozenset({State.QUEUED}),
        State.STOPPED: frozenset({State.QUEUED}),
        State.FAILED: frozenset({State.QUEUED}),
    }
)


class QueueEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An experiment of a farm.

    Attributes:
        name: the name of the experiment and its folder; unique, and valid as a file name.
        id: five hexadecimal digits, unique; all ids of its trials begin with it. Empty if its file
            is damaged.
        number: grows with each submission.
        submitted, started, ended: Unix times; the last two of its newest run.
        reason: why it is in its state, in words.
        request: the id of the request that submitted it.
        retry: which trials in state ERROR its next run continues; see `ExperimentJob`.
        runs: how often it was started.
        trials, total: how many trials are in each state, and how many there will be, as its process
            reported last.
    """

    version: int = ENTRY_VERSION
    name: str
    id: str
    owner: str
    priority: int = 0
    number: int
    submitted: float
    started: float | None = None
    ended: float | None = None
    state: State = State.QUEUED
    reason: str = ""
    request: str = ""
    code: SubmittedCode
    settings: ExperimentEnvironment = ExperimentEnvironment()
    retry: str = ""
    runs: int = 0
    trials: dict[str, int] = {}
    total: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether it is finished and only a user's request changes it."""
        return self.state.is_over

    @property
    def is_damaged(self) -> bool:
        """Whether its file cannot be read; it is never written then, so that the file stays."""
        return not self.id

    @property
    def turn(self) -> tuple[int, int]:
        """The sort key among waiting experiments: the lowest is next."""
        return -self.priority, self.number

    def moved(self, state: State, at: float, reason: str, retry: str) -> QueueEntry:
        """Return a copy in another state; ``retry`` is kept until a run that does it has ended."""
        begins = self.state is State.QUEUED and state is State.RUNNING
        return msgspec.structs.replace(
            self,
            state=state,
            reason=reason,
            retry="" if state.is_over else retry or self.retry,
            started=at if begins else self.started,
            ended=at if state.is_over else None,
            runs=self.runs + begins,
        )


def damaged_entry(name: str, at: float, reason: str) -> QueueEntry:
    """Return the entry of an experiment whose file, written at this time, cannot be read."""
    return QueueEntry(
        name=name,
        id="",
        owner="",
        number=0,
        submitted=at,
        ended=at,
        state=State.FAILED,
        reason=reason,
        code=ScriptCode(bundle=BlobRef("", 0, ""), script=""),
    )
