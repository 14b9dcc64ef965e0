"""Trial processes that wait for a clear GPU, and trials that are given back; runs no process."""

from __future__ import annotations

import pytest

from tests.unit.workers.fake_gpu_node import GIB, NODE, Gpus
from tests.unit.workers.fakes import order, start
from tests.unit.workers.trials.test_trial_supervisor import Node
from tunemq_shared.protocol.messages import SlotFreed, TrialPaused, TrialWaits
from tunemq_workers.gpu.gpu_admission import GIVE_BACK_AFTER_S
from tunemq_workers.gpu.gpu_availability import GIVEN_BACK_WITHIN_S
from tunemq_workers.runtime import frames


class GpuNode(Node):
    def __init__(self, locks=None):
        self.gpus = Gpus("A", "B", locks=locks)
        super().__init__(self.gpus.clock, self.gpus.availability)
        self.gpus.looks_due.clear()

    def want(self, *orders):
        self.supervisor.obey(orders)

    def run(self, trial, name, pid, *uuids, **how):
        """Start a trial that allocates memory on its devices."""
        self.want(*self.supervisor._wanted.values(), on(trial, *uuids, **how))
        self.supervisor.forked(name, pid)
        self.gpus.parents[pid] = NODE
        for uuid in uuids:
            self.gpus.held[uuid][pid] = 10 * GIB

    def free(self, pid):
        for held in self.gpus.held.values():
            held.pop(pid, None)
        self.gpus.parents.pop(pid, None)

    def leave(self, name, trial, pid, *, keeps=False):
        self.finish(name, trial)
        if not keeps:
            self.free(pid)
        self.end(name)

    def pass_time(self, seconds):
        for _ in range(round(seconds * 10)):
            self.clock.advance(0.1)
            self.gpus.snapshot()


def on(trial, *uuids, **how):
    return order(trial, start(devices=dict.fromkeys(uuids, 1.0), **how))


@pytest.fixture
def node():
    node = GpuNode()
    node.gpus.snapshot()
    return node


def test_first_process_waits_for_the_first_snapshot():
    node = GpuNode()
    node.want(on("a", "A"), on("cpu"))
    assert node.started == ["cpu"]
    node.gpus.snapshot()
    assert node.started == ["cpu", "a"]
    assert node.events == []


def test_process_starts_as_soon_as_the_memory_of_the_previous_one_is_free(node):
    node.run("a", "h1", 10, "A")
    node.leave("h1", "a", 10, keeps=True)
    assert SlotFreed("a", 1) in node.events  # the scheduler may reuse the slot meanwhile
    node.want(on("b", "A"), on("c", "B"))
    assert node.started == ["a", "c"]
    node.gpus.snapshot()
    assert node.started == ["a", "c"]
    node.free(10)
    node.gpus.snapshot()
    assert node.started == ["a", "c", "b"]
    assert not any(isinstance(event, TrialWaits) for event in node.events)


def test_wait_that_does_not_end_at_once_is_reported(node):
    node.run("a", "h1", 10, "A")
    node.leave("h1", "a", 10, keeps=True)
    node.want(on("b", "A"))
    node.pass_time(1.5)
    why = "GPU A: memory not released: process 10 (python) holds 10 GiB"
    assert node.events[2:] == [TrialWaits("b", 1, "device", why)]
    node.free(10)
    node.pass_time(2.5)
    assert node.started == ["a", "b"]
    assert node.events[3:] == [TrialWaits("b", 1, "", "")]


def test_trial_whose_device_is_withheld_is_given_back_for_another_node(node):
    node.run("a", "h1", 10, "A")
    node.leave("h1", "a", 10, keeps=True)
    node.want(on("b", "A"))
    node.pass_time(GIVEN_BACK_WITHIN_S + GIVE_BACK_AFTER_S - 0.5)
    assert [list(one) for one in node.gpus.withheld] == [["A"]]
    assert TrialPaused("b", 1) not in node.events  # the scheduler must learn of the device first
    node.pass_time(1.0)
    assert node.events[3:] == [TrialPaused("b", 1), SlotFreed("b", 1)]
    node.free(10)
    node.pass_time(3)
    assert node.started == ["a"]
    node.want(on("c", "A"))
    assert node.started == ["a", "c"]


def test_device_that_is_given_back_late_is_used_by_a_trial_that_still_waits(node):
    node.run("a", "h1", 10, "A")
    node.leave("h1", "a", 10, keeps=True)
    node.want(on("b", "A"))
    node.pass_time(GIVEN_BACK_WITHIN_S + 0.5)
    node.free(10)
    node.pass_time(3.5)
    assert node.started == ["a", "b"]
    node.pass_time(GIVE_BACK_AFTER_S)
    assert TrialPaused("b", 1) not in node.events


def test_trial_that_is_no_longer_wanted_stops_waiting(node):
    node.run("a", "h1", 10, "A")
    node.leave("h1", "a", 10, keeps=True)
    node.want(on("b", "A"), on("c", "A"))
    node.want(order("c", stop=True))
    before = [event for event in node.events if event != SlotFreed("c", 1)]
    node.pass_time(GIVEN_BACK_WITHIN_S + GIVE_BACK_AFTER_S + 1)
    assert [event for event in node.events if event != SlotFreed("c", 1)] == before
    assert node.started == ["a"]


def test_reused_process_does_not_wait_for_its_own_memory(node):
    node.run("a", "h1", 10, "A", reuse=True)
    node.finish("h1", "a")
    node.supervisor.said("h1", frames.IDLE, b"")
    node.want(on("b", "A", reuse=True))
    assert [kind for kind, _ in node.sent("h1")] == [frames.NEXT]
    assert node.started == ["a"]


def test_trial_waits_until_the_memory_of_a_process_kept_for_reuse_is_free(node):
    node.run("a", "h1", 10, "A", reuse=True)
    node.finish("h1", "a")
    node.supervisor.said("h1", frames.IDLE, b"")
    node.want(on("b", "A", sha="other"))
    assert [kind for kind, _ in node.sent("h1")] == [frames.LEAVE]
    node.end("h1")
    assert node.started == ["a"]
    node.free(10)
    node.gpus.snapshot()
    assert node.started == ["a", "b"]


def test_process_kept_for_reuse_gets_no_trial_on_a_withheld_device(node):
    node.run("a", "h1", 10, "A", reuse=True)
    node.finish("h1", "a")
    node.supervisor.said("h1", frames.IDLE, b"")
    node.gpus.snapshot(("A", 79))
    node.want(on("b", "A", reuse=True))
    assert node.sent("h1") == []
    node.pass_time(GIVE_BACK_AFTER_S + 0.5)
    assert TrialPaused("b", 1) in node.events


def test_trials_on_a_device_that_becomes_withheld_continue(node):
    node.run("a", "h1", 10, "A")
    node.gpus.snapshot(("A", 79))
    node.pass_time(30)
    assert node.done == []
    assert node.sent("h1") == []
