"""How a node handles assignments, and its events about trial processes; runs no process."""

from __future__ import annotations

import errno
import os

import pytest

from tests.unit.workers.fakes import Clock, FakeConnection, FakeDisk, FakeTransfers, order, start
from tunemq_shared.protocol.messages import (
    SlotFreed,
    TrialFailed,
    TrialFinished,
    TrialPaused,
    TrialProcessDied,
    TrialStarted,
    decode_node_event,
    encode,
)
from tunemq_shared.protocol.result_conditions import next_result
from tunemq_workers.checkpoints.checkpoint_cache import CacheLimits
from tunemq_workers.checkpoints.trial_checkpoint_requests import CheckpointRequests
from tunemq_workers.gpu.gpu_availability import GpuAvailability
from tunemq_workers.gpu.gpu_meter import GpuMeter
from tunemq_workers.runtime import frames
from tunemq_workers.runtime.reactor import do_nothing
from tunemq_workers.runtime.trial_process_state import TrialKey
from tunemq_workers.trials.dependencies import DependencyFetcher
from tunemq_workers.trials.trial_supervisor import TERM_GRACE_S, TrialSupervisor


class FakeForkservers:
    def __init__(self):
        self.started = {}
        self.connections = {}
        self.done = []
        self.held = {}
        self.refuses = False

    def start(self, process, order, supervisor):
        if self.refuses:
            raise FileNotFoundError(2, "No such file or directory", "/no/python")
        self.started[process] = order
        connection = self.connections[process] = FakeConnection()
        return connection

    def term(self, process):
        self.done.append(("term", process))

    def kill(self, process):
        self.done.append(("kill", process))

    def held_at_kill(self, process):
        return self.held.get(process, 0)

    def dump(self, process):
        self.done.append(("dump", process))


class Node:
    """A node's trial processes, with surroundings that a test controls."""

    def __init__(self, clock=None, availability=None):
        self.clock = clock or Clock()
        self.forkservers = FakeForkservers()
        self.said = []
        self.disk, self.transfers = disk, transfers = FakeDisk(), FakeTransfers()
        self.checkpoints = CheckpointRequests(
            self.clock, disk, transfers, self._emit, folder="", limits=CacheLimits()
        )
        self.dependencies = DependencyFetcher(disk, transfers, "/node", {}, CacheLimits())
        self.supervisor = TrialSupervisor(
            self.clock,
            self.forkservers,
            self.checkpoints,
            self.dependencies,
            self._emit,
            self._emit,
            availability or GpuAvailability((), self.clock, do_nothing),
            GpuMeter(()),
            lambda: self.clock.now,
        )

    def _emit(self, key, event):
        self.said.append((key, decode_node_event(event)))

    @property
    def events(self):
        return [event for _, event in self.said]

    @property
    def started(self):
        return [order.trial for order in self.forkservers.started.values()]

    @property
    def done(self):
        return self.forkservers.done

    def sent(self, process):
        return self.forkservers.connections[process].sent

    def begin(self, trial="t", name="h1", **how):
        """Start a trial and let its process run."""
        self.supervisor.obey([order(trial, start(**how))])
        self.supervisor.forked(name, 100)

    def finish(self, name, trial):
        self.supervisor.said(name, frames.ENDING, encode(TrialFinished(trial, 1)))

    def end(self, name, *, signal=None, exit_code=0):
        self.supervisor.exited(name, signal, exit_code)
        self.supervisor.gone(name)


@pytest.fixture
def node():
    return Node()


@pytest.mark.parity(133)
def test_listed_trial_without_a_process_is_started(node):
    node.supervisor.obey([order("a", start()), order("b", start())])
    assert node.started == ["a", "b"]


def test_listed_trial_with_a_process_is_left_alone(node):
    node.begin("a")
    node.supervisor.obey([order("a", start())])
    node.supervisor.obey([order("a")])
    assert node.started == ["a"]
    assert node.done == node.sent("h1") == []


@pytest.mark.parity(133)
def test_process_of_an_unlisted_trial_is_killed_at_once_and_only_once(node):
    node.begin("a")
    node.supervisor.obey([])
    node.supervisor.obey([])
    assert node.done == [("kill", "h1")]
    node.end("h1", signal=9)
    assert node.events == [SlotFreed("a", 1)]


