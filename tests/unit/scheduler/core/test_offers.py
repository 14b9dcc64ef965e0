"""Offers of a farm to an experiment: new ones, smaller ones, and the usage reported back."""

from __future__ import annotations

from typing import Any

from tests.unit.scheduler.scripted_runner import Story, kinds
from tunemq.testing.comparable_state import comparable
from tunemq.testing.journal_auditor import JournalAuditor
from tunemq.testing.journal_replay import replay
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.runner_snapshot import dump
from tunemq_scheduler.core.shared_amounts import ResourceAmounts, SlotDemand
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_shared.protocol import messages as m

GPUS = tuple(m.Gpu(f"g{place}", "A100", 80e9) for place in range(4))
ONE = {"cpu": 1.0, "gpu": 1.0}


class SharedNode(Story):
    """A runner with a node of 8 CPUs and 4 GPUs that other experiments use, too."""

    NODE = "shared.1"

    def __init__(self, **settings: Any) -> None:
        super().__init__(cpus=0.0, **settings)
        self.offers = 0
        self.tell(
            m.NodeJoined(
                self.NODE, "shared", "host", "127.0.0.1", {"cpu": 8.0, "gpu": 4.0}, GPUS, True
            )
        )

    def offer(self, *gpus: str, cpus: float | None = None, grace: float | None = None):
        self.offers += 1
        amounts = {"cpu": float(len(gpus)) if cpus is None else cpus, "gpu": float(len(gpus))}
        devices = dict.fromkeys(gpus, 1.0)
        return self.tell(m.NodeOffered(self.NODE, self.offers, amounts, devices, grace))

    def add_gpu_trial(self, trial: str, **request: float) -> None:
        n = self.runner.suggested
        self.tell(m.ConfigSuggested(n, trial, b"", "", {**ONE, **request}))

    def begin(self, *trials: str) -> None:
        for trial in trials:
            self.add_gpu_trial(trial)
            self.choose(trial)

    def wait(self, seconds: float) -> list[c.Command]:
        return self.tell(m.Tick(self.runner.elapsed + seconds))

    def check(self) -> None:
        """Check that the journal and a reloaded snapshot both give this state."""
        auditor = JournalAuditor(self.settings)
        auditor.turn(self.journal_records)
        auditor.check()
        auditor.same_as(self.runner)
        assert comparable(replay(self.settings, self.journal_records)) == comparable(self.runner)
        again = TrialRunner.load(self.settings, dump(self.runner), dict(self.runner.finished))
        assert comparable(again) == comparable(self.runner)
        assert dump(again) == dump(self.runner)
        assert again.usage() == self.runner.usage()


def test_shared_node_is_not_used_before_it_is_offered() -> None:
    story = SharedNode(request=ONE)
    story.add_gpu_trial("a")
    assert list(story.runner.waiting()) == []
    assert story.runner.placement.why_never(ONE) is None
    story.offer("g2")
    assert [trial.trial_id for trial in story.runner.waiting()] == ["a"]
    order = story.choose("a")
    assert (order.instance_id, order.devices) == (story.NODE, {"g2": 1.0})
    assert not story.runner.wants_config()
    story.check()


def test_older_offer_that_arrives_late_changes_nothing() -> None:
    story = SharedNode()
    story.offer("g0")
    newest = m.NodeOffered(story.NODE, 7, {"cpu": 2.0, "gpu": 2.0}, {"g0": 1.0, "g1": 1.0})
    story.tell(newest)
    story.tell(m.NodeOffered(story.NODE, 6, {}, {}))
    story.tell(m.NodeOffered("unknown.1", 1, {"cpu": 1.0}))
    assert story.runner.offers == {story.NODE: newest}
    story.check()


def test_unshared_node_is_used_without_an_offer() -> None:
    story = Story()
    assert story.start("a").instance_id == "node.1"
    assert story.runner.usage().seen == {"node.1": 0}


def test_smaller_offer_without_a_grace_period_evicts_no_trial() -> None:
    story = SharedNode()
    story.offer("g0", "g1", cpus=8.0)
    story.begin("a", "b")
    assert story.offer("g0", cpus=8.0) == []
    assert story.wait(10_000) == []
    story.add_gpu_trial("c")
    assert list(story.runner.waiting()) == []
    story.finish("b")
    story.free("b")
    assert list(story.runner.waiting()) == [], "trial a runs on the remaining GPU"
    story.finish("a")
    story.free("a")
    assert [trial.trial_id for trial in story.runner.waiting()] == ["c"]
    story.check()


