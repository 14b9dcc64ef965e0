"""Searches that share a farm, some of whose trials kill their node: in virtual time, by a seed.

The real runners and the real allocator; messages arrive at once. As the supervisor does, the farm
tells each search whether others had trials on a lost node.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.simulation.allocator_books import check_books
from tunemq.testing.comparable_state import comparable
from tunemq.testing.journal_replay import replay
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.farm.allocation.fair_share_allocator import FairShareAllocator
from tunemq_scheduler.farm.allocation.members import FairShareSettings
from tunemq_shared.protocol import messages as m

CPUS = 4.0
STEPS = 5


@dataclass(eq=False)
class Sharer:
    """A search: its runner, and all events that it has received."""

    name: str
    settings: RunnerSettings
    killers: set[str]
    runner: TrialRunner = field(init=False)
    journal_records: list[m.JournalRecord] = field(default_factory=list)
    #: Running trial processes by trial and attempt: the node, and the time of the next event.
    processes: dict[tuple[str, int], tuple[str, float]] = field(default_factory=dict)
    is_over: bool = False

    def __post_init__(self) -> None:
        self.runner = TrialRunner(self.settings)

    def tell(self, event: m.Event) -> list[c.Command]:
        self.journal_records.append(m.JournalRecord(event))
        return self.runner.handle(event)

    def on(self, node: str) -> list[tuple[str, int]]:
        return [one for one, (where, _) in self.processes.items() if where == node]


class KillerFarm:
    """Nodes, searches, and the processes of their trials.

    Args:
        accidents: total number of nodes that die by themselves while trials of others run.
        spares_nodes: killers end only the forkserver of their search on their node.
    """

    def __init__(
        self,
        seed: int,
        *,
        nodes: int,
        limit: int,
        searches: int = 3,
        accidents: int = 0,
        spares_nodes: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.spares_nodes = spares_nodes
        self.now = 1.0
        self.limit = limit
        self.lives: dict[str, int] = {}
        self.deaths = 0
        self.accidents = accidents
        self.back: list[tuple[float, str]] = []
        self.nodes: dict[str, m.NodeJoined] = {}
        self.allocator = FairShareAllocator(FairShareSettings(preempts=self.rng.random() < 0.5))
        self.searches: list[Sharer] = []
        settings = RunnerSettings(request={"cpu": 1.0}, max_node_losses=limit)
        for number in range(searches):
            trials = [f"{number}-{one}" for one in range(self.rng.randint(1, 6))]
            killers = {one for one in trials if self.rng.random() < 0.3}
            search = Sharer(f"s{number}", settings, killers)
            self.searches.append(search)
            self.allocator.experiment_added(search.name, f"owner{number % 2}", 0, float(number))
            for place, trial in enumerate(trials):
                search.tell(m.ConfigSuggested(place, trial, b"", "", {"cpu": 1.0}))
            search.tell(m.SearchExhausted())
        for place in range(nodes):
            self._join(f"n{place}")

    @property
    def killers(self) -> int:
        return sum(len(one.killers) for one in self.searches)

    def run(self, until: float = 20_000.0) -> None:
        """Run until all searches have ended.

        Raises:
            AssertionError: a search has not ended by `until`, in virtual seconds.
        """
        while not all(one.is_over for one in self.searches):
            assert self.now < until, self.story()
            self._turn()
            self.now += 1.0

    def story(self) -> str:
        lines = [f"after {self.now:.0f} s and {self.deaths} deaths, limit {self.limit}:"]
        for one in self.searches:
            live = {
                name: (trial.status, trial.fell_with) for name, trial in one.runner.live.items()
            }
            lines.append(f"{one.name}: {live}, alone {one.runner.alone}, {one.runner.usage()}")
            for wanted in one.runner.usage().wants:
                lines += self.allocator.explainer.why(
                    one.name, {"alone": 1.0} if wanted.is_alone else {}
                )
        return "\n".join(lines)

    def check(self) -> None:
        """Check that only killers ended in ERROR, and that a replay gives the same state."""
        for search in self.searches:
            for trial in search.runner.finished:
                status = search.runner.summary(trial).status
                assert status == ("ERROR" if trial in search.killers else "TERMINATED"), trial
            again = replay(search.settings, search.journal_records)
            assert comparable(again) == comparable(search.runner)
        # Each killer is alone from its first losses on.
        most = max(1, self.limit) + self.limit + 1
        assert self.deaths <= self.killers * most + 1

    # --- one second ------------------------------------------------------------------------------

    def _turn(self) -> None:
        for due, name in list(self.back):
            if due <= self.now:
                self.back.remove((due, name))
                self._join(name)
        if self.accidents and self.nodes and self.rng.random() < 0.02:
            self.accidents -= 1
            self._lose(self.rng.choice(sorted(self.nodes)))
        for search in self.searches:
            if not search.is_over:
                self._act(search)
        self.allocator.advance(self.now)
        for search in self.searches:
            if not search.is_over:
                search.tell(m.Tick(self.now))
                self._place(search)
                self.allocator.usage(search.name, search.runner.usage())
                if search.runner.is_finished:
                    search.is_over = True
                    self.allocator.experiment_gone(search.name)
        for name, offer in self.allocator.offers():
            search = next(one for one in self.searches if one.name == name)
            if not search.is_over and offer.instance_id in search.runner.nodes:
                self._obey(search, search.tell(offer))
        check_books(self.allocator)

    def _place(self, search: Sharer) -> None:
        while trial := next(search.runner.waiting(), None):
            for command in search.tell(m.TrialChosen(trial.trial_id)):
                if isinstance(command, c.StartTrial):
                    due = self.now + self.rng.uniform(1.0, 8.0)
                    search.processes[command.trial, command.attempt] = command.instance_id, due
        for one in self.searches:
            for (suspect, _), (node, _) in one.processes.items():
                if one.runner.is_suspect(one.runner.live[suspect]):
                    beside = sum(len(other.on(node)) for other in self.searches) - 1
                    assert beside == 0, f"{suspect} shares {node}"

    def _act(self, search: Sharer) -> None:
        for (trial, attempt), (node, due) in list(search.processes.items()):
            if (trial, attempt) not in search.processes or due > self.now:
                continue
            if trial in search.killers:
                if self.spares_nodes:
                    self._lose_forkserver(search, node)
                else:
                    self._lose(node)
                continue
            step = search.runner.live[trial].last_step + 1
            done = step == STEPS
            result = m.ResultReported(trial, attempt, step, {}, 0.0, 1.0, 1.0, 1.0, step, done=done)
            search.tell(result)
            search.processes[trial, attempt] = node, self.now + self.rng.uniform(1.0, 8.0)
            if done:
                del search.processes[trial, attempt]
                search.tell(m.TrialFinished(trial, attempt))
                search.tell(m.SlotFreed(trial, attempt))

    def _obey(self, search: Sharer, commands: list[c.Command]) -> None:
        for one in commands:
            if (
                isinstance(one, c.PauseTrial | c.StopTrial)
                and (one.trial, one.attempt) in search.processes
            ):
                del search.processes[one.trial, one.attempt]
                search.tell(m.TrialPaused(one.trial, one.attempt))
                search.tell(m.SlotFreed(one.trial, one.attempt))

    def _join(self, name: str) -> None:
        life = self.lives[name] = self.lives.get(name, 0) + 1
        joined = m.NodeJoined(
            f"{name}.{life}", name, "process", "127.0.0.1", {"cpu": CPUS}, is_shared=True
        )
        self.nodes[joined.instance_id] = joined
        self.allocator.node_joined(joined)
        for search in self.searches:
            if not search.is_over:
                search.tell(joined)

    def _lose_forkserver(self, search: Sharer, node: str) -> None:
        self.deaths += 1
        is_shared = sum(len(one.on(node)) for one in self.searches) > 1
        lost = search.on(node)
        for trial, attempt in lost:
            del search.processes[trial, attempt]
            kind = m.FORKSERVER_LOST
            search.tell(m.TrialFailed(trial, attempt, kind, "killed", "", 0.0, is_shared=is_shared))
        for trial, attempt in lost:
            search.tell(m.SlotFreed(trial, attempt))

    def _lose(self, node: str) -> None:
        self.deaths += 1
        name = self.nodes.pop(node).node
        held = {one.name: one.on(node) for one in self.searches}
        for search in self.searches:
            for process in held[search.name]:
                del search.processes[process]
            if not search.is_over:
                is_shared = any(
                    processes for other, processes in held.items() if other != search.name
                )
                search.tell(m.NodeLost(node, "killed", is_dead=True, is_shared=is_shared))
        self.allocator.node_lost(node, is_dead=True)
        self.back.append((self.now + self.rng.uniform(1.0, 20.0), name))
