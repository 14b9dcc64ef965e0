"""A farm's supervisor in virtual time: the allocator, the experiment of interest, and another."""

from __future__ import annotations

import random
from typing import Any, Final

from msgspec.structs import replace

from tests.simulation.hard_farm import HardFarm
from tests.simulation.shared_farm import SharingExperiment
from tunemq.testing.faulty_executor import FaultyTrialExecutor
from tunemq_scheduler.core.shared_amounts import OfferUsage
from tunemq_scheduler.farm.allocation.fair_share_allocator import FairShareAllocator
from tunemq_scheduler.farm.allocation.members import FairShareSettings
from tunemq_scheduler.farm.allocation.offer_pace import OfferPace
from tunemq_shared.protocol import messages as m

NAME: Final = "mine"
OWNER: Final = "ann"
_OTHER: Final = "other"
#: How often the allocator is asked, and how often where nothing happened for a while.
_POLL_INTERVAL_S: Final = 1.0
_CALM_LOOKS_S: Final = 5.0


class SharedExecutor(FaultyTrialExecutor):
    """The experiment's end of a farm that it shares."""

    api: SimulatedSupervisor

    def poll(self, timeout: float) -> list[m.Event]:
        self.api.report_usage()
        return [self.api.told(fact) for fact in super().poll(timeout)]

    def offer(self, offers: list[m.NodeOffered]) -> None:
        """Deliver these with the next events."""
        self._read_events += offers


