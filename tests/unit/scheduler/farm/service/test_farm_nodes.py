"""What a farm's users see of nodes with withheld GPUs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from tests.simulation.shared_farm import node
from tunemq_scheduler.api.farm_answer_types import NodeRow
from tunemq_scheduler.core.shared_amounts import OfferUsage, ResourceAmounts, SlotDemand
from tunemq_scheduler.farm.allocation.fair_share_allocator import FairShareAllocator
from tunemq_scheduler.farm.service.farm_nodes import FarmNodes
from tunemq_shared.health.node_metrics import GpuMetrics, NodeMetrics
from tunemq_shared.objects.store_traffic import StoreTraffic
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.rejection_counter import RejectionCounter

ONE = {"cpu": 1.0, "gpu": 1.0}


class FakeTransport:
    """A transport that returns what the test sets."""

    def __init__(self) -> None:
        self.read_events: list[m.Event] = []
        self.rejections = RejectionCounter()
        self.rejected: dict[str, int] = {}
        self.acknowledged: list[dict[str, int]] = []
        self.disk_problem, self.disk_free = "", 1e12
        self.store = StoreTraffic()
        self.is_later = False

    def add(self, _events_key: str) -> Any:
        return SimpleNamespace(
            take=self._take, settle=lambda: None, acknowledge=self.acknowledged.append
        )

    def node_metrics(self, _instance_id: str) -> NodeMetrics:
        gpus = (GpuMetrics("n-1", foreign="process 12 (python) holds 1 GiB"),)
        return NodeMetrics(
            gpus=gpus,
            rejected=self.rejected,
            disk_problem=self.disk_problem,
            disk_free=self.disk_free,
            store=self.store,
        )

    def obeys_later(self, _instance_id: str) -> bool:
        return self.is_later

    def silence_s(self, _instance_id: str) -> float:
        return 0.0

    def trial_count(self, _instance_id: str) -> int:
        return 0

    def _take(self) -> list[m.Event]:
        read_events, self.read_events = self.read_events, []
        return read_events


def told(
    tmp_path: Path, *read_events: m.Event
) -> tuple[FarmNodes, FairShareAllocator, FakeTransport]:
    transport, allocator = FakeTransport(), FairShareAllocator()
    allocator.advance(1.0)
    nodes = FarmNodes(tmp_path / "nodes.json", transport, allocator)  # type: ignore[arg-type]
    transport.read_events += read_events
    nodes.turn()
    return nodes, allocator, transport


def row(nodes: FarmNodes) -> NodeRow:
    (one,) = nodes.rows()
    return one


def test_lost_instance_that_held_nothing_is_hidden_while_its_node_lives(tmp_path: Path):
    before, after = replace(node("before", 2), node="n"), replace(node("after", 2), node="n")
    nodes, allocator, transport = told(tmp_path, before, m.NodeLost("before", "it is not heard"))
    assert row(nodes).state == "silent"
    transport.read_events.append(after)
    nodes.turn()
    assert row(nodes).instance_id == "after"
    transport.read_events.append(m.NodeLost("after", "it is not heard"))
    nodes.turn()
    assert [one.state for one in nodes.rows()] == ["silent", "silent"], "no node of this name lives"
    transport.read_events += [m.NodeReturned("before")]
    nodes.turn()
    assert row(nodes).instance_id == "before"
    allocator.experiment_added("e", "ada")
    allocator.usage("e", OfferUsage({}, {}, (SlotDemand(ONE, 1),)))
    allocator.offers()
    transport.read_events += [m.NodeLost("before", "it is not heard"), m.NodeReturned("after")]
    nodes.turn()
    assert [one.state for one in nodes.rows()] == ["silent", "ready"], "a trial is waited for there"


def test_row_names_withheld_gpus_and_counts_the_others(tmp_path: Path):
    withheld = m.DevicesWithheld("n", {"n-0": "XID 79"})
    nodes, _, transport = told(tmp_path, node("n", 2), withheld)
    assert row(nodes).health == "1 of 2 GPUs set aside"
    assert (row(nodes).total["gpu"], row(nodes).used["gpu"]) == (1.0, 0.0)
    assert [gpu.withheld for gpu in row(nodes).gpus] == ["XID 79", None]
    assert [gpu.used for gpu in row(nodes).gpus] == [0.0, 0.0]
    assert [gpu.foreign for gpu in row(nodes).gpus] == ["", "process 12 (python) holds 1 GiB"]
    transport.read_events.append(m.DevicesWithheld("n", {}))
    nodes.turn()
    assert row(nodes).health == "ok"
    assert row(nodes).total["gpu"] == 2.0


def test_withheld_gpu_that_is_held_is_in_use(tmp_path: Path):
    nodes, allocator, transport = told(tmp_path, node("n", 2))
    allocator.experiment_added("e", "ada")
    allocator.usage("e", OfferUsage({}, {}, (SlotDemand(ONE, 1),)))
    allocator.offers()
    allocator.usage("e", OfferUsage({"n": 1}, {"n": ResourceAmounts(ONE, {"n-0": 1.0})}, ()))
    transport.read_events.append(m.DevicesWithheld("n", {"n-0": "XID 79", "n-1": "ECC"}))
    nodes.turn()
    assert (row(nodes).total["gpu"], row(nodes).used["gpu"]) == (1.0, 1.0)
    assert [gpu.used for gpu in row(nodes).gpus] == [1.0, 0.0]


def test_node_that_begins_with_withheld_gpus_is_shown_so(tmp_path: Path):
    begins = replace(node("n", 2), withheld={"n-1": "ECC"})
    nodes, _, _ = told(tmp_path, begins)
    assert [gpu.withheld for gpu in row(nodes).gpus] == [None, "ECC"]
    assert row(nodes).total["gpu"] == 1.0


def test_draining_is_shown_before_other_states(tmp_path: Path):
    withheld = m.DevicesWithheld("n", {"n-0": "XID 79"})
    nodes, _, _ = told(tmp_path, node("n", 2), withheld)
    nodes.drain("n", "drained by ann")
    assert row(nodes).health == "drained by ann"


def is_offered(allocator: FairShareAllocator) -> bool:
    """Return whether a search that requests a slot gets an offer."""
    allocator.experiment_added("e", "ada")
    allocator.usage("e", OfferUsage({}, {}, (SlotDemand(ONE, 1),)))
    return bool(allocator.offers())


def test_node_whose_disk_fails_is_withheld_until_it_works(tmp_path: Path):
    nodes, allocator, transport = told(tmp_path, node("n", 2))
    transport.disk_problem = "/w/blobs: No space left on device"
    nodes.turn()
    assert row(nodes).state == "set aside"
    assert row(nodes).health == "/w/blobs: No space left on device"
    assert list(nodes.troubles()) == ["node n is set aside: /w/blobs: No space left on device"]
    assert not is_offered(allocator)
    transport.disk_problem = ""
    nodes.turn()
    assert (row(nodes).state, row(nodes).health) == ("ready", "ok")
    assert list(nodes.troubles()) == []
    assert is_offered(allocator)


def test_node_with_little_space_is_withheld(tmp_path: Path):
    nodes, allocator, transport = told(tmp_path, node("n", 2))
    transport.disk_free = 2**28 - 1.0
    nodes.turn()
    assert row(nodes).health == "the disk is full: 256 MiB are free where its working folder is"
    assert not is_offered(allocator)
    transport.disk_free = 2.0**28
    nodes.turn()
    assert is_offered(allocator)


def test_drained_node_stays_drained_when_its_disk_works_again(tmp_path: Path):
    nodes, allocator, transport = told(tmp_path, node("n", 2))
    transport.disk_problem = "/w/blobs: Read-only file system"
    nodes.turn()
    nodes.drain("n", "drained by ann")
    assert row(nodes).state == "drained"
    transport.disk_problem = ""
    nodes.turn()
    assert (row(nodes).state, row(nodes).health) == ("drained", "drained by ann")
    transport.disk_problem = "/w/blobs: Read-only file system"
    nodes.resume("n")
    nodes.turn()
    assert (row(nodes).state, row(nodes).health) == ("set aside", transport.disk_problem)
    assert not is_offered(allocator)


def test_node_that_ends_is_offered_to_no_search_whatever_is_asked_of_it(tmp_path: Path):
    nodes, allocator, transport = told(tmp_path, node("n", 2))
    transport.read_events.append(m.DevicesWithheld("n", {}, is_ending=True))
    nodes.turn()
    assert (row(nodes).state, row(nodes).health) == ("drained", "its worker was told to end")
    nodes.drain("n", "drained by ann")
    nodes.resume("n")
    transport.disk_problem = "/w/blobs: Read-only file system"
    nodes.turn()
    transport.disk_problem = ""
    nodes.turn()
    assert row(nodes).state == "drained"
    assert not is_offered(allocator)


def test_node_that_joins_while_it_ends_is_offered_to_no_search(tmp_path: Path):
    nodes, allocator, _ = told(tmp_path, replace(node("n", 2), is_ending=True))
    assert row(nodes).state == "drained"
    assert not is_offered(allocator)


def test_rejections_of_the_scheduler_and_its_nodes_are_listed(tmp_path: Path):
    nodes, _, transport = told(tmp_path, node("n", 2))
    transport.rejections.add("registration", "unsigned", "It is refused.")
    transport.rejected = {"command:altered": 3, "reply:unsigned": 1, "no label\n:{}": 9}
    assert [(one.node, one.kind, one.reason, one.times) for one in nodes.rejected()] == [
        ("", "registration", "unsigned", 1),
        ("n", "command", "altered", 3),
        ("n", "reply", "unsigned", 1),
    ]
    transport.rejected = {"command:altered": 3, "reply:unsigned": 1}
    assert row(nodes).rejected == 4


def test_failing_store_of_a_lost_node_is_no_trouble_any_more(tmp_path: Path):
    nodes, _, transport = told(tmp_path, node("n", 2))
    transport.store = StoreTraffic(9, 9, 0, 18.5, "AccessDenied")
    assert any("AccessDenied" in line for line in nodes.troubles())
    transport.read_events.append(m.NodeLost("n", "its lease was not renewed"))
    nodes.turn()
    assert row(nodes).state == "silent"
    assert list(nodes.troubles()) == []
    (state,) = nodes.states()
    assert (state.node_metrics.store.requests, state.node_metrics.store.failing_s) == (9, 0.0)


def test_s15_entries_of_the_farms_own_stream_are_removed(tmp_path: Path) -> None:
    """No node writes them, so that no search acknowledges them."""
    _, _, transport = told(tmp_path)
    assert transport.acknowledged == [{}]


def test_node_that_obeyed_a_later_scheduler_gets_no_trial(tmp_path: Path) -> None:
    nodes, allocator, transport = told(tmp_path, node("n", 2))
    assert row(nodes).state == "ready"
    transport.is_later = True
    nodes.turn()
    assert row(nodes).state == "set aside"
    assert "obeyed a scheduler of a later term: restart this worker" in row(nodes).health
    assert not is_offered(allocator)
