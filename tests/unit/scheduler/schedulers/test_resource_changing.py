"""The resources that trials get while they run, and what stays with the base scheduler."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tunemq import PlacementGroupFactory
from tunemq_scheduler.core.placement.placement import Placement
from tunemq_scheduler.experiment.algorithm_driver import RunnerView
from tunemq_scheduler.schedulers import (
    ASHAScheduler,
    DistributeResources,
    DistributeResourcesToTopJob,
    FIFOScheduler,
    MedianStoppingRule,
    ResourceChangingScheduler,
    SetResources,
    Stop,
    create_scheduler,
    read_answer,
)
from tunemq_shared.base.errors import ConfigError


class Search(RunnerView):
    """Trials on nodes of some CPUs each, which all belong to the search."""

    def __init__(
        self, scheduler: ResourceChangingScheduler, size: int, *cpus: float, **first: float
    ) -> None:
        super().__init__()
        scheduler.set_search_properties("loss", "min", seed=7)
        self.scheduler = scheduler
        for number, amount in enumerate(cpus):
            self.placement.add_node(f"node-{number}", {"cpu": amount, "gpu": 2.0, "memory": 100.0})
        self.trials: Any = {
            f"t{number}": SimpleNamespace(
                trial_id=f"t{number}",
                number=number,
                config={},
                resources=dict(first or {"cpu": 1.0}),
                status="RUNNING",
                is_finished=False,
                last_result={},
            )
            for number in range(size)
        }
        for trial in self.trials.values():
            scheduler.on_trial_add(self, trial)
            scheduler.horizon(trial)

    def report(self, name: str, step: int = 1, loss: float = 1.0) -> list[Any]:
        """Report a result; follow the answer, and return its actions."""
        trial = self.trials[name]
        trial.last_result = {"training_iteration": step, "loss": loss, "time_total_s": step}
        answer = self.scheduler.on_trial_result(self, trial, trial.last_result)
        decision, actions = read_answer(self.scheduler, "on_trial_result", answer, name)
        for action in actions:
            if isinstance(action, SetResources):
                self.trials[action.trial_id].resources = action.event("").resources
        return [] if decision == "CONTINUE" and not actions else [str(decision), *actions]

    def ends(self, name: str) -> None:
        trial = self.trials.pop(name)
        self.scheduler.on_trial_complete(self, trial, trial.last_result)


def distribute(**options: Any) -> ResourceChangingScheduler:
    return ResourceChangingScheduler(None, DistributeResources(**options))


def test_each_trial_gets_an_even_share_and_more_when_another_ends() -> None:
    search = Search(distribute(), 3, 8.0)
    (_, action) = search.report("t0")
    assert (action.trial_id, action.resources) == ("t0", {"cpu": 2.0})
    assert action.reason == "resources change from 1 cpu to 2 cpu"
    assert search.report("t0", 2) == []
    search.ends("t1")
    assert search.report("t0", 3)[1].resources == {"cpu": 4.0}
    search.ends("t2")
    assert search.report("t0", 4)[1].resources == {"cpu": 8.0}


def test_no_trial_gets_more_than_a_node_has() -> None:
    search = Search(distribute(), 2, 3.0, 3.0, 3.0)
    assert search.report("t0")[1].resources == {"cpu": 3.0}
    search.ends("t1")
    assert search.report("t0", 2) == []


def test_no_trial_grows_while_further_ones_may_come_and_grown_ones_shrink() -> None:
    search = Search(distribute(), 2, 4.0)
    search.report("t0")
    search.may_add = lambda: True
    assert search.report("t1") == []
    assert search.report("t0", 2)[1].resources == {"cpu": 1.0}


@pytest.mark.parametrize(
    ("options", "first", "expected"),
    [
        ({"increase_by": {"CPU": 2}}, {"cpu": 1.0}, {"cpu": 3.0}),
        ({"increase_by": {"cpu": 1}, "increase_by_times": 1}, {"cpu": 1.0}, {"cpu": 2.0}),
        ({"reserve_resources": {"cpu": 3}}, {"cpu": 1.0}, {"cpu": 2.0}),
        ({}, {"cpu": 1.0, "gpu": 1.0}, None),
        ({"increase_by": {"cpu": 1}}, {"cpu": 1.0, "gpu": 0.5}, {"cpu": 4.0, "gpu": 0.5}),
        ({}, {"memory": 10.0}, None),
    ],
)
def test_requests_grow_by_units_up_to_their_limits(
    options: dict[str, Any], first: dict[str, float], expected: dict[str, float] | None
) -> None:
    search = Search(distribute(**options), 2, 8.0, **first)
    answer = search.report("t0")
    assert (answer[1].resources if answer else None) == expected


def test_shared_gpus_grow_to_whole_ones() -> None:
    search = Search(distribute(), 1, 8.0, cpu=1.0, gpu=0.5)
    assert search.report("t0")[1].resources == {"cpu": 2.0, "gpu": 2.0}


def test_best_trial_gets_what_the_first_requests_of_others_leave() -> None:
    allocate = DistributeResourcesToTopJob(reserve_resources={"cpu": 1})
    search = Search(ResourceChangingScheduler(None, allocate), 3, 8.0)
    assert search.report("t0", loss=2.0)[1].resources == {"cpu": 5.0}
    assert search.report("t1", loss=1.0)[1].resources == {"cpu": 5.0}
    assert search.report("t0", 2, loss=2.0)[1].resources == {"cpu": 1.0}
    assert search.report("t2", loss=float("nan")) == []


def test_top_job_without_a_metric_names_the_missing_argument() -> None:
    search = Search(ResourceChangingScheduler(None, DistributeResourcesToTopJob()), 1, 8.0)
    search.scheduler._metric = None
    with pytest.raises(ConfigError, match="metric is missing"):
        search.report("t0")


def test_decisions_of_the_base_scheduler_count_and_leave_the_request() -> None:
    search = Search(ResourceChangingScheduler(ASHAScheduler(max_t=2)), 2, 8.0)
    assert search.report("t0")[0] == "CONTINUE"
    assert search.report("t0", 2) == ["STOP"]
    assert search.scheduler.num_trials == 1


def test_base_scheduler_that_observes_is_asked_at_its_horizon_only() -> None:
    seen: list[Any] = []

    class Noting(MedianStoppingRule):
        def observe(self, runner: Any, trial: Any, result: dict[str, Any]) -> None:
            seen.append(result["training_iteration"])
            super().observe(runner, trial, result)

        def horizon(self, trial: Any) -> Any:
            return MedianStoppingRule.horizon(self, trial)

    base = Noting(grace_period=3, min_samples_required=1)
    search = Search(ResourceChangingScheduler(base), 2, 2.0)
    for step in (1, 2, 3):
        search.report("t0", step)
        search.scheduler.horizon(search.trials["t0"])
    assert seen == [1, 2]


def test_trials_that_the_base_scheduler_stops_by_an_action_count_no_more() -> None:
    class StopsOthers(FIFOScheduler):
        def on_trial_result(self, runner: Any, trial: Any, result: dict[str, Any]) -> Any:
            return [Stop("t1", "one is enough"), Stop("t2")]

    search = Search(ResourceChangingScheduler(StopsOthers()), 3, 6.0)
    _, *actions = search.report("t0")
    assert [type(one) for one in actions] == [Stop, Stop, SetResources]
    assert actions[-1].resources == {"cpu": 6.0}


def test_state_is_the_same_behind_json() -> None:
    search = Search(distribute(), 2, 8.0)
    search.report("t0")
    again = distribute()
    again.set_search_properties("loss", "min", seed=7)
    again.set_state(json.loads(json.dumps(search.scheduler.get_state())))
    assert again.get_state() == search.scheduler.get_state()
    search.scheduler = again
    search.ends("t1")
    assert search.report("t0", 2)[1].resources == {"cpu": 8.0}


def test_state_is_none_if_the_base_scheduler_has_none() -> None:
    class OfTheUser(FIFOScheduler):
        pass

    assert ResourceChangingScheduler(OfTheUser()).get_state() is None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"base_scheduler": "asha"}, "base_scheduler='asha'"),
        ({"base_scheduler": ResourceChangingScheduler()}, "base_scheduler="),
        ({"resources_allocation_function": {"cpu": 2}}, "resources_allocation_function={'cpu': 2}"),
        ({"resources_allocation_function": DistributeResources}, "such as DistributeResources()"),
    ],
)
def test_invalid_argument_is_named(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        create_scheduler("resource_changing", **given)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"increase_by": {"cpu": "two"}}, "increase_by={'cpu': 'two'}"),
        ({"reserve_resources": {"cpu": -1}}, "reserve_resources={'cpu': -1}"),
        ({"increase_by_times": True}, "increase_by_times=True"),
        ({"increase_by_times": 1.5}, "increase_by_times=1.5"),
    ],
)
def test_invalid_amount_is_named(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        DistributeResources(**given)
    assert told in str(error.value)


@pytest.mark.parametrize("answer", [2, "cpu", [1]])
def test_answer_of_the_function_that_is_no_request_is_named(answer: Any) -> None:
    search = Search(ResourceChangingScheduler(None, lambda *_: answer), 1, 8.0)
    with pytest.raises(ConfigError, match="resources_allocation_function returned"):
        search.report("t0")


def test_bundles_of_the_function_are_added_up() -> None:
    bundles = PlacementGroupFactory([{"CPU": 1}, {"CPU": 2}])
    search = Search(ResourceChangingScheduler(None, lambda *_: bundles), 1, 8.0)
    assert search.report("t0")[1].resources == {"cpu": 3.0}


def test_capacity_counts_shares_of_devices_and_the_scarcest_amount() -> None:
    placement = Placement()
    placement.add_node("one", {"cpu": 8.0, "gpu": 2.0})
    placement.add_node("other", {"cpu": 3.0})
    assert placement.capacity({"cpu": 1.0}) == 11
    assert placement.capacity({"cpu": 2.0}) == 5
    assert placement.capacity({"cpu": 1.0, "gpu": 1.0}) == 2
    assert placement.capacity({"cpu": 1.0, "gpu": 0.4}) == 4
    assert placement.capacity({"cpu": 5.0, "gpu": 0.4}) == 1
    assert placement.capacity({"cpu": 9.0}) == 0
    assert placement.capacity({"cpu": 0.1}) == 110
    assert placement.capacity({"tpu": 1.0}) == 0