def test_trial_that_orders_do_not_mention_stays_as_it_is(node):
    node.begin("a")
    node.supervisor.obey([order("b", start(key="other"))], ["events"])
    node.supervisor.obey([order("b")], ["events"])
    assert node.started == ["a", "b"]
    assert node.done == node.sent("h1") == []
    assert node.supervisor.events_keys() == {"events", "other"}

    node.supervisor.obey([order("b")])
    assert node.done == [("kill", "h1")]


def test_ended_trial_is_not_restarted_while_orders_do_not_mention_it(node):
    node.begin("a")
    node.finish("h1", "a")
    node.end("h1")
    node.supervisor.obey([], ["events"])
    node.supervisor.obey([order("a", start())])
    assert node.started == ["a"]


def test_another_attempt_is_another_process(node):
    node.begin("a")
    node.supervisor.obey([order("a", start(), attempt=2)])
    assert node.done == [("kill", "h1")]
    assert [o.attempt for o in node.forkservers.started.values()] == [1, 2]


@pytest.mark.parity(129)
def test_larger_horizon_is_sent_without_the_start(node):
    node.begin("a")
    node.supervisor.obey([order("a", start(), run_until=next_result(4))])
    assert node.sent("h1") == [(frames.ORDER, order("a", run_until=next_result(4)))]


@pytest.mark.parity(74, 128)
def test_stop_is_requested_then_sigterm_then_sigkill(node):
    node.begin("a")
    node.supervisor.obey([order("a", stop=True)])
    assert node.sent("h1") == [(frames.ORDER, order("a", stop=True))]
    node.clock.advance(4.9)
    assert node.done == []
    node.clock.advance(0.2)
    assert node.done == [("term", "h1")]
    node.clock.advance(TERM_GRACE_S)
    assert node.done == [("term", "h1"), ("kill", "h1")]


def test_stop_of_a_trial_that_saves_waits_for_that_and_then_its_grace(node):
    node.begin("a")
    node.supervisor.said("h1", frames.SAVING, b"\x01")
    node.supervisor.obey([order("a", stop=True)])
    node.clock.advance(500)
    assert node.done == []
    node.supervisor.said("h1", frames.SAVING, b"\x00")
    node.clock.advance(4.9)
    assert node.done == []
    node.clock.advance(0.2)
    assert node.done == [("term", "h1")]


def test_save_that_begins_after_the_stop_is_waited_for(node):
    node.begin("a")
    node.supervisor.obey([order("a", stop=True)])
    node.clock.advance(4.9)
    node.supervisor.said("h1", frames.SAVING, b"\x01")
    node.clock.advance(500)
    assert node.done == []
    node.clock.advance(100)
    assert node.done == [("term", "h1")]
    node.clock.advance(TERM_GRACE_S)
    assert node.done == [("term", "h1"), ("kill", "h1")]


def test_trial_that_saves_again_and_again_is_killed_ten_minutes_after_its_stop(node):
    node.begin("a")
    node.supervisor.obey([order("a", stop=True)])
    for _ in range(305):
        for is_saving in (b"\x01", b"\x00"):
            node.supervisor.said("h1", frames.SAVING, is_saving)
        node.clock.advance(2)
    assert ("kill", "h1") in node.done


def test_killed_trial_gets_no_time_for_its_save(node):
    node.begin("a")
    node.supervisor.said("h1", frames.SAVING, b"\x01")
    node.supervisor.obey([order("a", kill=True)])
    node.supervisor.said("h1", frames.SAVING, b"\x00")
    assert node.done == [("kill", "h1")]


def test_repeated_stop_does_not_restart_its_grace(node):
    node.begin("a")
    node.supervisor.obey([order("a", stop=True)])
    node.clock.advance(4)
    node.supervisor.obey([order("a", stop=True)])
    node.clock.advance(1.1)
    assert node.done == [("term", "h1")]
    assert len(node.sent("h1")) == 1


def test_process_that_leaves_on_request_is_not_reported_as_dead(node):
    node.begin("a")
    node.supervisor.obey([order("a", stop=True)])
    node.end("h1")
    assert node.events == [SlotFreed("a", 1)]
    node.clock.advance(60)
    assert node.done == []


