"""`AwayNode`: what a node that is not heard any more hosted, in case it is heard again.

A node that is cut off goes on with its trials. So what it hosted is kept in mind until somebody
else takes it over: until then nothing about it is settled.
"""

from __future__ import annotations

from typing import Final

import msgspec

from tunemq_scheduler.core.trials.trial import Trial
from tunemq_shared.protocol.messages import NodeJoined

#: A checkpoint that only an away node has is waited for so long (elapsed seconds since its node
#: went away) if its trial is over; one of a trial that is not, until that goes on elsewhere.
AWAY_UPLOADS_S: Final = 120.0


class AwaySlot(msgspec.Struct, frozen=True, array_like=True):
    """An instance that had a slot of the node, and how much of which GPUs."""

    trial: str
    attempt: int
    resources: dict[str, float]
    devices: dict[str, float] = {}


class TrialActivity(msgspec.Struct, frozen=True, array_like=True):
    """What a trial that ran was about when its node went away; see `Trial` for what each is."""

    pausing: str
    ending: str
    restoring: str
    waits: tuple[str, str]
    fruitless: int
    not_before: float

    @classmethod
    def of(cls, trial: Trial) -> TrialActivity:
        """What this trial is about."""
        return cls(
            trial.pausing,
            trial.ending,
            trial.restoring,
            trial.waits,
            trial.fruitless,
            trial.not_before,
        )

    def resume(self, trial: Trial) -> None:
        """Have the trial be about it again."""
        trial.pausing, trial.ending = self.pausing, self.ending
        trial.restoring, trial.waits = self.restoring, self.waits
        trial.fruitless, trial.not_before = self.fruitless, self.not_before


class AwayNode(msgspec.Struct, frozen=True, array_like=True):
    """A lost node instance that may come back.

    Attributes:
        since: elapsed seconds of the experiment when it was lost.
        hosted: whoever had a slot of it.
        doing: of those that ran, by trial, what they were about.
    """

    joined: NodeJoined
    since: float
    held_slots: tuple[AwaySlot, ...]
    activity: dict[str, TrialActivity]
