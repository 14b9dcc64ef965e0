"""A trial that runs out of memory on a shared GPU is retried with the whole GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.scheduler.scripted_runner import Story
from tunemq.testing.comparable_state import comparable
from tunemq.testing.journal_replay import replay
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.runner_settings import ALONE, EXCLUDE_NODE, LogRule
from tunemq_scheduler.core.runner_snapshot import dump
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_shared.protocol import messages as m

GB = 1e9
GPUS = tuple(m.Gpu(f"gpu-{number}", "NVIDIA H100", 80 * GB) for number in (0, 1))


class Node(Story):
    """One node with two GPUs; trial ``a`` requests the given resources."""

    def __init__(self, request: dict[str, float], **settings: Any) -> None:
        super().__init__(**{"retry_cuda_memory": ALONE, **settings})
        self.lose(is_dead=True)
        joined = m.NodeJoined("g.1", "g", "host", "127.0.0.1", {"cpu": 8.0}, GPUS)
        self.tell(joined)
        self.tell(m.ConfigSuggested(0, "a", b"", "", request))

    def run_out(self, kind: str = "cuda_memory") -> c.NotifyFailure:
        self.tell(m.Tick(self.runner.next_wake() or self.runner.elapsed))
        order = self.choose("a")
        if kind == "died":
            fact: m.Event = m.TrialProcessDied("a", order.attempt, 1, None, 1, 0.0, "cuda_memory")
        else:
            fact = m.TrialFailed("a", order.attempt, kind, "out of memory", "", 0.0)
        commands = self.tell(fact)
        self.free("a", order.attempt)
        (record,) = [one for one in commands if isinstance(one, c.NotifyFailure)]
        return record

    def is_as_replayed(self) -> None:
        assert comparable(replay(self.settings, self.journal_records)) == comparable(self.runner)
        loaded = TrialRunner.load(self.settings, dump(self.runner), self.runner.finished)
        assert comparable(loaded) == comparable(self.runner)


@pytest.mark.parametrize(
    ("request_", "shown"),
    [
        ({"cpu": 1.0, "gpu": 0.5}, "gpu=0.5"),
        ({"cpu": 1.0, "gpu_memory": 20 * GB}, "gpu_memory="),
        ({"gpu": 0.25, "gpu_memory": 20 * GB, "accelerator_type:H100": 0.001}, "gpu=0.25"),
    ],
)
def test_f23_trial_out_of_memory_on_a_gpu_part_gets_a_whole_gpu_once_and_keeps_its_budget(
    request_: dict[str, float], shown: str
) -> None:
    node = Node(request_, max_failures=0)
    record = node.run_out()
    assert record.retried
    assert record.told.startswith(f"it shared a GPU ({shown}")
    assert record.told.endswith("and gets a whole one from now on")
    trial = node.runner.live["a"]
    assert trial.resources == {**request_, "gpu": 1.0}
    assert (trial.is_alone, trial.num_failures, trial.failures) == (True, 1, {})
    node.is_as_replayed()
    order = node.choose("a")
    assert list(order.devices.values()) == [1.0]
    assert order.resources["gpu"] == 1.0
    others = {"gpu": 0.1}
    node.tell(m.ConfigSuggested(1, "b", b"", "", others))
    assert node.choose("b").devices.keys() != order.devices.keys()
    assert node.runner.placement.fit({"gpu": 1.0}) is None


def test_trial_out_of_memory_on_a_whole_gpu_is_not_retried() -> None:
    node = Node({"gpu": 0.5}, max_failures=-1)
    assert node.run_out().retried
    record = node.run_out()
    assert (record.retried, record.told) == (
        False,
        "not retried, because that would not help",
    )
    assert node.runner.summary("a").resources == {"gpu": 1.0}
    node.is_as_replayed()


@pytest.mark.parametrize("request_", [{"gpu": 1.0}, {"gpu": 2.0, "gpu_memory": GB}, {"cpu": 1.0}])
def test_trial_without_a_gpu_part_is_not_retried(request_: dict[str, float]) -> None:
    assert not Node(request_, max_failures=-1).run_out().retried


def test_trial_out_of_memory_where_no_node_has_a_whole_gpu_is_not_retried() -> None:
    story = Story(retry_cuda_memory=ALONE)
    story.tell(m.NodeJoined("g.1", "g", "host", "127.0.0.1", {"gpu": 0.5}))
    story.tell(m.ConfigSuggested(0, "a", b"", "", {"gpu": 0.5}))
    story.choose("a")
    story.tell(m.TrialFailed("a", 1, "cuda_memory", "out of memory", "", 0.0))
    story.free("a")
    assert story.runner.summary("a").status == "ERROR"


def test_trial_process_that_died_out_of_gpu_memory_is_retried_alike() -> None:
    assert Node({"gpu": 0.5}).run_out("died").kind == "cuda_memory"
    assert not Node({"gpu": 0.5}, retry_cuda_memory=False).run_out("died").retried


@pytest.mark.parametrize("setting", [False, True])
def test_retry_without_alone_leaves_the_request_unchanged(setting: bool) -> None:
    node = Node({"gpu": 0.5}, retry_cuda_memory=setting, max_failures=1)
    assert node.run_out().retried is setting
    assert node.runner.summary("a").resources == {"gpu": 0.5}


def test_gpu_memory_retry_leaves_the_budget_of_other_failures() -> None:
    node = Node({"gpu": 0.5}, max_failures=1)
    assert node.run_out().retried
    assert node.run_out("user").told == "failure 1 of at most 2"
    assert not node.run_out("user").retried


def test_log_policy_on_gpu_memory_excludes_the_node_too() -> None:
    node = Node({"gpu": 0.5}, log_rules=(LogRule("out of memory", EXCLUDE_NODE),))
    order = node.choose("a")
    node.tell(m.LogMatched("a", order.attempt, "out of memory", "CUDA out of memory", 0.0))
    node.tell(m.TrialFailed("a", order.attempt, "cuda_memory", "out of memory", "", 0.0))
    trial = node.runner.live["a"]
    assert (trial.resources, trial.excluded) == ({"gpu": 1.0}, ["g"])


def test_trial_whose_only_node_is_excluded_ends() -> None:
    rules = (LogRule("out of memory", EXCLUDE_NODE),)
    node = Node({"gpu": 0.5}, log_rules=rules, nodes_may_come=False)
    order = node.choose("a")
    node.tell(m.LogMatched("a", order.attempt, "out of memory", "CUDA out of memory", 0.0))
    failed = m.TrialFailed("a", order.attempt, "cuda_memory", "out of memory", "", 0.0)
    (record,) = [one for one in node.tell(failed) if isinstance(one, c.NotifyFailure)]
    assert not record.retried
    assert "no other node can hold it" in record.told