def test_stop_of_a_trial_that_never_ran_here_frees_its_slot(node):
    node.supervisor.obey([order("a", start(), stop=True)])
    node.supervisor.obey([order("a", start(), stop=True)])
    assert node.started == []
    assert node.events == [SlotFreed("a", 1)]


def test_process_that_ends_silently_is_reported_after_its_last_events(node):
    node.begin("a")
    node.forkservers.connections["h1"].unread = [TrialStarted("a", 1, 100, "h", "ip", 0.0)]
    node.supervisor.exited("h1", 11, None)
    started, died = node.events
    assert isinstance(started, TrialStarted)
    assert isinstance(died, TrialProcessDied)
    assert (died.trial, died.attempt, died.pid, died.signal, died.exit_code) == (
        "a",
        1,
        100,
        11,
        None,
    )
    assert node.forkservers.connections["h1"].is_closed
    node.supervisor.gone("h1")
    assert node.events[2:] == [SlotFreed("a", 1)]


def test_process_that_reported_the_end_of_its_trial_is_only_freed(node):
    node.begin("a")
    node.finish("h1", "a")
    node.end("h1")
    assert node.events == [TrialFinished("a", 1), SlotFreed("a", 1)]


def test_process_that_lingers_after_its_trial_is_ended(node):
    node.begin("a")
    node.finish("h1", "a")
    node.clock.advance(5)
    node.clock.advance(TERM_GRACE_S)
    assert node.done == [("term", "h1"), ("kill", "h1")]


@pytest.mark.parity(34)
def test_ended_trial_is_not_restarted_while_it_is_listed(node):
    node.begin("a")
    node.finish("h1", "a")
    node.end("h1")
    node.supervisor.obey([order("a", start())])
    assert node.started == ["a"]


def test_process_that_closes_its_socket_and_stays_is_killed(node):
    node.begin("a")
    node.supervisor.closed("h1")
    assert node.done == []
    node.clock.advance(1)
    assert node.done == [("kill", "h1")]
    node.end("h1", signal=9)
    assert isinstance(node.events[0], TrialProcessDied)


def test_process_that_sends_invalid_frames_is_killed(node):
    node.begin("a")
    node.supervisor.said("h1", ord("?"), b"")
    assert node.done == [("kill", "h1")]


@pytest.mark.parity(127)
def test_process_that_could_not_be_forked_fails_its_trial_with_the_reason(node):
    node.supervisor.obey([order("a", start())])
    node.supervisor.not_started("h1", "fork: no memory")
    node.supervisor.gone("h1")
    failed, freed = node.events
    assert failed.kind == "start"
    assert "fork: no memory" in failed.error
    assert freed == SlotFreed("a", 1)


@pytest.mark.parametrize("others", [0, 1])
def test_machine_without_a_process_left_is_a_failure_of_the_node(node, monkeypatch, others):
    if others:
        node.begin("b")

    def refuses(*_):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(node.forkservers, "start", refuses)
    before = len(node.events)
    orders = [order("b", start())] * others
    node.supervisor.obey([*orders, order("a", start())])
    failed, freed = node.events[before:]
    assert (failed.trial, failed.kind, failed.is_shared) == ("a", "forkserver", bool(others))
    assert "no room for its process" in failed.error
    assert freed == SlotFreed("a", 1)


@pytest.mark.parametrize("is_forked", [True, False])
def test_process_whose_forkserver_is_dead_is_reported_as_a_failure_of_the_node(node, is_forked):
    if is_forked:
        node.begin("a")
    else:
        node.supervisor.obey([order("a", start())])
    node.supervisor.lost("h1", "the forkserver 7 was killed")
    node.supervisor.gone("h1")
    failed, freed = node.events
    said = (failed.trial, failed.kind, failed.error, failed.is_shared)
    assert said == ("a", "forkserver", "the forkserver 7 was killed", False)
    assert freed == SlotFreed("a", 1)
    assert node.forkservers.connections["h1"].is_closed


def test_trials_that_lose_their_forkserver_together_report_a_shared_loss(node):
    node.supervisor.obey([order("a", start()), order("b", start())])
    for name in ("h1", "h2"):
        node.supervisor.lost(name, "the forkserver 7 was killed")
    failed = [event for event in node.events if isinstance(event, TrialFailed)]
    assert [(event.trial, event.is_shared) for event in failed] == [("a", True), ("b", True)]


