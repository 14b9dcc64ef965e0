"""What happens to trial processes that exceed the limits of their trials; runs no process."""

from __future__ import annotations

import pytest

from tests.unit.workers.fakes import order, start
from tests.unit.workers.trials.test_trial_supervisor import Node, node
from tunemq_shared.protocol.messages import (
    SlotFreed,
    TrialFailed,
    TrialFinished,
    TrialProcessDied,
    encode,
)
from tunemq_shared.protocol.result_conditions import next_result
from tunemq_shared.protocol.trial_limits import TrialLimitSpec
from tunemq_workers.runtime import frames
from tunemq_workers.trials.trial_supervisor import TERM_GRACE_S

__all__ = ["node"]


def exceed_its_time(node, **how):
    node.begin("a", limits=TrialLimitSpec(step_s=1.0), **how)
    for _ in range(40):
        node.clock.advance(0.05)


def test_trial_that_takes_too_long_fails_once_and_gets_sigterm_and_then_sigkill(node):
    exceed_its_time(node)
    assert node.done == [("dump", "h1"), ("term", "h1")]
    (failed,) = node.events
    assert (failed.trial, failed.attempt, failed.kind) == ("a", 1, "time_limit")
    node.clock.advance(TERM_GRACE_S)
    assert node.done[2:] == [("kill", "h1")]
    node.end("h1", signal=9)
    assert node.events == [failed, SlotFreed("a", 1)]


def test_dead_process_with_a_lingering_process_tree_does_not_fail_again(node):
    node.begin("a", limits=TrialLimitSpec(step_s=1.0))
    node.supervisor.exited("h1", 11, None)
    for _ in range(40):
        node.clock.advance(0.05)
    assert [type(event) for event in node.events] == [TrialProcessDied]


def test_process_that_could_not_be_forked_is_not_watched(node):
    node.supervisor.obey([order("a", start(limits=TrialLimitSpec(step_s=1.0)))])
    node.supervisor.not_started("h1", "fork: no memory")
    node.supervisor.gone("h1")
    assert not node.supervisor._limits._clocks


def test_messages_after_a_trial_took_too_long_are_ignored(node):
    exceed_its_time(node, reuse=True)
    node.forkservers.connections["h1"].on_event(encode(TrialFinished("a", 1)))
    node.finish("h1", "a")
    node.supervisor.said("h1", frames.WRITTEN, b"nonsense")
    node.supervisor.said("h1", frames.IDLE, b"")
    node.clock.advance(TERM_GRACE_S)
    assert node.done[-1] == ("kill", "h1")
    node.end("h1", signal=9)
    assert [type(event) for event in node.events] == [TrialFailed, SlotFreed]


def test_process_that_is_being_stopped_exceeds_no_limit(node):
    node.begin("a", limits=TrialLimitSpec(step_s=0.5), stop_grace_s=10.0)
    node.supervisor.obey([order("a", stop=True)])
    for _ in range(40):
        node.clock.advance(0.05)
    assert ("term", "h1") not in node.done
    assert node.events == []


def test_process_that_only_waits_for_an_order_exceeds_no_limit(node):
    node.begin("a", limits=TrialLimitSpec(step_s=1.0))
    node.supervisor.said("h1", frames.AWAIT_ORDER, bytes(4))
    for _ in range(100):
        node.clock.advance(0.05)
    assert node.done == []
    node.supervisor.obey([order("a", run_until=next_result(4))])
    for _ in range(40):
        node.clock.advance(0.05)
    assert node.done == [("dump", "h1"), ("term", "h1")]


@pytest.mark.parametrize(
    ("signal", "kills", "cause"), [(9, 1, "memory"), (9, 0, ""), (11, 1, ""), (None, 1, "")]
)
def test_process_killed_by_the_kernel_for_memory_is_distinguished(
    monkeypatch, tmp_path, signal, kills, cause
):
    counter = tmp_path / "memory.events"
    counter.write_text("oom 0\noom_kill 3\n")
    monkeypatch.setattr("tunemq_workers.system.oom_kills._files", lambda: [str(counter)])
    node = Node()
    node.begin("a")
    counter.write_text(f"oom 1\noom_kill {3 + kills}\n")
    node.end("h1", signal=signal)
    assert node.events[0].cause == cause


@pytest.mark.parametrize(("is_said", "looked_at"), [(True, []), (False, ["/f"])])
def test_output_is_searched_when_a_process_could_not_report_its_cause(node, is_said, looked_at):
    folders = []
    node.supervisor.on_cut_off = lambda _, start: folders.append(start.folder)
    node.begin("a")
    if is_said:
        node.finish("h1", "a")
    node.end("h1")
    assert folders == looked_at


# --- the kernel enforces the memory limit ---------------------------------------------------------

MIB = 2**20


def loses_a_process(node, **how):
    """Start a trial of which the kernel kills a process, before the node has checked it."""
    look_at_no_process(node)
    node.begin("a", limits=TrialLimitSpec(memory=300 * MIB), **how)
    node.forkservers.held["h1"] = 300 * MIB


def look_at_no_process(node):
    """Let no thread read process trees, because there are none."""
    node.supervisor._limits._process_trees.watch = lambda *_: None


def fails_for_memory(node):
    failed, freed = node.events
    assert (failed.trial, failed.kind, freed) == ("a", "memory", SlotFreed("a", 1))
    assert failed.error == (
        "the trial's processes needed more than 300 MiB of memory, and its limit is 300 MiB"
        " (TrialLimits(memory=...))."
    )
    return True


def test_process_killed_by_the_kernel_for_its_limit_fails_with_that_cause(node):
    loses_a_process(node)
    node.end("h1", signal=9)
    assert fails_for_memory(node)


def test_trial_that_fails_because_it_lost_a_child_fails_for_memory(node):
    loses_a_process(node)
    failed = TrialFailed("a", 1, "user", "BrokenProcessPool", "", 1.0)
    node.supervisor.said("h1", frames.ENDING, encode(failed))
    assert node.done[-1] == ("kill", "h1")
    node.end("h1", signal=9)
    assert fails_for_memory(node)


def test_process_that_lost_a_child_after_its_end_runs_no_other_trial(node):
    look_at_no_process(node)
    node.begin("a", limits=TrialLimitSpec(memory=300 * MIB), reuse=True)
    node.finish("h1", "a")
    node.forkservers.held["h1"] = 300 * MIB
    node.supervisor.said("h1", frames.IDLE, b"")
    assert node.done[-1] == ("kill", "h1")
    node.end("h1", signal=9)
    assert [type(event) for event in node.events] == [TrialFinished, SlotFreed]


def test_process_without_a_memory_limit_dies_as_before(node):
    node.begin("a")
    node.end("h1", signal=9)
    assert [type(event) for event in node.events] == [TrialProcessDied, SlotFreed]
