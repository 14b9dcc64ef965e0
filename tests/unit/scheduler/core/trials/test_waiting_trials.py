"""The queue of waiting trials has the same order as a scan of all of them."""

from __future__ import annotations

import random

import pytest

from tunemq_scheduler.core.trials.kept_checkpoints import CheckpointManager, RetentionPolicy
from tunemq_scheduler.core.trials.trial import PAUSED, PENDING, RUNNING, Trial
from tunemq_scheduler.core.trials.waiting_trials import MAX_TIMES_PASSED_OVER, WaitingTrials


def trial(name: str, cpus: float = 1.0) -> Trial:
    return Trial(
        trial_id=name,
        number=0,
        config=b"",
        tag="",
        resources={"cpu": cpus},
        checkpoints=CheckpointManager(RetentionPolicy()),
    )


class Model:
    """A reference queue that examines every waiting trial; some nodes are present, some are not."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.there: set[str] = {"a", "b"}
        self.queue = WaitingTrials(self.is_apart)
        self.trials = [trial(f"t{n}", self.draw.choice([1.0, 2.0, 4.0])) for n in range(20)]
        self.waiting: list[Trial] = []
        self.now = 0.0

    def is_apart(self, one: Trial) -> bool:
        return len([node for node in one.fell_with if node not in self.there]) >= 2

    def step(self) -> None:
        self.now += self.draw.choice([0.0, 0.5, 3.0])
        if self.draw.random() < 0.2:
            node = self.draw.choice("abcd")
            self.there ^= {node}
            self.queue.review(node)
            return
        if self.draw.random() < 0.05:
            for one in self.waiting:
                one.fell_with = []
            self.queue.regroup()
            return
        one = self.draw.choice(self.trials)
        one.status = self.draw.choice([PENDING, PENDING, PAUSED, RUNNING])
        if one.status != RUNNING:
            one.not_before = self.draw.choice([0.0, self.now, self.now + 2.0])
            one.fell_with = self.draw.choice([[], ["c"], ["a", "d"], ["c", "d"]])
            one.excluded = self.draw.choice([[], [], ["a"], ["b", "a"], ["a", "b"]])
        self.waiting = [other for other in self.waiting if other is not one]
        if one.status != RUNNING:
            self.waiting.append(one)
        self.queue.follow(one)

    def expected(self, looks: Looks) -> list[str]:
        ordered = sorted(self.waiting, key=lambda one: one.status == PAUSED)
        return [
            one.trial_id for one in ordered if one.not_before <= self.now and looks.has_place(one)
        ]

    def check(self) -> None:
        for cpus, together, node in (
            *((0.0, True, "b"), (1.0, False, "b"), (2.0, True, "c")),
            *((4.0, False, "b"), (4.0, True, "c")),
        ):
            looks = Looks(self, cpus, together=together, node=node)
            expected = self.expected(looks)
            first = next(self.queue.placeable(self.now, looks), None)
            assert (first.trial_id if first else None) == next(iter(expected), None)
            assert looks.count <= 2 * 3 * 2 * 3, "one check per queue"
            found = [one.trial_id for one in self.queue.placeable(self.now, looks)]
            assert found == expected
        pending = [one for one in self.waiting if one.status == PENDING]
        due = [one.not_before for one in self.waiting if one.not_before > self.now]
        assert self.queue.has_pending(self.now) == any(
            one.not_before <= self.now for one in pending
        )
        assert self.queue.has_any(self.now) == any(
            one.not_before <= self.now for one in self.waiting
        )
        assert self.queue.keeps_others_waiting(self.now) == any(
            one.not_before <= self.now and not one.excluded and not self.is_apart(one)
            for one in pending
        )
        assert self.queue.next_try(self.now) == min(due, default=None)
        paused = [one for one in self.waiting if one.status == PAUSED]
        assert [one.trial_id for one in self.queue] == [one.trial_id for one in (*pending, *paused)]
        again = WaitingTrials(self.is_apart)
        again.take_back(pending, paused)
        every = self.queue.placeable(self.now, lambda _: True)
        assert list(again.placeable(self.now, lambda _: True)) == list(every)


class Looks:
    """Checks whether a trial fits, and counts the checks."""

    def __init__(self, model: Model, cpus: float, *, together: bool, node: str) -> None:
        self.model, self.cpus, self.together, self.node = model, cpus, together, node
        self.count = 0

    def __call__(self, one: Trial) -> bool:
        self.count += 1
        return self.has_place(one)

    def has_place(self, one: Trial) -> bool:
        is_alone = self.together or not self.model.is_apart(one)
        return one.resources["cpu"] <= self.cpus and is_alone and self.node not in one.excluded


@pytest.mark.parametrize("seed", range(20))
def test_waiting_queue_has_the_order_of_a_scan_of_all_trials(seed: int) -> None:
    model = Model(seed)
    for _ in range(150):
        model.step()
        model.check()


def test_waiting_queue_counts_passes_separately_by_excluded_nodes() -> None:
    def looked_after(queue: WaitingTrials, times: int) -> list[str]:
        found: list[str] = []
        for _ in range(times):
            queue.slot_freed(lambda one: found.append(one.trial_id))
        return found

    queue, (plain, restricted) = WaitingTrials(lambda _one: False), (trial("a"), trial("b"))
    restricted.excluded = ["n"]
    queue.follow(plain)
    queue.follow(restricted)
    assert not looked_after(queue, MAX_TIMES_PASSED_OVER - 1)
    queue.served(plain)  # other trials of this queue still wait
    again = WaitingTrials(lambda _one: False)
    again.take_back([plain, restricted], [], queue.passed_over())
    assert again.passed_over() == queue.passed_over()
    assert looked_after(queue, 1) == looked_after(again, 1) == ["b"]


def test_waiting_queue_keeps_nothing_of_trials_that_left() -> None:
    queue = WaitingTrials(lambda _one: False)
    one, other = trial("a"), trial("b")
    one.fell_with = ["n"]
    for times in range(1000):
        for coming in (one, other):
            coming.status, coming.not_before = PENDING, float(times % 3)
            queue.follow(coming)
        for going in (other, one):
            going.status = RUNNING
            queue.follow(going)
    assert not list(queue)
    assert not queue.has_pending(10.0)
    assert queue.next_try(0.0) is None
    assert not queue._fell_with
    assert not queue._later