def test_trial_that_would_repeat_least_is_evicted() -> None:
    story = SharedNode()
    story.offer("g0", "g1", "g2", cpus=8.0)
    story.begin("a", "b", "c")
    for trial in "abc":
        story.report(trial, 1)
        story.report(trial, 2)
    story.write("b", 2)
    (order,) = story.offer("g0", "g1", "g2", cpus=2.0, grace=30.0)
    assert order == c.PauseTrial("b", 1, story.NODE, at_checkpoint=True)
    story.check()


def test_only_trials_on_withdrawn_resources_are_evicted() -> None:
    story = SharedNode()
    story.offer("g0", "g1", "g2")
    story.begin("a", "b", "c")
    story.report("b", 1)
    orders = story.offer("g0", "g2", grace=30.0)
    assert [order.trial for order in orders] == ["b"]
    assert story.offer("g0", "g2", grace=30.0) == [], "trial b is already being evicted"
    orders = story.offer(grace=30.0)
    assert sorted(order.trial for order in orders) == ["a", "c"]
    story.check()


def test_later_offer_shortens_the_grace_of_a_trial_but_does_not_extend_it() -> None:
    story = SharedNode()
    story.offer("g0")
    story.begin("a")
    story.offer(grace=900.0)
    story.offer(grace=30.0)
    story.offer(grace=60.0)
    assert kinds(story.wait(29.0)) == []
    assert kinds(story.wait(2.0)) == ["StopTrial"]
    story.check()


def test_evicted_trial_waits_for_a_slot_and_has_not_failed() -> None:
    story = SharedNode()
    story.offer("g0")
    story.begin("a")
    story.report("a", 1)
    story.offer(grace=30.0)
    story.check()
    story.write("a", 1)
    assert story.paused("a") == []
    story.free("a")
    trial = story.runner.live["a"]
    assert (trial.status, trial.preemptions, trial.num_failures) == ("PENDING", 1, 0)
    assert story.runner.giving_way == {}
    assert story.wait(100) == []
    story.offer("g3")
    order = story.choose("a")
    assert order.devices == {"g3": 1.0}
    assert [ref.step for ref in order.restore] == [1]
    assert story.runner.summary("a").preemptions == 1
    story.check()


def test_results_of_a_trial_being_evicted_go_to_the_algorithms() -> None:
    story = SharedNode()
    story.offer("g0")
    story.begin("a")
    story.offer(grace=30.0)
    assert kinds(story.report("a", 1)) == ["NotifyResult", "ContinueTrial"]
    commands = story.report("a", 2, m.DecisionMade("a", 2, m.STOP, "enough"))
    assert "NotifyTrialEnd" in kinds(commands)
    assert story.runner.giving_way == {}
    assert story.wait(100) == []
    story.free("a")
    story.check()


def test_trial_not_evicted_in_time_is_stopped_and_its_repeated_steps_are_counted() -> None:
    story = SharedNode()
    story.offer("g0")
    story.begin("a")
    story.report("a", 1)
    story.commit("a", 1)
    story.offer(grace=30.0)
    story.report("a", 2)
    assert story.wait(29.0) == []
    assert story.runner.next_wake() == 30.0
    assert story.wait(1.0) == [c.StopTrial("a", 1, story.NODE)]
    assert story.runner.live["a"].status == "PENDING"
    assert story.wait(1.0) == []
    story.check()
    story.free("a")
    story.offer("g0")
    order = story.choose("a")
    assert [ref.step for ref in order.restore] == [1]
    story.report("a", 2, attempt=2)
    story.report("a", 3, attempt=2)
    summary = story.runner.summary("a")
    assert (summary.preemptions, summary.repeated, summary.num_failures) == (1, 1, 0)
    story.check()


def test_trial_stopped_after_the_grace_period_may_have_finished_before() -> None:
    story = SharedNode()
    story.offer("g0")
    story.begin("a")
    story.offer(grace=0.0)
    story.wait(1.0)
    story.report("a", 1, done=True)
    assert "NotifyTrialEnd" in kinds(story.finish("a"))
    story.free("a")
    assert story.runner.summary("a").status == "TERMINATED"
    story.check()


def test_trial_being_paused_stays_paused_and_is_stopped_after_the_grace_period() -> None:
    story = SharedNode()
    story.offer("g0")
    story.begin("a")
    story.pause("a", 1)
    assert story.offer(grace=10.0) == [], "the trial is already pausing"
    assert kinds(story.wait(10.0)) == ["StopTrial"]
    story.free("a")
    trial = story.runner.live["a"]
    assert (trial.status, trial.preemptions) == ("PAUSED", 0)
    story.check()