def test_process_that_had_ended_its_trial_when_its_forkserver_died_has_not_failed(node):
    node.begin("a")
    node.finish("h1", "a")
    node.supervisor.lost("h1", "the forkserver 7 was killed")
    node.supervisor.gone("h1")
    assert node.events == [TrialFinished("a", 1), SlotFreed("a", 1)]


def test_environment_that_cannot_be_started_fails_its_trial_once(node):
    node.forkservers.refuses = True
    node.supervisor.obey([order("a", start())])
    node.supervisor.obey([order("a", start())])
    failed, freed = node.events
    assert "/no/python" in failed.error
    assert freed == SlotFreed("a", 1)
    assert len(node.supervisor) == 0


def parked(node, **how):
    node.begin("a", reuse=True, **how)
    node.finish("h1", "a")
    node.supervisor.said("h1", frames.IDLE, b"")


def test_parked_process_has_freed_its_slot(node):
    parked(node)
    assert node.events == [TrialFinished("a", 1), SlotFreed("a", 1)]
    node.clock.advance(60)
    assert node.done == []


def test_parked_process_gets_the_next_trial_that_fits(node):
    parked(node)
    node.supervisor.obey([order("b", start(reuse=True, key="other"))])
    assert node.started == ["a"]
    (kind, told), *_ = node.sent("h1")
    assert (kind, told.trial, told.start.events_key) == (frames.NEXT, "b", "other")
    started = TrialStarted("b", 1, 100, "h", "ip", 0.0)
    node.forkservers.connections["h1"].on_event(encode(started))
    assert node.said[-1] == ("other", started)
    node.end("h1", signal=9)
    assert node.events[-1] == SlotFreed("b", 1)


@pytest.mark.parametrize(
    "other", [{"sha": "z"}, {"cpu": 2.0}, {"preload": ("numpy",)}, {"reuse": False}]
)
def test_parked_process_makes_room_for_a_trial_that_it_cannot_run(node, other):
    parked(node)
    node.supervisor.obey([order("b", start(**{"reuse": True, **other}))])
    assert node.sent("h1")[-1][0] == frames.LEAVE
    assert node.started == ["a"]  # not before the memory of the parked process is free
    node.end("h1", signal=9)
    assert node.started == ["a", "b"]
    assert node.events == [TrialFinished("a", 1), SlotFreed("a", 1)]


def test_parked_processes_are_dismissed_when_no_trial_is_left(node):
    parked(node)
    node.supervisor.obey([])
    assert node.sent("h1")[-1][0] == frames.LEAVE
    node.end("h1")
    assert node.events == [TrialFinished("a", 1), SlotFreed("a", 1)]
    assert node.done == []


def test_dismissed_process_that_does_not_leave_is_ended(node):
    parked(node)
    node.supervisor.obey([])
    node.clock.advance(60)
    node.clock.advance(60)
    assert node.done == [("term", "h1"), ("kill", "h1")]


def test_dismissed_process_gets_no_other_trial(node):
    parked(node)
    node.supervisor.obey([])
    node.supervisor.obey([order("b", start(reuse=True))])
    assert node.sent("h1")[-1][0] == frames.LEAVE
    node.end("h1")
    assert node.started == ["a", "b"]


def test_stopped_process_may_be_parked(node):
    node.begin("a", reuse=True)
    node.supervisor.obey([order("a", stop=True)])
    node.supervisor.said("h1", frames.IDLE, b"")
    node.clock.advance(60)
    assert node.done == []
    assert node.events == [SlotFreed("a", 1)]
    node.supervisor.obey([order("b", start(reuse=True))])
    assert node.sent("h1")[-1][0] == frames.NEXT


def test_only_processes_of_experiments_whose_outboxes_are_full_are_held(node):
    node.begin("a")
    node.supervisor.hold({"events"})
    node.supervisor.obey(
        [order("a"), order("b", start()), order("c", start(key="other", reuse=True))]
    )

    def are_held():
        return [connection.is_held for connection in node.forkservers.connections.values()]

    assert are_held() == [True, True, False]
    node.supervisor.hold({"other"})
    assert are_held() == [False, False, True]
    node.supervisor.hold(())
    assert not any(are_held())


