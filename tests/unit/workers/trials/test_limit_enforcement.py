"""Limits for which a node kills trial processes, with a fake clock; runs no process."""

from __future__ import annotations

import struct

import pytest

from tests.unit.workers.fakes import Clock, FakeConnection, order, start
from tunemq_shared.protocol.messages import ResultReported, encode
from tunemq_shared.protocol.trial_limits import TrialLimitSpec
from tunemq_workers.checkpoints.checkpoint_messages import FetchAnswer, SaveAnswer
from tunemq_workers.checkpoints.checkpoint_messages import encode as encode_answer
from tunemq_workers.runtime import frames
from tunemq_workers.runtime.trial_process_state import TrialProcess
from tunemq_workers.trials.limit_enforcement import DUMP_S, LOOK_S, LimitEnforcer

#: Between a limit and its notice lie at most three readings and the stack dump.
LATE_S = 3 * 0.05 + DUMP_S + 0.05


class FakeProcessTrees:
    """Returns the usage that a test sets."""

    def __init__(self):
        self.on_exceeded = None
        self.watched, self.killed, self.late = {}, {}, {}

    def watch(self, process, pid, limits):
        self.watched[process] = (pid, limits)

    def leave(self, process):
        self.watched.pop(process, None)

    def late_look(self, process):
        return self.late.get(process)

    def why_killed(self, process, limits):
        return self.killed.get(process, "")


class World:
    """The limits, and a clock that moves in small steps."""

    def __init__(self):
        self.clock, self.process_trees = Clock(), FakeProcessTrees()
        self.dumped, self.exceeded, self.events = [], [], []
        self.silenced, self.is_ending = [], False
        self.limits = LimitEnforcer(
            self.clock,
            self.process_trees,
            dump=self.dumped.append,
            silence=self.silence,
            exceeded=lambda process, excess: self.exceeded.append((process.name, excess)),
            now=lambda: self.clock.now,
        )

    def silence(self, process):
        self.silenced.append(process.name)
        return not self.is_ending

    def process(self, name="h1", *, begins=True, spent_s=0.0, **limits):
        begin = start(limits=TrialLimitSpec(**limits), time_spent_s=spent_s)
        process = TrialProcess(name, order("t"), begin, FakeConnection(), pid=100)
        self.limits.enter(process, self.events.append)
        if begins:
            self.limits.begin(process)
        return process

    def run(self, seconds, each=lambda: None):
        """Advance the time; call ``each`` every few hundredths of a second."""
        step = 0.01 if seconds < 10 else 0.05
        for _ in range(round(seconds / step)):
            self.clock.advance(step)
            each()

    @property
    def kinds(self):
        return [excess.kind for _, excess in self.exceeded]


@pytest.fixture
def world():
    return World()


def report(process):
    process.connection.on_event(encode(ResultReported("t", 1, 1, {}, 0.0, 0.0, 0.0, 0.0, 1)))


def send(process, kind):
    payloads = {
        frames.SAVE_ANSWER: encode_answer(SaveAnswer("/c")),
        frames.FETCHED: encode_answer(FetchAnswer("/c")),
        frames.ORDER: encode(order("t")),
    }
    process.connection.send(kind, payloads[kind])


def count(orders):
    return struct.pack(">I", orders)


@pytest.mark.parametrize(("field", "kind"), [("step_s", "time_limit"), ("stall_s", "stalled")])
def test_process_that_does_not_report_exceeds_its_limit_and_never_early(world, field, kind):
    world.process(**{field: 1.0})
    world.run(1.0)
    assert not world.dumped
    world.run(LATE_S)
    ((name, excess),) = world.exceeded
    assert (name, excess.kind, excess.is_urgent) == ("h1", kind, False)
    assert "its limit is 1 s" in excess.error
    assert f"{field}=" in excess.error
    assert "/f/stderr" in excess.error
    assert world.dumped == ["h1"]


