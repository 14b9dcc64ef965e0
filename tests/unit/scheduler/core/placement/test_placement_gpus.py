"""Placement of trials with GPUs: whole devices, parts of one, and only suitable ones."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tunemq_scheduler.core.placement.placement import Placement, could_hold, holds_when_empty
from tunemq_scheduler.core.placement.resource_request import is_model
from tunemq_scheduler.core.shared_amounts import ResourceAmounts
from tunemq_shared.base.errors import InvariantBroken
from tunemq_shared.protocol.messages import Gpu, NodeJoined

GB = 1e9


def gpus(node: str, count: int, model: str = "NVIDIA A100-SXM4-80GB", memory: float = 80 * GB):
    return [Gpu(f"{node}-{place}", model, memory) for place in range(count)]


def farm(**nodes: list[Gpu]) -> Placement:
    placement = Placement()
    for name, devices in nodes.items():
        placement.add_node(name, {"cpu": 16.0}, devices)
    return placement


def test_whole_gpus_are_taken_from_unused_devices_only() -> None:
    placement = farm(n=gpus("n", 3))
    assert placement.take("n", {"gpu": 0.5}) == {"n-0": 0.5}
    assert placement.take("n", {"gpu": 2.0}) == {"n-1": 1.0, "n-2": 1.0}
    assert placement.fit({"gpu": 1.0}) is None
    assert placement.fit({"gpu": 0.5}) == "n"


def test_gpu_part_is_never_split_over_two_devices() -> None:
    placement = farm(n=gpus("n", 2))
    for _ in range(2):
        placement.take("n", {"gpu": 0.6})
    assert placement.free["gpu"] == 0.8
    assert placement.fit({"gpu": 0.6}) is None
    with pytest.raises(InvariantBroken):
        placement.take("n", {"gpu": 0.6})


def test_gpu_part_is_placed_where_least_of_a_device_is_left() -> None:
    placement = farm(a=gpus("a", 2), b=gpus("b", 2))
    placement.take("b", {"gpu": 0.5})
    placement.take("b", {"gpu": 0.75})
    assert placement.fit({"gpu": 0.25}) == "b"
    assert placement.take("b", {"gpu": 0.25}) == {"b-1": 0.25}
    assert placement.take("b", {"gpu": 0.25}) == {"b-0": 0.25}


def test_gpu_parts_given_back_can_be_taken_as_a_whole_gpu() -> None:
    placement = farm(n=gpus("n", 1, memory=24 * GB))
    request = {"gpu_memory": 8 * GB}
    parts = [placement.take("n", request) for _ in range(3)]
    assert placement.fit(request) is None
    for part in parts:
        placement.give_back("n", request, part)
    assert placement.fit({"gpu": 1.0}) == "n"
    assert placement.held("n") == ResourceAmounts()


def test_gpu_memory_alone_takes_that_part_of_one_device() -> None:
    placement = farm(n=[Gpu("small", "T4", 16 * GB), Gpu("large", "A100", 80 * GB)])
    assert placement.take("n", {"gpu_memory": 40 * GB}) == {"large": 0.5}
    assert placement.take("n", {"gpu_memory": 16 * GB}) == {"small": 1.0}
    assert placement.fit({"gpu_memory": 41 * GB}) is None


def test_gpu_memory_with_gpu_is_the_minimum_of_each_device() -> None:
    placement = farm(n=[Gpu("small", "T4", 16 * GB), Gpu("large", "A100", 80 * GB)])
    assert placement.take("n", {"gpu": 1.0, "gpu_memory": 20 * GB}) == {"large": 1.0}
    assert placement.fit({"gpu": 1.0, "gpu_memory": 20 * GB}) is None
    assert placement.why_never({"gpu": 2.0, "gpu_memory": 20 * GB}) is not None


def test_trial_without_a_memory_request_gets_the_device_with_least_memory() -> None:
    placement = farm(n=[Gpu("large", "A100", 80 * GB), Gpu("small", "T4", 16 * GB)])
    assert placement.take("n", {"gpu": 1.0}) == {"small": 1.0}


def test_gpu_model_request_allows_only_that_model_and_takes_nothing_itself() -> None:
    placement = farm(t=gpus("t", 1, "Tesla T4", 16 * GB), a=gpus("a", 1), none=[])
    request = {"gpu": 1.0, "accelerator_type:A100": 0.001}
    assert placement.fit(request) == "a"
    placement.take("a", request)
    assert placement.fit(request) is None
    assert placement.fit({"cpu": 1.0, "accelerator_type:A100": 0.001}) == "a"


@pytest.mark.parametrize(
    ("model", "wanted", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100", True),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB", True),
        ("NVIDIA A100-SXM4-80GB", "a100", True),
        ("NVIDIA A100-SXM4-80GB", "A10", False),
        ("NVIDIA A10G", "A10", False),
        ("NVIDIA GeForce RTX 3090", "RTX 3090", True),
        ("NVIDIA GeForce RTX 3090", "3090 RTX", False),
        ("", "A100", False),
    ],
)
def test_gpu_model_matches_by_words_of_its_name(model: str, wanted: str, *, expected: bool) -> None:
    assert is_model(model, wanted) is expected


def test_gpus_that_a_node_does_not_list_are_taken_one_by_one() -> None:
    placement = Placement()
    placement.add_node("n", {"cpu": 8.0, "gpu": 2.0})
    assert placement.take("n", {"gpu": 0.75}) == {"0": 0.75}
    assert placement.take("n", {"gpu": 0.75}) == {"1": 0.75}
    assert placement.fit({"gpu": 0.5}) is None
    assert placement.fit({"gpu_memory": GB}) is None


def test_half_used_gpu_is_not_taken_as_a_whole_one() -> None:
    placement = Placement()
    placement.add_node("n", {"gpu": 1.5})
    placement.take("n", {"gpu": 1.0})
    assert placement.fit({"gpu": 1.0}) is None
    assert placement.take("n", {"gpu": 0.5}) == {"1": 0.5}


def test_cpu_trial_prefers_nodes_without_gpus_even_if_the_gpus_are_taken() -> None:
    placement = farm(g=gpus("g", 1), c=[])
    placement.take("g", {"cpu": 15.0, "gpu": 1.0})
    assert placement.fit({"cpu": 1.0}) == "c"
    placement.take("c", {"cpu": 16.0})
    assert placement.fit({"cpu": 1.0}) == "g"


def test_placement_on_a_shared_node_takes_only_offered_resources() -> None:
    placement = farm(n=gpus("n", 4))
    placement.offer("n", ResourceAmounts())
    assert placement.fit({"cpu": 1.0}) is None
    placement.offer("n", ResourceAmounts({"cpu": 2.0, "gpu": 1.5}, {"n-3": 1.0, "n-1": 0.5}))
    assert placement.take("n", {"cpu": 1.0, "gpu": 1.0}) == {"n-3": 1.0}
    assert placement.take("n", {"cpu": 1.0, "gpu": 0.25}) == {"n-1": 0.25}
    assert placement.fit({"cpu": 1.0}) is None
    assert placement.held("n") == ResourceAmounts(
        {"cpu": 2.0, "gpu": 1.25}, {"n-1": 0.25, "n-3": 1.0}
    )
    assert placement.free == {"cpu": 14.0, "gpu": 2.75}


def test_node_that_holds_more_than_is_offered_gets_no_trial() -> None:
    placement = farm(n=gpus("n", 4))
    placement.offer("n", ResourceAmounts({"cpu": 8.0, "gpu": 2.0}, {"n-0": 1.0, "n-1": 1.0}))
    first = placement.take("n", {"cpu": 1.0, "gpu": 1.0})
    placement.offer("n", ResourceAmounts({"cpu": 8.0, "gpu": 1.0}, {"n-1": 1.0}))
    assert placement.excess("n") == ResourceAmounts({}, {"n-0": 1.0})
    assert placement.fit({"cpu": 1.0}) is None
    assert placement.fit({"cpu": 1.0}, "n") is None
    placement.give_back("n", {"cpu": 1.0, "gpu": 1.0}, first)
    assert placement.excess("n") == ResourceAmounts()
    assert placement.take("n", {"cpu": 1.0, "gpu": 1.0}) == {"n-1": 1.0}


def test_running_trial_process_holds_its_gpus_whatever_is_offered() -> None:
    placement = farm(n=gpus("n", 2))
    placement.offer("n", ResourceAmounts())
    placement.hold("n", {"cpu": 1.0, "gpu": 1.0}, {"n-1": 1.0})
    assert placement.excess("n") == ResourceAmounts({"cpu": 1.0}, {"n-1": 1.0})
    with pytest.raises(InvariantBroken):
        placement.hold("n", {"gpu": 0.5}, {"n-1": 0.5})


def test_reserved_node_takes_no_other_request() -> None:
    placement = farm(a=gpus("a", 2), b=gpus("b", 2))
    placement.take("a", {"gpu": 1.0})
    for _ in range(2):
        placement.take("b", {"gpu": 1.0})
    assert placement.reserve({"gpu": 2.0}) == "a"
    assert placement.fit({"gpu": 1.0}) is None
    placement.give_back("a", {"gpu": 1.0}, {"a-0": 1.0})
    assert placement.fit({"gpu": 1.0}) is None
    assert placement.fit({"gpu": 2.0}) == "a"
    placement.unreserve({"gpu": 2.0})
    assert placement.fit({"gpu": 1.0}) == "a"


def test_node_that_could_never_hold_a_request_is_not_reserved_for_it() -> None:
    placement = farm(a=gpus("a", 2), b=[])
    assert placement.reserve({"gpu": 3.0}) is None
    placement.offer("a", ResourceAmounts({"gpu": 1.0}, {"a-0": 1.0}))
    assert placement.reserve({"gpu": 2.0}) is None
    assert placement.reserve({"gpu": 1.0}) == "a"
    placement.offer("a", ResourceAmounts())
    assert placement.reserved == []


def test_placement_that_is_dumped_and_loaded_is_unchanged() -> None:
    placement = farm(a=gpus("a", 2), b=gpus("b", 2), c=[], d=gpus("d", 1))
    placement.take("a", {"gpu": 0.5})
    placement.offer("b", ResourceAmounts({"cpu": 4.0, "gpu": 1.0}, {"b-1": 1.0}))
    placement.take("b", {"gpu": 1.0})
    placement.set_aside(["c"])
    placement.reserve({"gpu": 1.0, "cpu": 16.0})
    again = Placement()
    again.take_back(placement.dumped())
    assert again.dumped() == placement.dumped()
    for request in ({"gpu": 1.0}, {"gpu": 0.5}, {"cpu": 2.0}, {"gpu": 1.0, "cpu": 16.0}):
        assert again.fit(request) == placement.fit(request)
    assert again.held("b") == placement.held("b")


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ({"gpu": 3.0}, "a trial requests gpu=3; the most on any node is 2"),
        (
            {"gpu": 1.0, "accelerator_type:H100": 1.0},
            "a trial requests gpu of H100=1; the most on any node is 0",
        ),
        (
            {"gpu": 1.0, "gpu_memory": 2.0**37},
            "a trial requests gpu_memory=128 GiB; the most on any node is 74.5 GiB",
        ),
        (
            {"gpu": 2.0, "accelerator_type:T4": 1.0},
            "a trial requests gpu of T4=2; the most on any node is 1",
        ),
        ({"licence": 1.0}, "a trial requests licence=1; the most on any node is 0"),
    ],
)
def test_gpu_request_that_can_never_be_met_names_the_missing_resource(
    request_: dict[str, float], why: str
) -> None:
    placement = farm(a=gpus("a", 2), t=gpus("t", 1, "Tesla T4", 16 * GB))
    assert placement.why_never(request_) == why
    assert placement.why_not_now(request_) == why


def test_waiting_request_names_the_most_free_and_the_most_in_total() -> None:
    placement = farm(a=gpus("a", 4), b=gpus("b", 2))
    assert placement.why_not_now({"gpu": 4.0}) is None
    placement.take("a", {"gpu": 0.25})
    assert placement.why_not_now({"gpu": 4.0}) == (
        "a trial requests gpu=4; the most that is free on any node is 3, of 4 at most"
    )
    for node, count in (("a", 3.0), ("b", 2.0)):
        placement.take(node, {"gpu": count})
    assert placement.why_not_now({"gpu": 0.9}) == (
        "a trial requests gpu=0.9; the most that is free on any node is 0.75, of 1 at most"
    )
    placement.take("b", {"cpu": 1.0})
    assert placement.why_not_now({"gpu": 0.5, "cpu": 16.0}) is None
    placement.take("a", {"cpu": 1.0})
    assert "cpu=16" in str(placement.why_not_now({"gpu": 0.5, "cpu": 16.0}))


def test_request_that_no_node_has_free_at_once_is_explained() -> None:
    placement = farm(a=gpus("a", 1), b=gpus("b", 1))
    placement.take("a", {"cpu": 16.0})
    placement.take("b", {"gpu": 1.0})
    assert placement.why_not_now({"cpu": 1.0, "gpu": 1.0}) == (
        "a trial requests cpu=1, gpu=1, and no single node has all of it free"
    )


def test_could_hold_considers_the_gpus_of_a_node() -> None:
    devices = tuple(gpus("n", 2))
    node = NodeJoined("a", "a", "a", "127.0.0.1", {"cpu": 2.0})
    with_gpus = replace(node, gpus=devices)
    assert could_hold(with_gpus, {"gpu": 2.0, "gpu_memory": 40 * GB})
    assert not could_hold(node, {"gpu": 2.0, "gpu_memory": 40 * GB})
    assert not could_hold(with_gpus, {"gpu": 3.0})
    one = replace(with_gpus, withheld={devices[0].uuid: "XID 79"})
    assert holds_when_empty(one, {"gpu": 1.0})
    assert not holds_when_empty(one, {"gpu": 2.0})
    assert could_hold(one, {"gpu": 2.0}), "the withheld device may return"
