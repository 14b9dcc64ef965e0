"""A search ends once no trial can run any more, even if nodes remain."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.scheduler.scripted_loop import NODE, Loop, result, started
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.experiment.experiment_loop import SEARCH_TIMEOUT_S
from tunemq_scheduler.schedulers import FIFOScheduler, TrialScheduler
from tunemq_scheduler.search import (
    BasicVariantGenerator,
    ConcurrencyLimiter,
    Searcher,
)
from tunemq_shared.base.errors import SearchFailed
from tunemq_shared.protocol import messages as m

SHARED = m.NodeJoined("n.1", "n", "host", "127.0.0.1", {"cpu": 1.0}, is_shared=True)
OFFER = m.NodeOffered("n.1", 1, {"cpu": 1.0})
LOST = m.NodeLost("n.1", "its lease ran out")


class OpenSearch(BasicVariantGenerator):
    """A search of unknown length; after the first configuration it returns ``then``."""

    def __init__(self, then: str | None) -> None:
        super().__init__()
        self.then = then

    def suggest(self, trial_id: str) -> Any:
        return super().suggest(trial_id) if trial_id == "t_00000" else self.then


def farm_loop(**options: Any) -> Loop:
    """Build a loop on a farm in which the loss of one node ends a trial."""
    loop = Loop(nodes_may_come=True, **options)
    loop.runner.settings = RunnerSettings(request={"cpu": 1.0}, max_node_losses=0)
    return loop


def run_and_lose_the_only_trial(loop: Loop, lost: m.NodeLost = LOST) -> None:
    loop.turn(SHARED, OFFER)
    loop.batch(1, started())
    loop.turn(lost)
    assert loop.runner.counts["ERROR"] == 1


@pytest.mark.parametrize("is_dead", [False, True])
def test_f01_search_whose_last_trial_falls_with_the_only_node_ends(is_dead: bool) -> None:
    loop = farm_loop(trials=1)
    run_and_lose_the_only_trial(loop, m.NodeLost("n.1", "it is gone", is_dead))
    assert loop.runner.is_finished


def test_f01_search_without_any_further_offer_ends() -> None:
    loop = farm_loop(trials=1)
    run_and_lose_the_only_trial(loop)
    loop.turn(m.NodeJoined("n.2", "n", "host", "127.0.0.1", {"cpu": 1.0}, is_shared=True))
    assert loop.runner.is_finished


def test_f01_search_algorithm_without_an_end_is_asked_when_no_node_is_left() -> None:
    loop = farm_loop(search=OpenSearch(Searcher.FINISHED), trials=-1)
    run_and_lose_the_only_trial(loop)
    assert loop.runner.is_finished


def test_f01_search_algorithm_that_waits_for_nothing_fails_when_no_node_is_left() -> None:
    loop = farm_loop(search=OpenSearch(None), trials=-1)
    run_and_lose_the_only_trial(loop)
    loop.now += SEARCH_TIMEOUT_S + 1.0
    with pytest.raises(SearchFailed, match="OpenSearch suggested no configuration for 60 s"):
        loop.turn()


def test_f01_next_configuration_requests_a_node_when_none_is_left() -> None:
    loop = farm_loop(trials=2)
    run_and_lose_the_only_trial(loop)
    loop.turn()
    assert not loop.runner.is_finished
    assert [one.request for one in loop.runner.usage().wants] == [{"cpu": 1.0}]
    loop.turn(m.NodeJoined("n.2", "n", "host", "127.0.0.1", {"cpu": 1.0}))
    assert loop.runner.counts["RUNNING"] == 1


def test_search_whose_requests_depend_on_configurations_requests_a_node() -> None:
    loop = Loop(nodes_may_come=True)
    loop.runner.settings = RunnerSettings(request=None)
    loop.turn()
    assert [one.request for one in loop.runner.usage().wants] == [{"cpu": 1.0}]


def test_loop_with_the_last_configuration_given_knows_that_no_more_come() -> None:
    loop = Loop(trials=1)
    loop.turn(NODE)
    assert loop.runner.exhausted


class Silent(Searcher):
    """Suggests the first ``most`` configurations and never reports that it is finished."""

    def __init__(self, most: int = 0) -> None:
        super().__init__()
        self.left = most

    def suggest(self, trial_id: str) -> Any:
        self.left -= 1
        return {"x": 1} if self.left >= 0 else None

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        pass


def silent_loop(most: int = 0) -> Loop:
    return Loop(search=ConcurrencyLimiter(Silent(most), 2), trials=4)


def test_search_algorithm_that_suggests_nothing_is_reported_and_then_fails_the_search() -> None:
    loop = silent_loop()
    loop.turn(NODE)
    loop.now = 9.0
    assert not any(line[0] == "notices" for line in loop.turn())
    loop.now = 11.0
    [told] = [line[1] for line in loop.turn() if line[0] == "notices"]
    assert told == loop.loop.waits_for_search
    assert told.startswith("waiting for Silent: it has suggested no configuration for 11 s")
    loop.now = 20.0
    assert not any(line[0] == "notices" for line in loop.turn()), "the notice is given once"
    loop.now = 61.0
    with pytest.raises(SearchFailed, match="Silent suggested no configuration for 60 s"):
        loop.turn()


def test_search_algorithm_that_waits_for_the_result_of_a_trial_is_waited_for() -> None:
    loop = silent_loop(most=1)
    loop.turn(NODE)
    loop.batch(1, started())
    loop.now = 3600.0
    loop.turn()
    assert loop.loop.waits_for_search == ""
    loop.batch(2, result(1), m.TrialFinished("t_00000", 1), m.SlotFreed("t_00000", 1))
    loop.now += 30.0
    loop.turn()
    loop.now += 31.0
    with pytest.raises(SearchFailed, match="Silent suggested no configuration for 60 s"):
        loop.turn()


def test_search_algorithm_that_could_not_be_asked_gets_its_full_time_again() -> None:
    loop = silent_loop()
    loop.runner.settings = RunnerSettings(request={"cpu": 1.0}, nodes_may_come=False)
    loop.turn(NODE)
    loop.now = 40.0
    loop.turn(LOST)
    loop.now = 100.0
    loop.turn(m.NodeReturned("n.1"))
    assert loop.loop.waits_for_search == ""


class Undecided(FIFOScheduler):
    """Never lets a trial start."""

    def choose_trial_to_run(self, tune_controller: Any) -> None:
        return None


class Pausing(FIFOScheduler):
    """Pauses each trial and starts only new ones."""

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        return TrialScheduler.PAUSE

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        waiting = tune_controller.get_trials()
        return next((one for one in waiting if one.status == "PENDING"), None)


def test_trial_scheduler_that_starts_no_pending_trial_ends_the_search_with_the_reason() -> None:
    loop = Loop(scheduler=Undecided(), trials=1)
    with pytest.raises(SearchFailed, match="PENDING, and Undecided lets none of them continue"):
        loop.turn(NODE)


def test_trial_scheduler_that_resumes_no_paused_trial_ends_the_search_with_the_reason() -> None:
    loop = Loop(scheduler=Pausing(), trials=1)
    loop.turn(NODE)
    loop.batch(1, started(), result(1))
    paused = m.TrialPaused("t_00000", 1)
    with pytest.raises(SearchFailed, match="PAUSED, and Pausing lets none of them continue"):
        loop.batch(3, paused, m.SlotFreed("t_00000", 1))
