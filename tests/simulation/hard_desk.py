"""A farm's supervisor in virtual time: the allotter, the experiment of interest, and another."""

from __future__ import annotations

import random
from typing import Any, Final

from msgspec.structs import replace

from tests.simulation.hard_farm import HardFarm
from tests.simulation.shared_farm import SharingExperiment
from tunemq.testing.faulty_executor import FaultyTrialExecutor
from tunemq_scheduler.core.allotments import OfferUsage
from tunemq_scheduler.farm.allocation.fair_share_allocator import FairShareAllocator
from tunemq_scheduler.farm.allocation.offer_pace import OfferPace
from tunemq_scheduler.farm.allocation.share_settings import FairShareSettings
from tunemq_shared.protocol import messages as m

NAME: Final = "mine"
OWNER: Final = "ann"
_OTHER: Final = "other"
#: How often the allotter is asked, and how often where nothing happened for a while.
_LOOKS_S: Final = 1.0
_CALM_LOOKS_S: Final = 5.0


class SharedExecutor(FaultyTrialExecutor):
    """The experiment's end of a farm that it shares."""

    desk: Desk

    def poll(self, timeout: float) -> list[m.Event]:
        self.desk.tell_usage()
        return [self.desk.told(fact) for fact in super().poll(timeout)]

    def offer(self, offers: list[m.NodeOffered]) -> None:
        """Hand these out with the next facts."""
        self._facts += offers


class Desk:
    """Tells the allotter of nodes and experiments, and the experiments what they are offered.

    Args:
        quotas: of the owner of the experiment of interest.
        other: the jobs of another owner's experiment; None where there is none.
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
        #: Asks the experiment what it holds and wants; None while it has no process.
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
        self.allotter = self._new_allotter()
        farm.time.after(_LOOKS_S, self._look)

    def _new_allotter(self) -> FairShareAllocator:
        allotter = FairShareAllocator(self._settings)
        allotter.advance(self._farm.time.now + 1.0)
        allotter.experiment_added(NAME, OWNER, order=1.0)
        if self._other is not None:
            allotter.experiment_added(_OTHER, "bob", order=2.0)
        return allotter

    @property
    def is_other_over(self) -> bool:
        """Whether the other experiment holds and wants nothing any more."""
        other = self._other
        return other is None or not (other.running or other.waits)

    # --- the experiment of interest ---------------------------------------------------------------

    def begin(self, executor: SharedExecutor, ask: Any, *, is_new: bool) -> None:
        """Its process is there (again); ``is_new``: the supervisor was started again, too."""
        executor.desk = self
        self.executor, self.ask = executor, ask
        self._usage = None
        self._pace = OfferPace()
        if is_new:
            self._start_again()
        else:
            self.allotter.experiment_restarted(NAME)

    def away(self) -> None:
        """It has no process."""
        self.executor = self.ask = None

    def told(self, fact: m.Event) -> m.Event:
        """What the experiment is told of this fact, which the allotter hears of, too."""
        match fact:
            case m.NodeJoined():
                self._join(fact)
                return replace(fact, is_shared=True)
            case m.NodeReturned() if fact.incarnation in self._known:
                self.allotter.node_returned(fact.incarnation)
                if self._other is not None:
                    self._other.join(self._known[fact.incarnation])
            case m.NodeReturned():
                node = self._farm.nodes[fact.incarnation]
                joined = self._farm.settings.joined(node.incarnation, node.node, node.withheld)
                self._join(joined)
            case m.NodeLost():
                self._lose(fact)
            case m.DevicesWithheld():
                self.allotter.devices_withheld(fact.incarnation, fact.devices)
                if self._other is not None:
                    self._other.withhold(fact.incarnation, fact.devices)
            case _:
                pass
        return fact

    def tell_usage(self) -> None:
        """What it holds and wants now."""
        if self.ask is not None:
            usage = self._pace.heard(self.ask(), self._farm.time.now)
            if usage != self._usage:
                self._usage = usage
                self.allotter.usage(NAME, usage)

    # --- what people do ---------------------------------------------------------------------------

    def drain(self, name: str, grace_s: float) -> None:
        self.drained.add(name)
        self.allotter.node_drained(self._farm.current[name], grace_s)

    def resume(self, name: str) -> None:
        self.drained.discard(name)
        self.allotter.node_resumed(self._farm.current[name])

    def pause(self) -> None:
        self.is_paused = True
        self.allotter.experiment_paused(NAME, 5.0)

    def unpause(self) -> None:
        self.is_paused = False
        self.allotter.experiment_resumed(NAME)

    # --- small things -----------------------------------------------------------------------------

    def _start_again(self) -> None:
        """A supervisor that knows nothing but what experiments tell it."""
        self.allotter = self._new_allotter()
        for name in (NAME, _OTHER):
            self.allotter.expect(name)
        if self.is_paused:
            self.allotter.experiment_paused(NAME, 5.0)
        known, self._known = self._known, {}
        for incarnation, joined in known.items():
            node = self._farm.nodes[incarnation]
            if node.is_reachable:
                self._join(replace(joined, withheld=dict(node.withheld)))
            elif self._other is not None:
                self._other.lose(incarnation)
        if self._other is not None:
            self.allotter.usage(_OTHER, self._other.usage())

    def _join(self, joined: m.NodeJoined) -> None:
        self._known[joined.incarnation] = joined
        self.allotter.node_joined(joined)
        if joined.node in self.drained:
            self.allotter.node_drained(joined.incarnation, 5.0)
        if self._other is not None and joined.incarnation not in self._other.seen:
            self._other.join(joined)

    def _lose(self, fact: m.NodeLost) -> None:
        self.allotter.node_lost(fact.incarnation, is_dead=fact.is_dead)
        if fact.is_dead:
            self._known.pop(fact.incarnation, None)
        if self._other is not None:
            self._other.lose(fact.incarnation)

    def _look(self) -> None:
        now = self._farm.time.now + 1.0
        self.allotter.advance(now)
        self._turn_other(now)
        mine: list[m.NodeOffered] = []
        for name, offer in self.allotter.offers():
            if name == NAME and self.executor is not None:
                self._pace.offered(offer.incarnation, offer.resources, self._farm.time.now)
                mine.append(offer)
            elif name == _OTHER and self._other is not None:
                self._other.hear(offer)
        if mine and self.executor is not None:
            self.executor.offer(mine)
        is_calm = self._farm.time.now > self.progress + 90.0
        self._farm.time.after(_CALM_LOOKS_S if is_calm else _LOOKS_S, self._look)

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
        self.allotter.usage(_OTHER, other.usage())
        if self.is_other_over:
            other.is_over = True
            self.allotter.experiment_gone(_OTHER)
