"""`AwayNode`: what a disconnected node ran, in case it reconnects.

A disconnected node continues with its trials. So the experiment remembers what it ran until another
node takes that over; until then all of it is undecided.
"""

from __future__ import annotations

from typing import Final

import msgspec

from tunemq_scheduler.core.trials.trial import Trial
from tunemq_shared.protocol.messages import NodeJoined

#: How long to wait for a checkpoint that only an away node has, if its trial has ended, in elapsed
#: seconds since the node went away. For other trials the wait lasts until the trial resumes on
#: another node.
AWAY_UPLOADS_S: Final = 120.0


class AwaySlot(msgspec.Struct, frozen=True, array_like=True):
    """An attempt that held a slot of the node, and its share of each GPU."""

    trial: str
    attempt: int
    resources: dict[str, float]
    devices: dict[str, float] = {}


class TrialActivity(msgspec.Struct, frozen=True, array_like=True):
    """A running trial's state when its node went away; see `Trial` for the fields."""

    pausing: str
    ending: str
    restoring: str
    waits: tuple[str, str]
    fruitless: int
    not_before: float

    @classmethod
    def of(cls, trial: Trial) -> TrialActivity:
        """Copy this trial's state."""
        return cls(*(getattr(trial, name) for name in cls.__struct_fields__))

    def resume(self, trial: Trial) -> None:
        """Restore the trial's state."""
        for name in self.__struct_fields__:
            setattr(trial, name, getattr(self, name))


class AwayNode(msgspec.Struct, frozen=True, array_like=True):
    """A lost node instance that may come back.

    Attributes:
        joined: the event by which it joined, with its resources.
        since: when it was lost, in elapsed seconds of the experiment.
        held_slots: the attempts that held slots of it.
        activity: the state of the trials that ran, by trial.
    """

    joined: NodeJoined
    since: float
    held_slots: tuple[AwaySlot, ...]
    activity: dict[str, TrialActivity]
