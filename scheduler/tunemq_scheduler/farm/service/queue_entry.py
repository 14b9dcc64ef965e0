"""One experiment of a farm, as its queue keeps it; and which of its states may follow."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import msgspec

from tunemq_scheduler.api.farm_answers import ExperimentState as State
from tunemq_shared.protocol.farm_requests import ExperimentEnvironment, SubmittedCode

ENTRY_VERSION: Final = 1
#: How long `QueueEntry.id` is.
ID_DIGITS: Final = 5
#: `QueueEntry.retry` for all trials that are in ERROR.
RETRY_ALL: Final = "*"

#: A supervisor that starts again finds RUNNING what its predecessor ran, and leaves it so.
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
        name: of it and of its folder; unique, and safe in names of files.
        id: five hexadecimal digits, unique; all ids of its trials begin with it.
        number: grows with each submission.
        submitted, started, ended: Unix times; the last two of its newest run.
        reason: why it is in its state, in words.
        request: the id of the request that submitted it.
        retry: which trials in ERROR go on when it runs again: none, `RETRY_ALL`, or one's id.
        runs: how often it was started.
        trials, total: how many are in each state, and how many there will be, as its process said
            last.
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
        """Whether nothing happens to it any more unless a person asks for it."""
        return self.state.is_over

    @property
    def turn(self) -> tuple[int, int]:
        """Its place among those that wait: the least is next."""
        return -self.priority, self.number

    def moved(self, state: State, at: float, reason: str, retry: str) -> QueueEntry:
        """It in another state; what is to be retried is kept until the run that does it is over."""
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
