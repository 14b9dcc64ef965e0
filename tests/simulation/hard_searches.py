"""Searches on a farm that may lack anything permanently, and their outcomes.

python -m tests.simulation.hard_searches 1234
python -m tests.simulation.hard_searches 1234 storage
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final

from msgspec.structs import replace

from tests.simulation.farm import CountingSink
from tests.simulation.hard_algorithms import MAX_T, SCHEDULERS, AfterSome, draw_search, hyperband
from tests.simulation.hard_farm import FOR_EVER, PATTERN, Fate, HardFarm, Shapes
from tests.simulation.simulated_problem import Problem
from tests.simulation.simulated_supervisor import NAME, OWNER, SharedExecutor, SimulatedSupervisor
from tunemq.testing.faulty_executor import FaultyTrialExecutor
from tunemq.testing.simulated_faults import FaultSettings
from tunemq.testing.simulated_uploads import UploadSettings
from tunemq_scheduler.core.placement.placement import could_hold, holds_when_empty
from tunemq_scheduler.core.runner_settings import ALONE, EXCLUDE_NODE, LogRule, RunnerSettings
from tunemq_scheduler.core.shared_amounts import WHOLE_NODE
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.core.trials.trial import PAUSED, PENDING, RUNNING, Trial
from tunemq_scheduler.experiment.event_driver import EventDriver
from tunemq_scheduler.experiment.experiment_loop import ExperimentLoop
from tunemq_scheduler.experiment.experiment_view import ExperimentView
from tunemq_scheduler.farm.allocation.members import FairShareSettings
from tunemq_scheduler.farm.ipc.status_reporter import SearchStatusReporter
from tunemq_shared.base.errors import InvariantBroken, ResourceError, SearchFailed
from tunemq_shared.protocol import messages as m

#: Time of the last new fault; nodes that are gone for good stay gone.
CALM_S: Final = 60.0
#: A search in which nothing happened for so long waits: all that TuneMQ waits for by itself (the
#: pause of a node, a search algorithm, an upload of a lost node, preemption) takes less.
QUIET_S: Final = 1_500.0
#: An unfinished search must end before this.
BOUND_S: Final = 2 * 3_600.0
#: How long a poll of a calm search may take.
_STRIDE_S: Final = 10.0
_NOTHING_NEW: Final = (m.Tick, m.NodeOffered, m.BatchRead)


class HardSearch:
    """One search; all that is drawn follows from the seed.

    Args:
        bad: how trials fail on the first node for ever, where nothing else goes wrong: all trials
            could end on the others, of which another experiment uses some for a while.
    """

    def __init__(self, seed: int, bad: str = "") -> None:
        self.seed, self._bad = seed, bad
        self.rng = rng = random.Random(f"{seed}/hard")
        self.is_shared = rng.random() < 0.7
        self.is_embedded = not self.is_shared and rng.random() < 0.3
        self._draw_settings(rng)
        self._draw_farm(rng)
        if bad:
            self._have_good_nodes(rng)
        trials = rng.randint(1, 8)
        max_trials = rng.choice([None, None, trials])
        search = draw_search(rng, trials, seed)
        make_scheduler = rng.choice(SCHEDULERS)
        if seed % 7 == 6:
            make_scheduler = hyperband
        stopper = rng.choice([0, 0, 0, 7, 12])
        self.problem = Problem(
            make_scheduler,
            seed=seed,
            trials=trials,
            max_t=MAX_T,
            make_search=search,
            make_stopper=lambda: AfterSome(stopper) if stopper else None,
        )
        self._max_trials = max_trials
        self._budget = rng.choice([None, None, None, 30.0, 400.0])
        self.num_trials = max_trials or self.problem.algorithms().search.total
        self.turns: list[bytes] = []
        self.dispatcher = CountingSink()
        self.lives = 1
        self.progress = 0.0
        self.api: SimulatedSupervisor | None = None
        self._dies = self._ends = ""
        self._left: set[str] = set()
        self._failed_at: float = -QUIET_S
        self.quotas: dict[str, float] = {}
        if bad:
            self._have_bad_node(rng, bad)
        else:
            self._draw_troubles(rng)
        self.said: list[str] = []

    # --- random choices ---------------------------------------------------------------------------

    def _draw_settings(self, rng: random.Random) -> None:
        request: dict[str, float] = rng.choice(
            [{"cpu": 1.0}, {"cpu": 1.0}, {"cpu": 2.0}, {"gpu": 1.0}, {"cpu": 1.0, "gpu": 0.5}]
        )
        other: dict[str, float] = rng.choice([{"cpu": 4.0}, {"gpu": 2.0}, {"tpu": 1.0}])
        self._requests = [request]
        if rng.random() < 0.3:
            self._requests.append(other)
        is_known = len(self._requests) == 1 and rng.random() < 0.8
        self.settings = RunnerSettings(
            request=request if is_known else None,
            max_concurrent=rng.choice([0, 0, 1, 2, 3]),
            max_failures=rng.choice([-1, 0, 1, 3]),
            max_storage_failures=rng.choice([-1, 0, 2]),
            max_node_losses=rng.choice([-1, 0, 1, 2]),
            retry_cuda_memory=rng.choice([False, True, ALONE]),
            fail_fast=rng.random() < 0.1,
            log_rules=(LogRule(PATTERN, EXCLUDE_NODE),),
            max_excluded_nodes=rng.choice([-1, 1, 2]),
            nodes_may_come=not self.is_embedded,
        )

    def _draw_farm(self, rng: random.Random) -> None:
        shapes: list[dict[str, float]] = [
            {"cpu": 1.0},
            {"cpu": 2.0},
            {"cpu": 4.0},
            {"cpu": 4.0, "gpu": 1.0},
            {"cpu": 4.0, "gpu": 2.0},
        ]
        count = 1 if self.is_embedded else rng.choice([1, 1, 2, 2, 3, 4])
        gpus = any("gpu" in one for one in self._requests) and rng.random() < 0.8
        mine = tuple(rng.choice(shapes[3:] if gpus else shapes) for _ in range(count))
        self.simulation = Shapes(
            nodes=count,
            shapes=mine,
            seed=self.seed,
            uploads=rng.choice(
                [UploadSettings(), UploadSettings(upload_s=5.0, lost=rng.choice([0.0, 0.05]))]
            ),
        )
        self.faults = FaultSettings(
            latency_s=rng.choice([0.0, 0.2]),
            lost=rng.choice([0.0, 0.1]),
            doubled=rng.choice([0.0, 0.1]),
            late=rng.choice([0.0, 0.2]),
            node_deaths=rng.choice([0, 0, 2]),
            process_deaths=rng.choice([0, 0, 3]),
            cut_offs=rng.choice([0, 0, 2]),
            outages=rng.choice([0, 0, 0, 1]),
            wipes=rng.choice([0, 0, 0, 1]),
            bad_devices=rng.choice([0, 0, 2]),
            linger_s=rng.choice([0.0, 0.5]),
            until_s=CALM_S,
        )

    def _have_good_nodes(self, rng: random.Random) -> None:
        self.is_shared, self.is_embedded = True, False
        self._requests = [{"cpu": 1.0}]
        self.settings = replace(
            self.settings,
            request={"cpu": 1.0},
            max_failures=-1,
            max_storage_failures=-1,
            max_excluded_nodes=-1,
            nodes_may_come=True,
        )
        shapes = tuple({"cpu": float(rng.randint(1, 3))} for _ in range(rng.randint(2, 3)))
        self.simulation = Shapes(nodes=len(shapes), shapes=shapes, seed=self.seed)
        self.faults = FaultSettings(until_s=CALM_S)

    def _have_bad_node(self, rng: random.Random, bad: str) -> None:
        problem, names = self.problem, self.simulation.names()
        self.farm = HardFarm(self.simulation, self.faults, problem.metrics, problem.step_time)
        self.farm.bad[names[0]] = (bad, FOR_EVER)
        job = {"cpu": rng.choice([1.0, 2.0])}
        other = [(job, rng.uniform(20.0, 200.0)) for _ in range(rng.randint(0, 4))]
        self.api = SimulatedSupervisor(self.farm, rng, FairShareSettings(preempts=False), other)

    def _draw_troubles(self, rng: random.Random) -> None:
        """Create the farm, and plan its temporary and permanent faults."""
        problem = self.problem
        self.farm = farm = HardFarm(
            self.simulation, self.faults, problem.metrics, problem.step_time
        )
        farm.sync_timeout = rng.choice([60.0, 60.0, None])
        farm.limit_s = rng.choice([FOR_EVER, FOR_EVER, 4.0])
        for number in range(3):
            if rng.random() < 0.3:
                farm.fates[number] = self._draw_fate(rng)
        names = self.simulation.names()

        def at(what: Callable[..., object], *args: Any) -> None:
            farm.time.after(CALM_S * rng.random(), what, *args)

        def lasts() -> float:
            return rng.choice([5.0, 40.0, 200.0, FOR_EVER])

        for name in names if not self.is_embedded else ():
            kind = rng.choice(["", "", "", "gone", "cut off", "late", "leaves"])
            if kind == "gone":
                at(farm.remove, name)
            elif kind == "cut off":
                at(farm.cut_off_for, name, lasts())
            elif kind == "leaves":
                at(self._leave, name)
        if rng.random() < 0.15 and not self.is_embedded:  # no node is left, however many there were
            at(farm.remove_all)
        if rng.random() < 0.3:
            what = rng.choice(["storage", "start", "died", "user"])
            farm.bad[rng.choice(names)] = (what if what != "died" else "death", lasts())
        if rng.random() < 0.2:
            at(farm.lack, "store", lasts())
        if rng.random() < 0.2:
            at(farm.lack, "gpus", lasts())
        if rng.random() < 0.2:
            at(self._withhold, lasts())
        for _ in range(rng.choice([0, 0, 0, 1, 2])):
            at(setattr, self, "_dies", "scheduler")
        if rng.random() < 0.1:
            at(setattr, self, "_dies", "power cut")
        if rng.random() < 0.1:
            at(self._pause)
        if rng.random() < 0.1:
            at(self._stop_one)
        if self.is_shared:
            self._draw_sharing(rng, names, at, lasts)

    def _draw_sharing(
        self, rng: random.Random, names: list[str], at: Any, lasts: Callable[[], float]
    ) -> None:
        quotas: dict[str, dict[str, float]] = {}
        if rng.random() < 0.25:
            quotas = {OWNER: {rng.choice(["cpu", "gpu"]): rng.choice([0.5, 1.0, 2.0])}}
        other = None
        if rng.random() < 0.5:
            job: dict[str, float] = rng.choice([{"cpu": 1.0}, {"cpu": 4.0}, {"gpu": 1.0}])
            other = [(job, rng.uniform(5.0, 100.0)) for _ in range(rng.randint(1, 6))]
        settings = FairShareSettings(quotas=quotas, preempts=rng.random() < 0.5)
        self.quotas = quotas.get(OWNER, {})
        self.api = api = SimulatedSupervisor(self.farm, rng, settings, other)

        def drain(name: str, seconds: float) -> None:
            api.drain(name, 5.0)
            if seconds < FOR_EVER:
                self.farm.time.after(seconds, api.resume, name)

        def pause(seconds: float) -> None:
            api.pause()
            if seconds < FOR_EVER:
                self.farm.time.after(seconds, api.unpause)

        for name in names:
            if rng.random() < 0.2:
                at(drain, name, lasts())
        if rng.random() < 0.15:
            at(pause, lasts())

    def _draw_fate(self, rng: random.Random) -> Fate:
        what = rng.choice(["user", "death", "node", "cuda_memory", "stalled", "forkserver", "time"])
        what = {"time": "time_limit"}.get(what, what)
        limits = {
            "node": self.settings.max_node_losses,
            "forkserver": self.settings.max_node_losses,
        }
        limit = limits.get(what, self.settings.max_failures)
        # A failure with unlimited retries must be temporary: else the search rightly never ends.
        return Fate(
            step=rng.randint(1, MAX_T),
            what=what,
            times=rng.choice([1, 2, 4]) if limit < 0 else rng.choice([1, 3, FOR_EVER]),
            prints=what == "user" and rng.random() < 0.5,
        )

    # --- events -----------------------------------------------------------------------------------

    def _leave(self, name: str) -> None:
        """A node deregisters."""
        farm = self.farm
        instance_id = farm.current[name]
        farm.remove(name)
        executor = self.executor
        if instance_id in executor._nodes and not executor._is_closed:
            del executor._nodes[instance_id]
            executor._dead.add(instance_id)
            self._left.add(instance_id)
            executor._read_events.append(m.NodeLost(instance_id, "it left", is_dead=True))

    def _pause(self) -> None:
        self._ends = self.rng.choice(["resumed", "for good"])

    def _withhold(self, seconds: float) -> None:
        name = self.rng.choice(self.simulation.names())
        instance_id = self.farm.current[name]
        node = self.farm.nodes[instance_id]
        for gpu in self.simulation.joined(instance_id, name).gpus:
            node.withheld = {**node.withheld, gpu.uuid: "XID 79"}
            if seconds < FOR_EVER:
                self.farm.time.after(seconds, node.use_again, gpu.uuid)

    def _stop_one(self) -> None:
        if self.loop.trials:
            self.loop.request_stop("a person wants it", self.rng.choice(sorted(self.loop.trials)))

    # --- the run ----------------------------------------------------------------------------------

    def run(self) -> str:
        """Run the search; return its outcome: ``ended``, ``failed: ...``, ``waits: ...``."""
        self.farm.open(self.problem.plan)
        runner = TrialRunner(self.settings)
        driver = EventDriver(runner, self.problem.algorithms(), self.problem.plan)
        self._begin(driver, is_new=False)
        while True:
            came_to = self._live()
            if came_to:
                return came_to
            self._take_up()

    def _live(self) -> str:
        runner, time = self.loop.runner, self.farm.time
        since: float | None = None
        while not runner.is_finished:
            if self._dies:
                is_cold, self._dies = self._dies == "power cut", ""
                self._end_life(is_cold=is_cold)
                return ""
            if self._ends and not runner.interrupted:
                self.loop.interrupt("a person wants it")
            try:
                self.loop.step()
            except (SearchFailed, ResourceError) as error:
                return f"failed: {error}"
            if runner.interrupted:
                since = time.now if since is None else since
                if time.now > since + 2.0:
                    break
            elif time.now - max(self.progress, CALM_S) > QUIET_S:
                return self._quiet()
            elif time.now > BOUND_S:
                return self._endless()
        if runner.interrupted:
            if self._ends == "for good":
                return "waits: a person paused it"
            self._ends = ""
            self._end_life(is_cold=self.rng.random() < 0.5)
            return ""
        return "ended"

    def _end_life(self, *, is_cold: bool) -> None:
        self._is_cold = is_cold
        self.executor.close()
        if self.api is not None:
            self.api.away()
        if is_cold:
            for name, instance_id in self.farm.current.items():
                if self.farm.nodes[instance_id].is_alive and name not in self.farm.gone:
                    self.farm.kill(instance_id)
            self.farm.wipe()
        self.farm.time.pass_to(self.farm.time.now + self.rng.choice([0.0, 5.0, 20.0]))

    def _take_up(self) -> None:
        self.lives += 1
        algorithms = self.problem.algorithms()
        runner = TrialRunner(self.settings)
        driver = EventDriver(runner, algorithms, self.problem.plan)
        driver.replay(m.decode_records(turn) for turn in self.turns)
        errored = self.rng.choice(["", "", "resume", "restart"])
        is_new = self._is_cold or self.rng.random() < 0.5
        self._begin(driver, is_new=is_new)
        self.loop.resume(
            m.ExperimentResumed(
                self.lives, self.farm.time.now, errored=errored, is_cold=self._is_cold
            )
        )
        if not self._is_cold:
            self.loop.reattach()

    def _begin(self, driver: EventDriver, *, is_new: bool) -> None:
        kind = SharedExecutor if self.is_shared else FaultyTrialExecutor
        self.executor = kind(self.farm, self.lives)
        self.executor._dead |= self._left  # which are no longer registered
        began, before = self.farm.time.now, driver.runner.elapsed
        self.loop = ExperimentLoop(
            driver=driver,
            plan=self.problem.plan,
            executor=self.executor,
            journal=self,
            dispatcher=self.dispatcher,
            resources_for=self._resources_for,
            trial_prefix="t",
            clock=lambda: before + self.farm.time.now - began,
            discard=self.farm.store.discard,
            time_budget_s=self._budget,
            max_trials=self._max_trials,
            nodes_may_come=not self.is_embedded,
        )
        quick, stride = self.loop._search_timeout_s, _STRIDE_S

        def patience() -> float:
            """As the loop's, but that of a calm search takes longer."""
            seconds = quick()
            is_calm = self.farm.time.now > max(CALM_S, self.progress + 30.0)
            return stride if seconds >= 0.5 and is_calm else seconds

        self.loop._search_timeout_s = patience
        prepared = SimpleNamespace(
            tune=SimpleNamespace(metric="loss", direction="min"), trials=self.num_trials
        )
        dispatcher = SimpleNamespace(fatal={}, failures=None, best=None)
        self.view = ExperimentView(
            self.loop, dispatcher, prepared, lambda: self.loop.runner.elapsed
        )
        search = SimpleNamespace(loop=self.loop, dispatcher=dispatcher, is_killed=False)
        self.status_reporter = SearchStatusReporter(search, self.view)
        if self.api is not None:
            self.api.begin(self.executor, self.status_reporter.usage, is_new=is_new)
        self.executor.open(self.problem.plan)

    def _resources_for(self, config: dict[str, Any]) -> dict[str, float]:
        return dict(self._requests[int(config["lr"] * 1e6) % len(self._requests)])

    # --- the journal ------------------------------------------------------------------------------

    def append(self, journal_records: Sequence[m.JournalRecord]) -> None:
        self.turns.append(m.encode(journal_records))
        if any(not isinstance(one.event, _NOTHING_NEW) for one in journal_records):
            self.progress = self.farm.time.now
            if self.api is not None:
                self.api.progress = self.progress
        if any(
            isinstance(one.event, m.TrialFailed | m.TrialProcessDied) for one in journal_records
        ):
            self._failed_at = self.farm.time.now

    def close(self) -> None:
        pass

    # --- where it waits ---------------------------------------------------------------------------

    def _quiet(self) -> str:
        """No event happens any more: check that the reported reason for waiting is true.

        Raises:
            InvariantBroken: the search reports no reason, or a wrong one.
        """
        runner = self.loop.runner
        self.said = said = list(self._words())
        for trial in runner.live.values():
            self._check_trial(trial, said)
        waiting = [one for one in runner.live.values() if not one.is_finished]
        if not waiting and not runner.live:
            self._check_no_trial(said)
        if not said:
            self._break("it says nothing")
        return f"waits: {'; '.join(said)}"

    def _words(self) -> Iterator[str]:
        """The explanations of `tunemq why` and the table."""
        runner = self.loop.runner
        if self.api is not None:
            for wanted in self.status_reporter.usage().wants:
                asked = WHOLE_NODE if wanted.is_alone else wanted.request
                yield from self.api.allocator.explainer.why(NAME, asked)
        elif not runner.nodes:
            yield "There is no worker"
        else:
            for trial in runner.live.values():
                if trial.status in {PENDING, PAUSED}:
                    yield from self._obstacles(trial)
        yield from self.view.notes

    def _obstacles(self, trial: Trial) -> Iterator[str]:
        """Why no node can hold a trial."""
        runner = self.loop.runner
        if why := runner.placement.why_never(trial.resources):
            yield f"{trial.trial_id} waits for a bigger node: {why}"
        elif runner.shuns_all(trial):
            yield f"{trial.trial_id} waits for another node than {trial.excluded}"

    def _check_trial(self, trial: Trial, said: list[str]) -> None:
        farm, runner = self.farm, self.loop.runner
        if trial.is_finished:
            if trial.checkpoints.uploading and farm.is_store_away and farm.sync_timeout is None:
                return
            self._break(f"{trial.trial_id} has ended, and is still kept")
        if trial.status == RUNNING:
            what = trial.waits[0]
            lacks = farm.is_store_away and farm.sync_timeout is None
            if what == "device":
                lacks = farm.time.now < farm.gpus_busy_until
            if not (what and lacks):
                self._break(f"{trial.trial_id} runs and does nothing: {trial.waits}")
        elif trial.status == PENDING or not runner.counts[PENDING]:
            if trial.status == PAUSED and runner.counts[RUNNING]:
                return
            places = self._places(trial.resources, trial.excluded)
            if places and not runner.counts[RUNNING]:  # else running trials use the room
                self._break(f"{trial.trial_id} ({trial.status}) could continue on {places}: {said}")
            words = [*self.status_reporter._reasons(trial), *said]
            if not said or any("offered next" in one for one in words):
                self._break(f"{trial.trial_id} ({trial.status}) waits, and is told: {words}")

    def _check_no_trial(self, said: list[str]) -> None:
        runner = self.loop.runner
        request = self.settings.request
        requests = self._requests if request is None else [request]
        if runner.suggested or any(self._places(one, ()) for one in requests):
            self._break(f"it asks for no configuration: {said}")

    def _places(self, request: dict[str, float], excluded: Sequence[str]) -> list[str]:
        """The nodes that could take a trial now, by all that is true of the farm."""
        api, farm = self.api, self.farm
        if api is not None and (api.is_paused or self._is_over_quota(request)):
            return []
        found = []
        for name, instance_id in farm.current.items():
            node = farm.nodes[instance_id]
            if not node.is_reachable or name in excluded:
                continue
            if api is not None and name in api.drained:
                continue
            joined = self.simulation.joined(instance_id, name, node.withheld)
            if holds_when_empty(joined, request) and could_hold(joined, request):
                found.append(name)
        return found if api is None or api.is_other_over else []

    def _is_over_quota(self, request: dict[str, float]) -> bool:
        return any(request.get(name, 0.0) > most for name, most in self.quotas.items())

    def _endless(self) -> str:
        """Check a search that never ends: every resource that it could use must fail."""
        farm, runner = self.farm, self.loop.runner
        if farm.time.now - self._failed_at < QUIET_S:
            kinds = {kind for trial in runner.live.values() for kind in trial.in_a_row}
            if farm.is_store_away and kinds & {"storage", "restore"}:
                return "waits: the store is away, and its trials are tried for ever"
            for trial in runner.live.values():
                places = self._places(trial.resources, trial.excluded)
                if not places or any(not farm.is_bad(one) for one in places):
                    break
            else:
                return "waits: all nodes that could hold its trials fail them"
        live = [(one.trial_id, one.status, one.num_failures) for one in runner.live.values()]
        self._break(f"it has no end: {live}, {list(self._words())}")
        return ""

    def _break(self, text: str) -> None:
        shape = "shared" if self.is_shared else "embedded" if self.is_embedded else "own"
        raise InvariantBroken(
            f"I6: seed {self.seed} ({shape}, at {self.farm.time.now:.0f} s): {text}; "
            f"once more: python -m tests.simulation.hard_searches {self.seed} {self._bad}"
        )


def check(seed: int, bad: str = "") -> str:
    """Run one search; return its outcome.

    Args:
        seed, bad: see `HardSearch`.

    Raises:
        InvariantBroken: it waits for an impossible event, or does not say for which.
    """
    return HardSearch(seed, bad).run()


if __name__ == "__main__":
    print(check(int(sys.argv[1]), *sys.argv[2:]))