def test_trial_that_fails_while_it_is_evicted_counts_as_failed() -> None:
    story = SharedNode(max_failures=1)
    story.offer("g0")
    story.begin("a")
    story.offer(grace=10.0)
    story.die("a")
    story.free("a")
    trial = story.runner.live["a"]
    assert (trial.status, trial.preemptions, trial.num_failures) == ("PENDING", 0, 1)
    assert story.wait(20.0) == []
    story.check()


def test_trial_that_is_stopped_while_it_is_evicted_ends() -> None:
    story = SharedNode()
    story.offer("g0")
    story.begin("a")
    story.offer(grace=10.0)
    story.tell(m.StopRequested("a", "a user asked for it"))
    assert story.wait(20.0) == []
    assert "NotifyTrialEnd" in kinds(story.free("a"))
    story.check()


def test_returning_node_keeps_its_offer_and_gets_the_eviction_order_again() -> None:
    story = SharedNode()
    story.offer("g0", "g1")
    story.begin("a", "b")
    story.offer("g1", grace=30.0)
    story.lose(story.NODE)
    assert story.runner.live["a"].status == story.runner.live["b"].status == "PENDING"
    story.offer(grace=30.0)
    story.check()
    orders = story.hear_again(story.NODE)
    again = [order for order in orders if isinstance(order, c.ReattachTrial)]
    assert [(one.start.devices, one.pause, one.at_checkpoint) for one in again] == [
        ({"g0": 1.0}, True, True),
        ({"g1": 1.0}, True, True),
    ]
    assert set(story.runner.giving_way) == {"a", "b"}
    assert story.runner.placement.held(story.NODE).devices == {"g0": 1.0, "g1": 1.0}
    story.check()


def test_scheduler_that_takes_over_repeats_the_eviction_orders() -> None:
    story = SharedNode()
    story.offer("g0")
    story.begin("a")
    story.offer(grace=30.0)
    story.tell(m.ExperimentResumed(2, 0.0, is_cold=False))
    (order,) = story.runner.standing_orders()
    assert (order.pause, order.at_checkpoint, order.start.devices) == (True, True, {"g0": 1.0})
    assert kinds(story.wait(30.0)) == ["StopTrial"]
    story.check()


def test_dead_node_leaves_no_offer_behind() -> None:
    story = SharedNode()
    story.offer("g0")
    story.begin("a")
    story.offer(grace=30.0)
    story.lose(story.NODE, is_dead=True)
    assert story.runner.offers == {}
    assert story.runner.giving_way == {}
    assert set(story.runner.usage().seen) == {"node.1"}
    story.check()


def test_usage_reports_seen_held_and_wanted_resources_to_the_farm() -> None:
    story = SharedNode(request=ONE, max_concurrent=5)
    usage = story.runner.usage()
    assert (usage.seen, usage.held) == ({"node.1": 0, story.NODE: 0}, {})
    assert usage.wants == (SlotDemand(ONE, 5),)
    assert story.runner.usage() is usage, "nothing changed"
    story.add_gpu_trial("a")
    story.add_gpu_trial("b", gpu=2.0)
    assert story.runner.usage().wants == (
        SlotDemand(ONE, 1),
        SlotDemand({"cpu": 1.0, "gpu": 2.0}, 1),
        SlotDemand(ONE, 3),
    )
    story.offer("g0", "g1", cpus=8.0)
    story.choose("a")
    usage = story.runner.usage()
    assert usage.seen[story.NODE] == 1
    assert usage.held == {story.NODE: ResourceAmounts(ONE, {"g0": 1.0})}
    assert usage.wants == (SlotDemand({"cpu": 1.0, "gpu": 2.0}, 1), SlotDemand(ONE, 3))
    assert story.runner.usage(configurations=1).wants[-1] == SlotDemand(ONE, 1)
    assert len(story.runner.usage(configurations=0).wants) == 1


def test_trial_prefers_the_node_that_has_its_checkpoint() -> None:
    story = SharedNode()
    story.offer("g0")
    story.begin("a")
    story.report("a", 1)
    story.write("a", 1)
    story.offer(grace=1.0)
    story.paused("a")
    story.free("a")
    assert story.runner.usage().wants == (SlotDemand(ONE, 1, story.NODE),)


def test_usage_of_paused_trials_wants_one_slot_and_of_an_interrupted_search_none() -> None:
    story = SharedNode()
    story.offer("g0", "g1")
    story.begin("a", "b")
    for trial in "ab":
        story.pause(trial, 1)
        story.paused(trial)
        story.free(trial)
    assert story.runner.usage().wants == (SlotDemand(ONE, 1),)
    story.tell(m.RunInterrupted("for now"))
    assert story.runner.usage().wants == ()