def test_process_that_reports_in_time_exceeds_no_limit(world):
    process = world.process(step_s=1.0, stall_s=1.0)
    for _ in range(20):
        world.run(0.9)
        report(process)
    assert not world.exceeded
    assert len(world.events) == 20


def test_time_of_a_trial_is_the_sum_of_its_steps_and_of_earlier_attempts(world):
    process = world.process(trial_s=3.0, spent_s=2.0)
    world.run(1.0, each=lambda: report(process))
    assert not world.dumped
    world.run(LATE_S + 0.1, each=lambda: report(process))
    ((_, excess),) = world.exceeded
    assert excess.kind == "trial_limit"
    assert "the trial took 3.2 s, and its limit is 3 s (TrialLimits(trial_s=...))" in excess.error


def test_process_exceeds_its_limits_once(world):
    world.process(step_s=1.0, trial_s=1.0, stall_s=1.0)
    world.run(10)
    assert len(world.exceeded) == 1
    assert not [timer for timer in world.clock.timers if timer.call is not None]


def test_limits_with_a_report_after_the_signal_for_stacks_still_fail_the_trial(world):
    """The signal may itself end the C call in which the trial hung."""
    process = world.process(stall_s=1.0)
    world.run(1.0 + LATE_S - DUMP_S)
    assert world.dumped == ["h1"]
    assert world.silenced == ["h1"], "later messages do not count"
    report(process)
    world.run(DUMP_S)
    assert world.kinds == ["stalled"]


def test_limits_with_a_process_that_ends_after_the_signal_for_stacks_fail_its_trial(world):
    process = world.process(stall_s=1.0)
    world.run(1.0 + LATE_S - DUMP_S)
    assert not world.exceeded
    world.limits.leave(process)
    assert world.kinds == ["stalled"]
    world.limits.leave(process)
    world.run(10)
    assert world.kinds == ["stalled"]


def test_limits_with_a_report_at_the_last_moment_send_no_signal(world):
    """The node may not have read the report when the limit runs out."""
    process = world.process(stall_s=1.0)
    world.run(1.01)
    report(process)
    world.run(0.9)
    assert not world.dumped


def test_limits_of_a_process_that_is_already_ending_do_nothing(world):
    world.is_ending = True
    world.process(stall_s=1.0)
    world.run(10)
    assert not world.dumped
    assert not world.exceeded


def test_time_does_not_run_before_the_process_exists(world):
    process = world.process(begins=False, step_s=1.0, trial_s=1.0)
    world.run(60)
    world.limits.begin(process)
    world.run(0.9)
    assert not world.dumped
    world.run(0.1 + LATE_S)
    assert world.exceeded


@pytest.mark.parametrize(
    ("asks", "answer", "payload"),
    [
        (frames.ASK_SAVE, frames.SAVE_ANSWER, b""),
        (frames.FETCH, frames.FETCHED, b"ref"),
        (frames.AWAIT_ORDER, frames.ORDER, count(0)),
    ],
)
def test_time_of_waiting_for_the_node_does_not_count_and_later_time_does(
    world, asks, answer, payload
):
    process = world.process(step_s=1.0, trial_s=2.0, stall_s=1.0)
    world.run(0.5)
    world.limits.heard("h1", asks, payload)
    world.run(60)
    assert not world.dumped
    send(process, answer)
    world.run(0.9)
    assert not world.dumped
    world.run(0.1 + LATE_S)  # even if the process ignores the answer
    assert world.kinds == ["time_limit"]


def test_order_does_not_end_the_wait_for_space(world):
    process = world.process(step_s=1.0)
    world.limits.heard("h1", frames.ASK_SAVE, b"")
    send(process, frames.ORDER)
    world.run(60)
    assert not world.exceeded


def test_process_whose_next_order_is_on_its_way_does_not_wait(world):
    process = world.process(step_s=1.0)
    send(process, frames.ORDER)
    world.limits.heard("h1", frames.AWAIT_ORDER, count(0))
    world.run(1.0 + LATE_S)
    assert world.kinds == ["time_limit"]


