"""Resource requests of a trial, and errors about those that cannot be met."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tunemq_shared.base.errors import ConfigError, TrainableError
from tunemq_shared.trainable.parameters import with_parameters
from tunemq_shared.trainable.resources import PlacementGroupFactory, resources_of, with_resources


def train(config: dict[str, Any], data: Any = None) -> Any:
    return config, data


class Plain:
    def setup(self, config: dict[str, Any]) -> None: ...


class Asks(Plain):
    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> Any:
        return config.get("needs")


@pytest.mark.parity(85)
def test_trial_without_a_request_gets_one_cpu() -> None:
    assert resources_of(train, {}) == {"cpu": 1.0}
    assert resources_of(Plain, {}) == {"cpu": 1.0}
    assert resources_of(Asks, {}) == {"cpu": 1.0}


@pytest.mark.parametrize(
    ("request_", "amounts"),
    [
        ({"cpu": 2, "gpu": 0.5}, {"cpu": 2.0, "gpu": 0.5}),
        ({"CPU": 2, "GPU": 3}, {"cpu": 2.0, "gpu": 3.0}),
        ({"cpu": 0, "gpu": 1}, {"gpu": 1.0}),
        ({"cpu": 0.25, "Licence": 1}, {"cpu": 0.25, "Licence": 1.0}),
        ({"cpu": np.int64(2), "gpu": np.float32(0.5)}, {"cpu": 2.0, "gpu": 0.5}),
        (PlacementGroupFactory([{"CPU": 1}, {"CPU": 1, "GPU": 1}]), {"cpu": 2.0, "gpu": 1.0}),
        (PlacementGroupFactory([{"CPU": 0.1}, {"CPU": 0.2}], strategy="SPREAD"), {"cpu": 0.3}),
        (
            {"GPU": 2, "gpu_memory": 40e9, "accelerator_type:A100": 0.001},
            {"gpu": 2.0, "gpu_memory": 40e9, "accelerator_type:A100": 0.001},
        ),
        (
            PlacementGroupFactory([{"GPU": 1, "gpu_memory": 40e9}, {"GPU": 1, "gpu_memory": 8e9}]),
            {"gpu": 2.0, "gpu_memory": 40e9},
        ),
        (
            PlacementGroupFactory([{"gpu_memory": 4e9}, {"CPU": 1, "gpu_memory": 4e9}]),
            {"cpu": 1.0, "gpu_memory": 8e9},
        ),
        (lambda config: {"gpu": config["gpus"]}, {"gpu": 2.0}),
        (lambda config: PlacementGroupFactory([{"GPU": config["gpus"]}]), {"gpu": 2.0}),
    ],
)
def test_requests_in_all_forms_mean_amounts_by_name(request_: Any, amounts: Any) -> None:
    for trainable in (train, Plain):
        assert resources_of(with_resources(trainable, request_), {"gpus": 2}) == amounts


@pytest.mark.parity(85)
def test_class_may_state_its_resources() -> None:
    assert resources_of(Asks, {"needs": {"cpu": 3}}) == {"cpu": 3.0}
    needs = PlacementGroupFactory([{"GPU": 1}])
    assert resources_of(Asks, {"needs": needs}) == {"gpu": 1.0}


@pytest.mark.parity(85)
def test_two_requests_are_an_error_that_says_to_clear_one() -> None:
    wrapped = with_resources(Asks, {"cpu": 1})
    assert resources_of(wrapped, {}) == {"cpu": 1.0}
    with pytest.raises(ConfigError, match=r"Asks.default_resource_request.*clear one"):
        resources_of(wrapped, {"needs": {"cpu": 3}})


def test_original_is_not_changed_and_the_last_request_counts() -> None:
    once = with_resources(train, {"cpu": 2})
    twice = with_resources(once, {"cpu": 3})
    assert resources_of(train, {}) == {"cpu": 1.0}
    assert resources_of(once, {}) == {"cpu": 2.0}
    assert resources_of(twice, {}) == {"cpu": 3.0}
    assert twice({"a": 1}) == ({"a": 1}, None)
    assert twice.__name__ == "train"
    wrapped = with_resources(Plain, {"cpu": 2})
    assert issubclass(wrapped, Plain)
    assert wrapped.__name__ == "Plain"


def test_resources_and_parameters_combine_in_either_order() -> None:
    for wrapped in (
        with_resources(with_parameters(train, data=[1]), {"cpu": 2}),
        with_parameters(with_resources(train, {"cpu": 2}), data=[1]),
    ):
        assert resources_of(wrapped, {}) == {"cpu": 2.0}
        assert wrapped({}) == ({}, [1])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"gpu": 1.5}, r"gpu=1.5 is not possible.*fraction below 1.*whole number such as 2"),
        ({"cpu": -1}, r"cpu=-1 must be a finite number of 0 or more"),
        ({"cpu": float("nan")}, r"cpu=nan must be a finite"),
        ({"gpu": float("inf")}, r"gpu=inf must be a finite"),
        ({"cpu": "2"}, r"cpu='2' is not a number"),
        ({"gpu": True}, r"gpu=True is not a number"),
        ({"gpu_memory": 40}, r"gpu_memory=40 is a number of bytes and very few; 40 GB are 40e9"),
        ({"accelerator_type": 1}, r"'accelerator_type' names no model.*accelerator_type:A100"),
        ({"accelerator_type: ": 1}, r"names no model"),
        (
            {"accelerator_type:A100": 1, "accelerator_type:T4": 1},
            r"accelerator_type:A100 and accelerator_type:T4 together are not possible",
        ),
        ({"cpu": None}, r"cpu=None is not a number"),
        ({1: 1}, r"1 is not the name of a resource"),
        ({}, "must need something"),
        ({"cpu": 0, "gpu": 0}, "must need something"),
        (3, r"resources=3.*give a dict"),
        (None, r"resources=None.*give a dict"),
    ],
)
def test_unavailable_resource_is_rejected_by_name(request_: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_resources(train, request_)


def test_invalid_result_of_a_resource_function_is_rejected_when_it_is_called() -> None:
    with pytest.raises(ConfigError, match="must be a dict or PlacementGroupFactory, not 7"):
        resources_of(with_resources(train, lambda config: 7), {})  # type: ignore[arg-type,return-value]


def test_only_trainables_get_resources() -> None:
    with pytest.raises(TrainableError, match=r"with_resources: .*not 'train'"):
        with_resources("train", {"cpu": 1})  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "at least one dict"),
        (({"CPU": 1},), "give a list"),
        (([3],), "must be a dict, not 3"),
        (([{"CPU": 1}], "TIGHT"), "strategy='TIGHT'.*PACK"),
        (([{"CPU": 1}, {"CPU": 1}], "STRICT_SPREAD"), "several nodes"),
        (([{"GPU": 0.5}] * 3,), "gpu=1.5"),
        (([{"CPU": 0}],), "must need something"),
    ],
)
def test_bundles_that_no_node_can_give_are_rejected(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlacementGroupFactory(*arguments)


def test_placement_groups_compare_by_their_resources() -> None:
    group = PlacementGroupFactory([{"CPU": 1}], strategy="STRICT_PACK")
    assert group == PlacementGroupFactory([{"CPU": 1}], strategy="STRICT_PACK")
    assert group != PlacementGroupFactory([{"CPU": 1}])
    assert group != "STRICT_PACK"
    assert len({group, PlacementGroupFactory([{"CPU": 1}], "STRICT_PACK")}) == 1
    assert "STRICT_PACK" in repr(group)
    assert group.required_resources == {"cpu": 1.0}
