"""Trials with large requests do not wait forever behind small ones."""

from __future__ import annotations

from tests.unit.scheduler.scripted_runner import NODE, Story
from tunemq.testing.comparable_state import comparable
from tunemq.testing.journal_replay import replay
from tunemq_scheduler.core.runner_snapshot import dump
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.core.trials.waiting_trials import MAX_TIMES_PASSED_OVER
from tunemq_shared.protocol import messages as m


class Busy(Story):
    """A node of four CPUs on which trials of one CPU run one after the other."""

    def __init__(self) -> None:
        super().__init__(cpus=4.0)
        self.running: list[str] = []
        for _ in range(4):
            self.next_small()

    def next_small(self) -> bool:
        """Add a small trial, place it if it fits and return whether it was placed."""
        small = f"s{self.runner.suggested}"
        self.add(small)
        self.place(small)
        return small in self.running

    def place(self, trial: str) -> bool:
        has_place = self.runner.has_place(self.runner.live[trial])
        if has_place:
            self.choose(trial)
            self.running.append(trial)
        return has_place

    def end(self, trial: str) -> None:
        self.running.remove(trial)
        self.finish(trial)
        self.free(trial)

    def end_and_begin(self, times: int) -> None:
        """End the oldest trial and start a new small one in its place, ``times`` times."""
        for _ in range(times):
            self.end(self.running[0])
            assert self.next_small()

    def check(self) -> None:
        assert comparable(replay(self.settings, self.journal_records)) == comparable(self.runner)
        again = TrialRunner.load(self.settings, dump(self.runner), dict(self.runner.finished))
        assert comparable(again) == comparable(self.runner)
        assert dump(again) == dump(self.runner)


def test_large_trial_among_small_ones_has_a_node_reserved() -> None:
    story = Busy()
    story.add("large", cpus=4.0)
    story.end_and_begin(MAX_TIMES_PASSED_OVER - 1)
    assert not story.place("large")
    story.check()
    for left in (3, 2, 1):
        story.end(story.running[0])
        assert not story.next_small(), "the node is reserved"
        assert len(story.running) == left
        story.check()
    assert story.runner.placement.reserved == [(NODE, (("cpu", 4.0),))]
    story.end(story.running[0])
    assert story.place("large")
    assert story.runner.placement.reserved == []
    story.check()


def test_smaller_trials_continue_on_unreserved_nodes() -> None:
    story = Busy()
    story.add("large", cpus=4.0)
    story.end_and_begin(MAX_TIMES_PASSED_OVER - 1)
    story.end(story.running[0])
    story.add("late")
    assert not story.place("late")
    story.join("other.1", 1.0)
    assert story.place("late")
    story.check()


def test_trial_that_no_longer_waits_reserves_no_node() -> None:
    story = Busy()
    story.add("large", cpus=4.0)
    story.end_and_begin(MAX_TIMES_PASSED_OVER - 1)
    story.end(story.running[0])
    assert not story.next_small()
    story.tell(m.StopRequested("large", "a user asked for it"))
    assert story.runner.placement.reserved == []
    assert story.next_small()
    story.check()


def test_request_that_no_node_can_ever_hold_reserves_none() -> None:
    story = Busy()
    story.add("huge", cpus=5.0)
    story.end_and_begin(3 * MAX_TIMES_PASSED_OVER)
    assert story.runner.placement.reserved == []
    story.check()


def test_trial_served_in_its_turn_is_not_counted_as_passed_over() -> None:
    story = Busy()
    for n in range(4):
        story.add(f"waits{n}")
    for _ in range(3 * MAX_TIMES_PASSED_OVER):
        story.end(story.running[0])
        first = next(iter(story.runner.waiting())).trial_id
        assert story.place(first)
        story.add(f"later{story.runner.suggested}")
    assert story.runner.placement.reserved == []
    story.check()


def test_another_node_is_reserved_when_the_first_is_lost() -> None:
    story = Busy()
    story.add("large", cpus=4.0)
    story.end_and_begin(MAX_TIMES_PASSED_OVER - 1)
    story.end(story.running[0])
    story.lose(NODE, is_dead=True)
    assert story.runner.placement.reserved == []
    story.check()
    story.join("other.1", 4.0)
    assert story.place("large")


def test_reserved_node_that_fits_and_is_not_chosen_is_released() -> None:
    story = Busy()
    story.join("other.1", 1.0)
    story.add("large", cpus=4.0)
    story.end_and_begin(MAX_TIMES_PASSED_OVER - 1)
    while any(story.runner.slots.node_at(one, 1) == NODE for one in story.running):
        story.end(next(o for o in story.running if story.runner.slots.node_at(o, 1) == NODE))
    assert story.runner.has_place(story.runner.live["large"])
    for _ in range(MAX_TIMES_PASSED_OVER):
        if not story.running:
            assert story.next_small(), "on the other node"
        story.end(story.running[0])
    assert story.runner.placement.reserved == []
    story.check()


def test_longest_waiting_of_several_passed_over_trials_has_a_node_reserved_first() -> None:
    """A runner that is loaded from a dump agrees: the dump holds the order in which trials wait."""
    story = Busy()
    for trial, cpus in (("first", 4.0), ("other", 3.0), ("later", 4.0)):
        story.add(trial, cpus=cpus)
    # The first trial's queue continues without it and is older than the other queue.
    story.tell(m.StopRequested("first", "a user asked for it"))
    again = TrialRunner.load(story.settings, dump(story.runner), dict(story.runner.finished))
    small = list(story.running)
    for runner in (story.runner, again):
        running = list(small)
        for n in range(MAX_TIMES_PASSED_OVER):
            oldest = running.pop(0)
            runner.handle(m.TrialFinished(oldest, 1))
            runner.handle(m.SlotFreed(oldest, 1))
            if n < MAX_TIMES_PASSED_OVER - 1:
                running.append(f"new{n}")
                fields = (runner.suggested, running[-1], b"", "", {"cpu": 1.0})
                runner.handle(m.ConfigSuggested(*fields))
                runner.handle(m.TrialChosen(running[-1]))
        assert runner.placement.reserved == [(NODE, (("cpu", 3.0),))]
