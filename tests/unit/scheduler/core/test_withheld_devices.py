"""Withheld devices: placement without them, free resources and notices."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.core.test_offers import GPUS, SharedNode
from tests.unit.scheduler.scripted_runner import Story
from tunemq.testing.comparable_state import comparable
from tunemq_scheduler.core.placement.placement import Placement
from tunemq_scheduler.core.shared_amounts import ResourceAmounts
from tunemq_shared.protocol import messages as m

XID = "XID 79: the GPU has fallen off the bus"


def a_node(*uuids: str, cpus: float = 8.0) -> Placement:
    placement = Placement()
    gpus = [m.Gpu(uuid, "A100", 80e9) for uuid in uuids]
    placement.add_node("n", {"cpu": cpus, "gpu": float(len(gpus))}, gpus)
    return placement


# --- placement ------------------------------------------------------------------------------------


def test_placement_skips_withheld_devices_and_uses_all_others() -> None:
    placement = a_node("a", "b", "c")
    placement.withhold("n", {"b": XID})
    assert placement.fit({"gpu": 3.0}) is None
    assert placement.take("n", {"gpu": 2.0}) == {"a": 1.0, "c": 1.0}
    for request in ({"gpu": 1.0}, {"gpu": 0.1}, {"gpu_memory": 8e9}):
        assert placement.fit(request) is None
    placement.withhold("n", dict.fromkeys("abc", XID))
    assert placement.fit({"gpu_memory": 1.0}) is None, "even a tiny request is not placed"


def test_total_and_free_resources_exclude_withheld_devices() -> None:
    placement = a_node("a", "b", "c")
    placement.take("n", {"cpu": 1.0, "gpu": 0.25})
    placement.withhold("n", {"b": XID})
    assert placement.total == {"cpu": 8.0, "gpu": 2.0}
    assert placement.free == {"cpu": 7.0, "gpu": 1.75}
    placement.withhold("n", {"a": XID})
    assert placement.total == {"cpu": 8.0, "gpu": 2.25}, "the held part of a withheld device counts"
    assert placement.free == {"cpu": 7.0, "gpu": 2.0}
    assert placement.held("n") == ResourceAmounts({"cpu": 1.0, "gpu": 0.25}, {"a": 0.25})
    placement.withhold("n", {})
    assert placement.total == {"cpu": 8.0, "gpu": 3.0}
    assert placement.free == {"cpu": 7.0, "gpu": 2.75}


def test_freed_part_of_a_withheld_device_is_not_placed_until_the_device_is_back() -> None:
    placement = a_node("a")
    held = placement.take("n", {"gpu": 0.5})
    placement.withhold("n", {"a": XID})
    assert placement.fit({"gpu": 0.5}) is None
    placement.give_back("n", {"gpu": 0.5}, held)
    assert placement.fit({"gpu": 0.5}) is None
    assert placement.fit({"cpu": 1.0}) == "n"
    placement.withhold("n", {})
    assert placement.fit({"gpu": 1.0}) == "n"


def test_trial_on_a_withheld_device_leaves_the_whole_offer_to_others() -> None:
    placement = a_node("a", "b")
    placement.offer("n", ResourceAmounts({"cpu": 2.0, "gpu": 2.0}, {"a": 1.0, "b": 1.0}))
    assert placement.take("n", {"cpu": 1.0, "gpu": 1.0}) == {"a": 1.0}
    placement.withhold("n", {"a": XID})
    assert placement.fit({"cpu": 1.0, "gpu": 1.0}) == "n"
    placement.offer("n", ResourceAmounts({"cpu": 2.0, "gpu": 1.0}, {"b": 1.0}))
    assert placement.take("n", {"cpu": 1.0, "gpu": 1.0}) == {"b": 1.0}
    assert placement.excess("n") == ResourceAmounts({}, {"a": 1.0})


def test_request_that_needs_a_withheld_device_reserves_no_node() -> None:
    placement = a_node("a", "b")
    placement.take("n", {"gpu": 1.0})
    assert placement.reserve({"gpu": 2.0}) == "n"
    placement.withhold("n", {"b": XID})
    assert placement.reserved == []
    assert placement.fit({"cpu": 1.0}) == "n"
    assert placement.reserve({"gpu": 2.0}) is None


def test_request_for_a_model_of_which_all_devices_are_withheld_waits() -> None:
    placement = a_node("a")
    request = {"cpu": 1.0, "accelerator_type:A100": 0.001}
    assert placement.fit(request) == "n"
    placement.withhold("n", {"a": XID})
    assert placement.fit(request) is None
    assert placement.why_never(request) is None
    assert "gpu of A100=1" in str(placement.why_not_now(request))


def test_request_for_several_gpus_takes_whole_ones_and_for_one_may_take_a_part() -> None:
    placement = a_node("MIG-1", "MIG-2", "GPU-1", "GPU-2")
    assert placement.take("n", {"gpu": 2.0}) == {"GPU-1": 1.0, "GPU-2": 1.0}
    assert placement.fit({"gpu": 2.0}) is None
    assert placement.take("n", {"gpu": 1.0}) == {"MIG-1": 1.0}
    assert placement.take("n", {"gpu": 0.5}) == {"MIG-2": 0.5}


def test_waiting_request_for_several_gpus_explains_that_parts_do_not_count() -> None:
    placement = a_node("MIG-1", "MIG-2", "GPU-1")
    assert placement.why_never({"gpu": 2.0}) == (
        "a trial requests gpu=2; the most on any node is 1 (MIG parts of GPUs are not "
        "counted: a trial can use no more than one of them)"
    )
    assert not placement.could_hold({"gpu": 2.0})
    assert placement.could_hold({"gpu": 1.0})


# --- explanations ---------------------------------------------------------------------------------


def test_request_that_fits_only_with_a_withheld_device_waits_and_names_it() -> None:
    placement = a_node("a", "b")
    placement.withhold("n", {"b": XID})
    assert placement.could_hold({"gpu": 2.0})
    assert placement.why_never({"gpu": 2.0}) is None
    assert placement.why_not_now({"gpu": 2.0}) == (
        "a trial requests gpu=2; the most that is free on any node is 1, of 2 at most"
    )
    assert placement.withheld_from({"gpu": 2.0}) == [("n", "b", XID)]


@pytest.mark.parametrize(
    "request_",
    [
        {"cpu": 8.0},
        {"gpu": 1.0, "cpu": 9.0},
        {"gpu": 3.0},
        {"gpu": 1.0, "accelerator_type:T4": 0.001},
        {"gpu": 1.0, "gpu_memory": 81e9},
    ],
)
def test_waiting_request_names_no_withheld_device_that_would_not_help(
    request_: dict[str, float],
) -> None:
    placement = a_node("a", "b")
    placement.withhold("n", {"b": XID})
    assert placement.withheld_from(request_) == []


# --- the runner -----------------------------------------------------------------------------------


class Devices(SharedNode):
    """A runner with a node of 4 GPUs, all of which are offered."""

    def __init__(self) -> None:
        super().__init__()
        self.offer("g0", "g1", "g2", "g3")

    def withhold(self, *uuids: str) -> None:
        assert self.tell(m.DevicesWithheld(self.NODE, dict.fromkeys(uuids, XID))) == []

    def waiting(self) -> list[str]:
        return [trial.trial_id for trial in self.runner.waiting()]


def test_trial_on_a_withheld_device_continues_and_the_next_waits_for_another() -> None:
    story = Devices()
    story.begin("a", "b", "c", "d")
    story.withhold("g0", "g1")
    story.check()
    assert story.runner.live["a"].status == "RUNNING"
    story.add_gpu_trial("e")
    story.finish("a")
    story.free("a")
    assert story.waiting() == []
    story.finish("c")
    story.free("c")
    assert story.choose("e").devices == {"g2": 1.0}
    story.withhold("g1")
    story.add_gpu_trial("f")
    assert story.choose("f").devices == {"g0": 1.0}
    story.check()


def test_withheld_devices_stay_withheld_while_the_node_is_away_and_when_it_returns() -> None:
    story = Devices()
    story.begin("a")
    story.withhold("g0", "g1")
    story.tell(m.NodeLost(story.NODE, "its lease ran out"))
    story.check()
    story.tell(m.NodeReturned(story.NODE))
    story.check()
    assert dict(story.runner.nodes[story.NODE].withheld) == {"g0": XID, "g1": XID}
    story.add_gpu_trial("b")
    assert story.choose("b").devices == {"g2": 1.0}


def test_away_node_may_change_its_withheld_devices() -> None:
    story = Devices()
    story.tell(m.NodeLost(story.NODE, "its lease ran out"))
    story.withhold("g0")
    story.tell(m.NodeReturned(story.NODE))
    story.add_gpu_trial("a")
    assert story.choose("a").devices == {"g1": 1.0}
    story.check()


def test_node_may_register_with_some_or_all_devices_withheld() -> None:
    story = Story(cpus=0.0)
    resources = {"cpu": 8.0, "gpu": 4.0}
    withheld = {gpu.uuid: XID for gpu in GPUS}
    story.tell(m.NodeJoined("w.1", "w", "host", "127.0.0.1", resources, GPUS, withheld=withheld))
    assert story.runner.placement.total == {"cpu": 8.0, "gpu": 0.0}
    assert not story.runner.has_place(_trial(story, "a", {"gpu": 0.5}))
    assert story.runner.has_place(_trial(story, "b", {"cpu": 8.0}))


def test_unknown_node_withholds_nothing() -> None:
    story = Devices()
    before = comparable(story.runner)
    assert story.tell(m.DevicesWithheld("unknown.1", {"g0": XID})) == []
    assert comparable(story.runner) == before
    story.tell(m.DevicesWithheld(story.NODE, {"no device of it": XID}))
    assert story.runner.placement.free["gpu"] == 4.0
    story.check()


def test_runner_that_could_start_no_trial_wants_no_configuration() -> None:
    story = SharedNode(request={"cpu": 1.0, "gpu": 1.0})
    story.offer("g0", "g1", "g2", "g3")
    story.begin("a")
    assert story.runner.wants_config()
    story.tell(m.DevicesWithheld(story.NODE, {gpu.uuid: XID for gpu in GPUS}))
    assert not story.runner.wants_config()


def _trial(story: Story, name: str, request: dict[str, float]):
    story.tell(m.ConfigSuggested(story.runner.suggested, name, b"", "", request))
    return story.runner.live[name]