@pytest.mark.parametrize("payload", [b"", b"\1", bytes(5), b"\xff" * 1000])
def test_process_with_an_impossible_number_of_orders_ends_no_node(world, payload):
    process = world.process(step_s=1.0)
    send(process, frames.ORDER)
    world.limits.heard("h1", frames.AWAIT_ORDER, payload)
    world.run(1.0 + LATE_S)
    assert world.kinds == ["time_limit"]


def test_process_that_had_all_orders_waits(world):
    process = world.process(step_s=1.0)
    send(process, frames.ORDER)
    world.limits.heard("h1", frames.AWAIT_ORDER, count(1))
    world.run(60)
    assert not world.exceeded


def test_time_in_which_only_other_experiments_are_not_read_counts(world):
    world.process("h1", step_s=1.0)
    world.limits.hold({"other"})
    world.run(1 + LATE_S)
    assert world.kinds == ["time_limit"]


def test_time_in_which_processes_are_not_read_does_not_count(world):
    world.process("h1", step_s=1.0)
    world.process("h2", trial_s=1.0)
    world.run(0.5)
    world.limits.hold({"events"})
    world.run(60)
    world.limits.hold(())
    world.run(0.4)
    assert not world.dumped
    world.run(0.1 + LATE_S)
    assert sorted(world.kinds) == ["time_limit", "trial_limit"]


def test_node_that_was_stopped_for_long_blames_no_process(world):
    world.process(step_s=1.0, trial_s=5.0)
    world.run(0.5)
    world.clock.advance(3600)
    world.run(0.3)
    assert not world.dumped


def test_process_that_left_is_not_watched(world):
    process = world.process(step_s=1.0, memory=1000)
    world.limits.leave(process)
    world.limits.leave(process)
    world.run(60)
    assert not world.exceeded
    assert not world.process_trees.watched
    send(process, frames.ORDER)


def test_reused_process_begins_anew(world):
    process = world.process(step_s=1.0)
    send(process, frames.ORDER)
    world.limits.leave(process)
    world.limits.enter(process, world.events.append)
    world.limits.begin(process)
    world.limits.heard("h1", frames.AWAIT_ORDER, count(0))
    world.run(60)
    assert not world.exceeded


def test_processes_without_limits_are_left_alone(world):
    process = world.process()
    assert process.connection.on_event == world.events.append
    world.run(60)
    assert not world.clock.timers
    world.limits.heard("h1", frames.AWAIT_ORDER, count(0))
    assert not world.process_trees.watched


def test_process_tree_that_uses_too_much_memory_is_ended_once_and_at_once(world):
    world.process(memory=2 * 2**30)
    assert world.process_trees.watched == {"h1": (100, TrialLimitSpec(memory=2 * 2**30))}
    world.process_trees.on_exceeded("h1", "memory", "it held too much")
    world.process_trees.on_exceeded("h1", "memory", "it held more")
    assert world.exceeded == [("h1", ("memory", "it held too much", True))]
    assert not world.process_trees.watched
    assert not world.dumped


def test_process_tree_that_blocks_the_look_at_its_memory_is_ended_and_others_are_not(world):
    for name in ("blocks", "slow", "quick"):
        world.process(name, memory=1000)
    world.process_trees.late = {"blocks": 1.0, "slow": 1.0}
    world.run(1.5 * LOOK_S)
    world.process_trees.late["slow"] = 2.0  # another look
    world.run(LOOK_S)
    assert [name for name, _ in world.exceeded] == ["blocks"]
    ((_, excess),) = world.exceeded
    assert (excess.kind, excess.is_urgent) == ("memory", True)
    assert "could not measure the memory of the trial's processes for 300 s" in excess.error
    assert set(world.process_trees.watched) == {"slow", "quick"}