class SimulatedSupervisor:
    """The supervisor's side: gives the allocator's offers to experiments, and their usage to it.

    Args:
        quotas: of the owner of the tested experiment.
        other: the jobs of another owner's experiment; None for no other.
    """

    def __init__(
        self,
        farm: HardFarm,
        rng: random.Random,
        settings: FairShareSettings,
        other: list[tuple[dict[str, float], float]] | None,
    ) -> None:
        self._farm, self._rng, self._settings = farm, rng, settings
        self.executor: SharedExecutor | None = None
        #: Returns the experiment's usage; None while it has no process.
        self.ask: Any = None
        self.drained: set[str] = set()
        self.is_paused = False
        #: When something happened in the experiment last.
        self.progress = 0.0
        self._usage: OfferUsage | None = None
        self._pace = OfferPace()
        self._other = None
        if other is not None:
            self._other = SharingExperiment(_OTHER, "bob", iter(other), at_most=3)
        self._known: dict[str, m.NodeJoined] = {}
        self.allocator = self._new_allocator()
        farm.time.after(_POLL_INTERVAL_S, self._look)

    def _new_allocator(self) -> FairShareAllocator:
        allocator = FairShareAllocator(self._settings)
        allocator.advance(self._farm.time.now + 1.0)
        allocator.experiment_added(NAME, OWNER, order=1.0)
        if self._other is not None:
            allocator.experiment_added(_OTHER, "bob", order=2.0)
        return allocator

    @property
    def is_other_over(self) -> bool:
        """Whether the other experiment holds and wants nothing any more."""
        other = self._other
        return other is None or not (other.running or other.waits)

    # --- the experiment of interest ---------------------------------------------------------------

    def begin(self, executor: SharedExecutor, ask: Any, *, is_new: bool) -> None:
        """Its process is there (again); ``is_new``: the supervisor was started again, too."""
        executor.api = self
        self.executor, self.ask = executor, ask
        self._usage = None
        self._pace = OfferPace()
        if is_new:
            self._start_again()
        else:
            self.allocator.experiment_restarted(NAME)

    def away(self) -> None:
        """It has no process."""
        self.executor = self.ask = None

    def told(self, fact: m.Event) -> m.Event:
        """Pass an event to the allocator; return it as the experiment gets it."""
        match fact:
            case m.NodeJoined():
                self._join(fact)
                return replace(fact, is_shared=True)
            case m.NodeReturned() if fact.instance_id in self._known:
                self.allocator.node_returned(fact.instance_id)
                if self._other is not None:
                    self._other.join(self._known[fact.instance_id])
            case m.NodeReturned():
                node = self._farm.nodes[fact.instance_id]
                joined = self._farm.settings.joined(node.instance_id, node.node, node.withheld)
                self._join(joined)
            case m.NodeLost():
                self._lose(fact)
            case m.DevicesWithheld():
                self.allocator.devices_withheld(fact.instance_id, fact.devices)
                if self._other is not None:
                    self._other.withhold(fact.instance_id, fact.devices)
            case _:
                pass
        return fact

    def report_usage(self) -> None:
        """Tell the allocator the experiment's current usage."""
        if self.ask is not None:
            usage = self._pace.heard(self.ask(), self._farm.time.now)
            if usage != self._usage:
                self._usage = usage
                self.allocator.usage(NAME, usage)

    # --- user actions -----------------------------------------------------------------------------

    def drain(self, name: str, grace_s: float) -> None:
        self.drained.add(name)
        self.allocator.node_drained(self._farm.current[name], grace_s)

    def resume(self, name: str) -> None:
        self.drained.discard(name)
        self.allocator.node_resumed(self._farm.current[name])

    def pause(self) -> None:
        self.is_paused = True
        self.allocator.experiment_paused(NAME, 5.0)

    def unpause(self) -> None:
        self.is_paused = False
        self.allocator.experiment_resumed(NAME)

    # --- small things -----------------------------------------------------------------------------

    def _start_again(self) -> None:
        """Start a new supervisor, which knows only what experiments report."""
        self.allocator = self._new_allocator()
        for name in (NAME, _OTHER):
            self.allocator.expect(name)
        if self.is_paused:
            self.allocator.experiment_paused(NAME, 5.0)
        known, self._known = self._known, {}
        for instance_id, joined in known.items():
            node = self._farm.nodes[instance_id]
            if node.is_reachable:
                self._join(replace(joined, withheld=dict(node.withheld)))
            elif self._other is not None:
                self._other.lose(instance_id)
        if self._other is not None:
            self.allocator.usage(_OTHER, self._other.usage())

    def _join(self, joined: m.NodeJoined) -> None:
        self._known[joined.instance_id] = joined
        self.allocator.node_joined(joined)
        if joined.node in self.drained:
            self.allocator.node_drained(joined.instance_id, 5.0)
        if self._other is not None and joined.instance_id not in self._other.seen:
            self._other.join(joined)

    def _lose(self, fact: m.NodeLost) -> None:
        self.allocator.node_lost(fact.instance_id, is_dead=fact.is_dead)
        if fact.is_dead:
            self._known.pop(fact.instance_id, None)
        if self._other is not None:
            self._other.lose(fact.instance_id)

    def _look(self) -> None:
        now = self._farm.time.now + 1.0
        self.allocator.advance(now)
        self._turn_other(now)
        mine: list[m.NodeOffered] = []
        for name, offer in self.allocator.offers():
            if name == NAME and self.executor is not None:
                self._pace.offered(offer.instance_id, offer.resources, self._farm.time.now)
                mine.append(offer)
            elif name == _OTHER and self._other is not None:
                self._other.hear(offer)
        if mine and self.executor is not None:
            self.executor.offer(mine)
        is_calm = self._farm.time.now > self.progress + 90.0
        self._farm.time.after(_CALM_LOOKS_S if is_calm else _POLL_INTERVAL_S, self._look)

    def _turn_other(self, now: float) -> None:
        other = self._other
        if other is None or other.is_over:
            return
        for trial in list(other.running):
            if now >= trial.since + trial.length:
                other.end(trial)
        _, yielding = other.turn(now)
        for trial in yielding:
            other.end(trial, max(1.0, trial.since + trial.length - now))
        self.allocator.usage(_OTHER, other.usage())
        if self.is_other_over:
            other.is_over = True
            self.allocator.experiment_gone(_OTHER)
