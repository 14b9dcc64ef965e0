"""`Mailbox`: what one node incarnation is to host, and what of that it has confirmed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tunemq_shared.conditions import TO_THE_END, Horizon
from tunemq_shared.messages import PROTOCOL_VERSION, Assignment, HostOrder, HostStart


@dataclass(slots=True)
class _Wanted:
    """One trial that the node is to host; ``start_version`` first told it how to start."""

    epoch: int
    run_until: Horizon
    start: HostStart
    stop: bool = False
    pause: bool = False
    start_version: int | None = None


class Mailbox:
    """Collects a node's orders until they are sent as one assignment.

    Every assignment is whole. All that differs between two of them is whether an order still says
    how to start its trial: it does until the node has confirmed a version that said so.

    Args:
        term: the scheduler's; a node ignores lower ones.
        confirmed: the version that the node took last, whoever sent it: ours go on from there, so
            that a node can compare versions across experiments.
    """

    def __init__(self, incarnation: str, term: int, confirmed: int = 0) -> None:
        self.incarnation = incarnation
        self.term = term
        self.version = confirmed
        self._confirmed = confirmed
        self._wanted: dict[str, _Wanted] = {}
        #: What it may host of which nothing is to be left, by trial and epoch.
        self._unwanted: dict[tuple[str, int], _Wanted] = {}
        #: Whether the node must hear of a change now, and whether something may wait for the next
        #: change.
        self.is_changed = False
        self.is_outdated = False
        #: Renewals of the node's lease that were seen since the last assignment was sent.
        self.renewals_unconfirmed = 0

    @property
    def stamp(self) -> str:
        """The newest version as the reply to the node says it."""
        return f"{self.term}:{self.version}"

    @property
    def is_confirmed(self) -> bool:
        """Whether the node has taken the newest version."""
        return self._confirmed >= self.version

    @property
    def is_empty(self) -> bool:
        """Whether the node is to host nothing."""
        return not (self._wanted or self._unwanted)

    def start(self, trial: str, epoch: int, run_until: Horizon, start: HostStart) -> None:
        """Host a trial; replaces an older incarnation of it."""
        self._wanted[trial] = _Wanted(epoch, run_until, start)
        self.is_changed = True

    def reattach(
        self,
        trial: str,
        epoch: int,
        run_until: Horizon,
        start: HostStart,
        *,
        pause: bool,
        stop: bool,
    ) -> None:
        """Host a trial that the node may host already: all that it was ever told of it."""
        self._wanted[trial] = _Wanted(epoch, run_until, start, stop, pause)
        self.is_changed = True

    def kill(self, trial: str, epoch: int, start: HostStart) -> None:
        """Have an incarnation killed; the node says that it is gone even if it never was there."""
        self._unwanted[trial, epoch] = _Wanted(epoch, TO_THE_END, start)
        self.is_changed = True

    def move_horizon(self, trial: str, epoch: int, run_until: Horizon) -> None:
        """Let a trial run further."""
        wanted = self._find(trial, epoch)
        if wanted is not None:
            wanted.run_until = run_until
            self.is_changed = True

    def stop(self, trial: str, epoch: int) -> None:
        """Have a trial ended."""
        wanted = self._find(trial, epoch)
        if wanted is not None:
            wanted.stop = True
            self.is_changed = True

    def pause(self, trial: str, epoch: int) -> None:
        """Have a trial saved and ended, to go on later."""
        wanted = self._find(trial, epoch)
        if wanted is not None:
            wanted.pause = True
            self.is_changed = True

    def release(self, trial: str, epoch: int) -> None:
        """Forget a trial that is over; the node may hear of it with the next change."""
        if self._unwanted.pop((trial, epoch), None) is not None:
            self.is_outdated = True
        if self._find(trial, epoch) is not None:
            del self._wanted[trial]
            self.is_outdated = True

    def clear(self) -> None:
        """Want nothing any more."""
        self._wanted.clear()
        self._unwanted.clear()
        self.is_changed = True

    def start_over(self) -> None:
        """Whatever was wanted and confirmed is void; orders that follow say all that is wanted."""
        self.clear()
        self._confirmed = 0

    def confirm(self, term: int, version: int) -> None:
        """The node has taken this version."""
        if term == self.term and version > self._confirmed:
            self._confirmed = version

    def lose_confirmation(self) -> None:
        """What the node took last is unknown (the wire was reset): tell it everything again."""
        self._confirmed = 0
        self.is_changed = True

    def next_assignment(self) -> Assignment:
        """A new version with all orders."""
        self.version += 1
        self.is_changed = self.is_outdated = False
        return self.same_assignment()

    def same_assignment(self) -> Assignment:
        """The current version once more, for a node that has not confirmed it."""
        self.renewals_unconfirmed = 0
        orders = [self._order(trial, wanted) for trial, wanted in self._wanted.items()]
        for (trial, _), unwanted in self._unwanted.items():
            orders.append(self._order(trial, unwanted, kill=True))
        return Assignment(
            PROTOCOL_VERSION, self.incarnation, self.term, self.version, tuple(orders)
        )

    def _order(self, trial: str, wanted: _Wanted, *, kill: bool = False) -> HostOrder:
        if wanted.start_version is None:
            wanted.start_version = self.version
        is_known = self._confirmed >= wanted.start_version
        start = None if is_known else wanted.start
        return HostOrder(
            trial,
            wanted.epoch,
            wanted.run_until,
            wanted.stop,
            start=start,
            pause=wanted.pause,
            kill=kill,
        )

    def _find(self, trial: str, epoch: int) -> _Wanted | None:
        wanted = self._wanted.get(trial)
        return wanted if wanted is not None and wanted.epoch == epoch else None
