"""Withheld devices: placement without them, free resources and notices."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.core.test_offers import GPUS, SharedNode
from tests.unit.scheduler.stories import Story
from tunemq.testing.comparable_state import comparable
from tunemq_scheduler.core.allotments import ResourceAmounts
from tunemq_scheduler.core.placement.placement import Placement
from tunemq_shared.protocol import messages as m

XID = "XID 79: the GPU has fallen off the bus"


def a_node(*uuids: str, cpus: float = 8.0) -> Placement:
    placement = Placement()
    gpus = [m.Gpu(uuid, "A100", 80e9) for uuid in uuids]
    placement.add_node("n", {"cpu": cpus, "gpu": float(len(gpus))}, gpus)
    return placement


# --- placement ------------------------------------------------------------------------------------


def test_nothing_is_placed_on_a_withheld_device_and_all_others_are_used() -> None:
    placement = a_node("a", "b", "c")
    placement.withhold("n", {"b": XID})
    assert placement.fit({"gpu": 3.0}) is None
    assert placement.take("n", {"gpu": 2.0}) == {"a": 1.0, "c": 1.0}
    for request in ({"gpu": 1.0}, {"gpu": 0.1}, {"gpu_memory": 8e9}):
        assert placement.fit(request) is None
    placement.withhold("n", dict.fromkeys("abc", XID))
    assert placement.fit({"gpu_memory": 1.0}) is None, "though it takes next to nothing"


def test_what_it_has_in_all_and_free_is_without_what_is_withheld() -> None:
    placement = a_node("a", "b", "c")
    placement.take("n", {"cpu": 1.0, "gpu": 0.25})
    placement.withhold("n", {"b": XID})
    assert placement.total == {"cpu": 8.0, "gpu": 2.0}
    assert placement.free == {"cpu": 7.0, "gpu": 1.75}
    placement.withhold("n", {"a": XID})
    assert placement.total == {"cpu": 8.0, "gpu": 2.25}, "what is held of a device is there"
    assert placement.free == {"cpu": 7.0, "gpu": 2.0}
    assert placement.held("n") == ResourceAmounts({"cpu": 1.0, "gpu": 0.25}, {"a": 0.25})
    placement.withhold("n", {})
    assert placement.total == {"cpu": 8.0, "gpu": 3.0}
    assert placement.free == {"cpu": 7.0, "gpu": 2.75}


def test_what_is_freed_of_a_withheld_device_is_had_by_nobody_until_it_is_back() -> None:
    placement = a_node("a")
    held = placement.take("n", {"gpu": 0.5})
    placement.withhold("n", {"a": XID})
    assert placement.fit({"gpu": 0.5}) is None
    placement.give_back("n", {"gpu": 0.5}, held)
    assert placement.fit({"gpu": 0.5}) is None
    assert placement.fit({"cpu": 1.0}) == "n"
    placement.withhold("n", {})
    assert placement.fit({"gpu": 1.0}) == "n"


def test_a_trial_on_a_withheld_device_keeps_others_from_nothing_of_an_offer() -> None:
    placement = a_node("a", "b")
    placement.offer("n", ResourceAmounts({"cpu": 2.0, "gpu": 2.0}, {"a": 1.0, "b": 1.0}))
    assert placement.take("n", {"cpu": 1.0, "gpu": 1.0}) == {"a": 1.0}
    placement.withhold("n", {"a": XID})
    assert placement.fit({"cpu": 1.0, "gpu": 1.0}) == "n"
    placement.offer("n", ResourceAmounts({"cpu": 2.0, "gpu": 1.0}, {"b": 1.0}))
    assert placement.take("n", {"cpu": 1.0, "gpu": 1.0}) == {"b": 1.0}
    assert placement.excess("n") == ResourceAmounts({}, {"a": 1.0})


def test_no_node_is_kept_for_a_request_that_needs_what_is_withheld() -> None:
    placement = a_node("a", "b")
    placement.take("n", {"gpu": 1.0})
    assert placement.reserve({"gpu": 2.0}) == "n"
    placement.withhold("n", {"b": XID})
    assert placement.reserved == []
    assert placement.fit({"cpu": 1.0}) == "n"
    assert placement.reserve({"gpu": 2.0}) is None


def test_who_needs_a_model_of_which_all_are_withheld_waits() -> None:
    placement = a_node("a")
    request = {"cpu": 1.0, "accelerator_type:A100": 0.001}
    assert placement.fit(request) == "n"
    placement.withhold("n", {"a": XID})
    assert placement.fit(request) is None
    assert placement.why_never(request) is None
    assert "gpu of A100=1" in str(placement.why_not_now(request))


def test_several_gpus_are_never_parts_of_gpus_and_one_may_be() -> None:
    placement = a_node("MIG-1", "MIG-2", "GPU-1", "GPU-2")
    assert placement.take("n", {"gpu": 2.0}) == {"GPU-1": 1.0, "GPU-2": 1.0}
    assert placement.fit({"gpu": 2.0}) is None
    assert placement.take("n", {"gpu": 1.0}) == {"MIG-1": 1.0}
    assert placement.take("n", {"gpu": 0.5}) == {"MIG-2": 0.5}


def test_who_asks_for_several_is_told_that_parts_do_not_count() -> None:
    placement = a_node("MIG-1", "MIG-2", "GPU-1")
    assert placement.why_never({"gpu": 2.0}) == (
        "a trial asks for gpu=2, the most that any node has is 1 (MIG parts of GPUs are not "
        "counted: a trial can use no more than one of them)"
    )
    assert not placement.could_hold({"gpu": 2.0})
    assert placement.could_hold({"gpu": 1.0})


# --- explanations ---------------------------------------------------------------------------------


def test_who_fits_only_with_a_withheld_device_waits_and_is_told_which() -> None:
    placement = a_node("a", "b")
    placement.withhold("n", {"b": XID})
    assert placement.could_hold({"gpu": 2.0})
    assert placement.why_never({"gpu": 2.0}) is None
    assert placement.why_not_now({"gpu": 2.0}) == (
        "a trial asks for gpu=2, the most that is free on any node is 1, of 2 at most"
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
def test_of_no_device_is_said_that_it_would_help_where_it_would_not(
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


def test_a_trial_continues_where_its_device_is_withheld_and_the_next_waits_for_another() -> None:
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


def test_what_is_withheld_stays_so_while_the_node_is_away_and_when_it_is_back() -> None:
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


def test_a_node_that_is_away_may_change_what_it_withholds() -> None:
    story = Devices()
    story.tell(m.NodeLost(story.NODE, "its lease ran out"))
    story.withhold("g0")
    story.tell(m.NodeReturned(story.NODE))
    story.add_gpu_trial("a")
    assert story.choose("a").devices == {"g1": 1.0}
    story.check()


def test_a_node_may_begin_with_devices_that_it_withholds_or_with_none_that_it_uses() -> None:
    story = Story(cpus=0.0)
    resources = {"cpu": 8.0, "gpu": 4.0}
    withheld = {gpu.uuid: XID for gpu in GPUS}
    story.tell(m.NodeJoined("w.1", "w", "host", "127.0.0.1", resources, GPUS, withheld=withheld))
    assert story.runner.placement.total == {"cpu": 8.0, "gpu": 0.0}
    assert not story.runner.has_place(_trial(story, "a", {"gpu": 0.5}))
    assert story.runner.has_place(_trial(story, "b", {"cpu": 8.0}))


def test_a_node_that_nobody_knows_withholds_nothing() -> None:
    story = Devices()
    before = comparable(story.runner)
    assert story.tell(m.DevicesWithheld("unknown.1", {"g0": XID})) == []
    assert comparable(story.runner) == before
    story.tell(m.DevicesWithheld(story.NODE, {"no device of it": XID}))
    assert story.runner.placement.free["gpu"] == 4.0
    story.check()


def test_where_nothing_could_begin_no_configuration_is_asked_for() -> None:
    story = SharedNode(request={"cpu": 1.0, "gpu": 1.0})
    story.offer("g0", "g1", "g2", "g3")
    story.begin("a")
    assert story.runner.wants_config()
    story.tell(m.DevicesWithheld(story.NODE, {gpu.uuid: XID for gpu in GPUS}))
    assert not story.runner.wants_config()


def _trial(story: Story, name: str, request: dict[str, float]):
    story.tell(m.ConfigSuggested(story.runner.suggested, name, b"", "", request))
    return story.runner.live[name]
