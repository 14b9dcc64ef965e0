"""What an experiment process knows about its supervisor, and when it may act."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.waiting import eventually
from tunemq_scheduler.farm.ipc import experiment_side as module
from tunemq_scheduler.farm.ipc import ipc_messages as r
from tunemq_scheduler.farm.ipc.experiment_side import SupervisorConnection
from tunemq_scheduler.farm.ipc.nonblocking_frames import FrameSocket
from tunemq_shared.base.errors import SchedulerSuperseded


@pytest.fixture
def ends() -> Iterator[tuple[SupervisorConnection, FrameSocket]]:
    """Return an experiment's line and the supervisor's end of it.

    The limits exceed what any machine needs: a message is late only where a test makes it so.
    """
    ours, theirs = socket.socketpair()
    line, supervisor = (
        SupervisorConnection(ours, fresh_s=60.0, heard_within_s=60.0),
        FrameSocket(theirs),
    )
    yield line, supervisor
    line.close()
    supervisor.close()


def say(supervisor: FrameSocket, message: r.ToExperiment) -> None:
    supervisor.put(r.encode(message))
    supervisor.flush()


def test_experiment_may_act_only_after_a_recent_heartbeat_of_its_supervisor(ends, monkeypatch):
    line, supervisor = ends
    with monkeypatch.context() as patched:
        patched.setattr(line, "_heard_within_s", 0.1)
        with pytest.raises(SchedulerSuperseded, match="was not heard"):
            line.check()
        say(supervisor, r.LeaseProof(time.monotonic() - 100))
        with pytest.raises(SchedulerSuperseded, match="was not heard"):
            line.check()
    say(supervisor, r.LeaseProof(time.monotonic()))
    line.check()
    say(supervisor, r.LeaseProof(time.monotonic() - 100))  # a delayed proof is no newer proof
    line.wait(10.0)
    line.check()


def test_experiment_waits_briefly_for_a_late_supervisor(ends):
    line, supervisor = ends
    late = threading.Timer(0.1, lambda: say(supervisor, r.LeaseProof(time.monotonic())))
    late.start()
    line.check()
    late.join()


def test_heartbeat_behind_other_messages_is_seen_and_those_are_not_lost(ends):
    line, supervisor = ends
    for number in range(20):
        say(supervisor, r.IpcRequest(number, r.StopOneTrial("a", "b" * 1000)))
    say(supervisor, r.LeaseProof(time.monotonic()))
    line.check()
    assert [message.id for message in line.take()] == list(range(20))


def test_heartbeats_are_sent_during_a_long_transfer_and_many_short_steps(ends, monkeypatch):
    line, supervisor = ends
    monkeypatch.setattr(module, "ALIVE_EVERY_S", 0.0)

    def heard(number: int) -> bool:
        found.extend(map(r.decode_for_supervisor, supervisor.receive()))
        return found == [r.ExperimentAlive()] * number

    found: list[r.ToSupervisor] = []
    with line.alive():
        say(supervisor, r.LeaseProof(time.monotonic()))
        eventually(lambda: heard(1))
    say(supervisor, r.LeaseProof(time.monotonic()))
    assert heard(1)  # no process reads
    line.say_alive()
    assert heard(2)


def test_transfer_ends_although_the_supervisor_has_ended(ends):
    line, supervisor = ends
    with line.alive():
        supervisor.close()
    line.wait(1.0)
    assert line.is_lost


def test_experiment_may_not_act_after_its_supervisor_has_ended(ends):
    line, supervisor = ends
    say(supervisor, r.LeaseProof(time.monotonic()))
    line.check()
    supervisor.close()
    line.wait(1.0)
    with pytest.raises(SchedulerSuperseded, match="has ended"):
        line.check()
    with pytest.raises(SchedulerSuperseded):
        line.first()


def test_experiment_with_many_messages_waits_for_its_supervisor_and_still_reads(ends):
    line, supervisor = ends
    notices = r.SearchEnded(detail=bytes(2**20))
    got: list[r.ToSupervisor] = []

    def read() -> None:
        say(supervisor, r.IpcRequest(7, r.ExplainTrial("t")))
        while len(got) < 40:
            got.extend(map(r.decode_for_supervisor, supervisor.receive()))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(40):
        line.send(notices)
        assert line._frames.waiting <= 17 * 2**20
    while line._frames.waiting:
        line.wait(0.01)
    reader.join()
    line.wait(10.0)  # a fast reader may not have had to wait until here
    assert got == [notices] * 40
    assert r.IpcRequest(7, r.ExplainTrial("t")) in line.take()


def test_wait_ends_with_a_message_or_a_wake_up(ends):
    line, supervisor = ends
    line.wake()
    assert line.wait(10.0)
    assert not line.wait(0.0)
    threading.Timer(0.05, line.wake).start()
    assert line.wait(60.0)
    say(supervisor, r.TransportNotices(("Redis is away",)))
    assert not line.wait(10.0)
    assert line.take() == [r.TransportNotices(("Redis is away",))]


def test_last_message_is_sent_before_the_line_is_closed(ends, monkeypatch):
    monkeypatch.setattr(module, "_CLOSED_WITHIN_S", 60.0)
    line, supervisor = ends
    notices = r.SearchEnded(detail=bytes(2**20))
    for _ in range(5):
        line.send(notices)
    got: list[bytes] = []

    def read() -> None:
        while not supervisor.is_at_end:
            got.extend(supervisor.receive())

    reader = threading.Thread(target=read)
    reader.start()
    line.close()
    reader.join()
    assert len(got) == 5


def heard(supervisor: FrameSocket) -> list[r.ToSupervisor]:
    return [r.decode_for_supervisor(payload) for payload in supervisor.receive()]


def test_heartbeats_are_sent_at_most_once_per_interval(ends, monkeypatch):
    line, supervisor = ends
    for _ in range(3):
        say(supervisor, r.LeaseProof(time.monotonic()))
        line.wait(10.0)
    assert heard(supervisor) == [r.ExperimentAlive()]
    monkeypatch.setattr(module, "ALIVE_EVERY_S", 0.0)
    say(supervisor, r.LeaseProof(time.monotonic()))
    line.wait(10.0)
    assert heard(supervisor) == [r.ExperimentAlive()]


def test_heartbeats_are_sent_during_a_pause_and_messages_do_not_shorten_it(ends):
    line, supervisor = ends
    say(supervisor, r.LeaseProof(time.monotonic()))
    say(supervisor, r.IpcRequest(1, r.StopOneTrial("a", "b")))
    began = time.monotonic()
    line.pause(0.2)
    assert time.monotonic() - began >= 0.2
    assert heard(supervisor) == [r.ExperimentAlive()]
    assert [message.id for message in line.take()] == [1]


def test_pause_is_not_shorter_after_the_supervisor_has_ended(ends):
    line, supervisor = ends
    supervisor.close()
    began = time.monotonic()
    line.pause(0.2)
    assert time.monotonic() - began >= 0.2