def test_process_that_runs_a_trial_of_another_experiment_is_held_with_that(node):
    node.begin("a", reuse=True)
    node.finish("h1", "a")
    node.supervisor.said("h1", frames.IDLE, b"")
    node.supervisor.hold({"other"})
    node.supervisor.obey([order("b", start(key="other", reuse=True))])
    assert node.sent("h1")[-1][0] == frames.NEXT
    assert node.forkservers.connections["h1"].is_held


def test_node_that_ends_kills_all_processes_and_starts_none(node):
    node.begin("a")
    node.supervisor.kill_all()
    node.supervisor.obey([order("a"), order("b", start())])
    assert node.done == [("kill", "h1")]
    assert node.started == ["a"]


def test_pause_is_sent_and_has_no_time_limit(node):
    node.begin("a")
    node.supervisor.obey([order("a", pause=True)])
    node.supervisor.obey([order("a", pause=True)])
    assert node.sent("h1") == [(frames.ORDER, order("a", pause=True))]
    node.clock.advance(3600)
    assert node.done == []
    node.supervisor.said("h1", frames.ENDING, encode(TrialPaused("a", 1)))
    node.end("h1")
    assert node.events == [TrialPaused("a", 1), SlotFreed("a", 1)]


def test_pause_at_the_next_checkpoint_may_become_an_immediate_one_only(node):
    node.begin("a")
    node.supervisor.leave(at_checkpoint=True)
    node.supervisor.leave()
    node.supervisor.leave(at_checkpoint=True)
    sent = [(sent.pause, sent.at_checkpoint) for _, sent in node.sent("h1")]
    assert sent == [(True, True), (True, False)]


def test_paused_process_that_lingers_is_ended(node):
    node.begin("a")
    node.supervisor.obey([order("a", pause=True)])
    node.supervisor.said("h1", frames.ENDING, encode(TrialPaused("a", 1)))
    node.clock.advance(5)
    assert node.done == [("term", "h1")]


def test_pausing_trial_can_still_be_stopped(node):
    node.begin("a")
    node.supervisor.obey([order("a", pause=True)])
    node.supervisor.obey([order("a", pause=True, stop=True)])
    node.clock.advance(5)
    assert node.done == [("term", "h1")]


def test_trial_whose_checkpoints_cannot_be_kept_fails_once_and_is_killed(node):
    node.begin("a")
    node.checkpoints.uploads.on_given_up(TrialKey("events", "a"), "the store is away")
    node.checkpoints.uploads.on_given_up(TrialKey("other", "a"), "the store is away")
    node.finish("h1", "a")  # sent before the order arrived
    node.end("h1", signal=9)
    failed, freed = node.events
    assert (failed.trial, failed.attempt, failed.kind) == ("a", 1, "storage")
    assert failed.error == "the store is away"
    assert freed == SlotFreed("a", 1)
    assert node.done == [("kill", "h1")]


def test_ended_trial_does_not_fail_by_its_uploads(node):
    node.begin("a")
    node.finish("h1", "a")
    node.checkpoints.uploads.on_given_up(TrialKey("events", "a"), "the store is away")
    assert node.events == [TrialFinished("a", 1)]
    assert node.done == []


@pytest.mark.parametrize(
    ("kind", "payload", "said"),
    [
        (frames.WRITTEN, b"nonsense", "cannot be read"),
        (frames.FETCH, b"nonsense", "what it reported about a checkpoint is impossible"),
        (frames.UNREADABLE, b"a frame says that it has 0 bytes", "has 0 bytes"),
        (frames.IDLE, b"", "said that it is free"),
        (ord("?"), b"", "unknown kind 63"),
    ],
)
def test_process_that_sends_an_invalid_frame_has_its_trial_failed(node, kind, payload, said):
    node.begin("a")
    node.supervisor.said("h1", kind, payload)
    assert node.done == [("kill", "h1")]
    node.end("h1", signal=9)
    failed, freed = node.events  # a trial whose slot is free must have ended
    assert (failed.trial, failed.attempt, failed.kind) == ("a", 1, "metric")
    assert said in failed.error
    assert freed == SlotFreed("a", 1)


def test_process_that_reports_twice_that_it_is_free_frees_its_slot_once(node):
    parked(node)
    node.supervisor.said("h1", frames.IDLE, b"")
    assert node.done == [("kill", "h1")]
    node.end("h1", signal=9)
    assert node.events == [TrialFinished("a", 1), SlotFreed("a", 1)]
