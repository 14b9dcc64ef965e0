"""When the supervisor starts an experiment process, and what it sends to it."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.farms.farm_api_server import CODE
from tests.unit.scheduler.farm.ipc.test_supervisor_side import Nodes
from tunemq_scheduler.api.farm_answer_types import ExperimentDetail, ExperimentRow
from tunemq_scheduler.api.farm_answer_types import ExperimentState as State
from tunemq_scheduler.core.shared_amounts import OfferUsage
from tunemq_scheduler.farm.allocation.fair_share_allocator import FairShareAllocator
from tunemq_scheduler.farm.common.scheduler_exit_codes import EXIT_MUST_WAIT
from tunemq_scheduler.farm.farm_settings import FarmSettings
from tunemq_scheduler.farm.ipc import ipc_messages as r
from tunemq_scheduler.farm.ipc.nonblocking_frames import FrameSocket
from tunemq_scheduler.farm.ipc.supervisor_side import ExperimentConnection
from tunemq_scheduler.farm.service import running_experiments as experiments_module
from tunemq_scheduler.farm.service.experiment_files import ResultsFolders
from tunemq_scheduler.farm.service.experiment_queue import ExperimentQueue
from tunemq_scheduler.farm.service.queue_entry import QueueEntry
from tunemq_scheduler.farm.service.running_experiments import RunningExperiments
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.broker import redis_keys

_SEGFAULT = -11
ROW = ExperimentRow(name="x", id="1", owner="alice", priority=0, state=State.RUNNING, submitted=0.0)
#: The kernel assigns this pid to no process.
NO_SUCH_PID = 2**22 + 1


class Process:
    """A fake experiment process: it receives messages and ends when the test says so."""

    pid, watched = NO_SUCH_PID, -1

    def __init__(self, _folder: Path, sock: socket.socket, **_options: object) -> None:
        self.code: int | None = None
        self._frames = FrameSocket(sock)

    def say(self, message: r.ToSupervisor) -> None:
        self._frames.put(r.encode(message))
        self._frames.flush()

    def heard(self) -> list[r.ToExperiment]:
        return [r.decode_for_experiment(payload) for payload in self._frames.receive()]

    def returncode(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -9

    def abort(self) -> None:
        self.code = -signal.SIGABRT

    def close(self) -> None:
        self._frames.close()

    def last_output(self) -> str:
        return "its last words"


class Farm:
    """The experiments of a fake supervisor, in a folder."""

    def __init__(self, folder: Path, *, max_running: int = 8, timeout_s: float = 600.0) -> None:
        self.processes: list[Process] = []
        #: The error with which the start of a process fails; None where it succeeds.
        self.refusal: OSError | None = None
        #: The streams whose trials were ended.
        self.ended: list[str] = []
        #: The lines for people.
        self.told: list[str] = []
        self.allocator = FairShareAllocator(FarmSettings())
        self.queue = ExperimentQueue(folder / "experiments")
        self.experiments = RunningExperiments(
            folder,
            self.queue,
            self.allocator,
            self._start,
            end_trial_processes=self.ended.append,
            folders=ResultsFolders(folder, folder / "trash", str(folder)),
            max_running=max_running,
            pause_grace_s=30.0,
            unresponsive_after_s=timeout_s,
            notices=self.told.append,
        )

    def _start(self, entry: QueueEntry, _events_key: str) -> ExperimentConnection:
        job = r.ExperimentJob(name=entry.name, results="", code=entry.code, term=1, prefix=entry.id)
        return ExperimentConnection(job, Nodes(), folder=Path(), begin=self._begin)

    def _begin(self, folder: Path, sock: socket.socket, **options: object) -> Process:
        if self.refusal is not None:
            sock.close()
            raise ConfigError(f"no process: {self.refusal.strerror}.") from self.refusal
        self.processes.append(Process(folder, sock, **options))
        return self.processes[-1]

    def end(self) -> None:
        self.experiments.leave(0.0)
        for process in self.processes:
            process.kill()
        for connection in list(self.experiments.connections()):
            connection.attend()


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[Farm]:
    made = Farm(tmp_path)
    yield made
    made.end()


def _begin(farm: Farm) -> None:
    """Let the newest process of the search x begin."""
    farm.processes[-1].say(r.ExperimentAttached(redis_keys.events(farm.queue.get("x").id)))
    for connection in farm.experiments.connections():
        connection.on_readable()
    farm.experiments.turn()


def test_stop_of_an_experiment_whose_process_is_dead_does_not_wait_for_its_restart(farm):
    farm.queue.add("x", owner="alice", code=CODE)
    farm.experiments.turn()
    (first,) = farm.processes
    first.code = _SEGFAULT
    farm.experiments.turn()
    assert farm.experiments.next_due > 0.0  # it waits for its next process
    assert farm.processes == [first]

    farm.queue.move("x", State.STOPPING, "stopped by alice")
    farm.experiments.stop("x", "stopped by alice")
    assert farm.experiments.next_due == 0.0
    farm.experiments.turn()

    (_, second) = farm.processes
    farm.experiments.turn()  # flush the pending messages
    asked = [heard.request for heard in second.heard() if isinstance(heard, r.IpcRequest)]
    assert asked == [r.StopSearch("stopped by alice")]


def test_request_to_a_process_that_ends_meanwhile_is_answered_with_its_last_report(farm):
    farm.queue.add("x", owner="alice", code=CODE)
    farm.experiments.turn()
    (process,) = farm.processes
    asked = farm.experiments.detail("x", 10, ROW)
    assert asked.outcome is None
    last = ExperimentDetail(experiment=ROW, metric="loss", notes=("finished",))
    (entry,) = farm.queue.in_state(State.RUNNING)
    process.say(r.ExperimentAttached(redis_keys.events(entry.id)))
    process.say(r.SearchEnded("finished", detail=msgspec.msgpack.encode(last)))
    process.code = 0
    farm.experiments.turn()
    assert asked.outcome == last


def test_request_to_a_process_that_dies_silently_is_answered_without_its_trials(farm):
    farm.queue.add("x", owner="alice", code=CODE)
    farm.experiments.turn()
    shown = farm.experiments.detail("x", 10, ROW)
    stopped = farm.experiments.stop_trial("x", "a", "stopped by alice")
    farm.processes[0].code = _SEGFAULT
    farm.experiments.turn()
    assert shown.outcome == ExperimentDetail(experiment=ROW)
    assert stopped.outcome.text == (
        "the search did not answer: its process was killed by SIGSEGV (Segmentation fault);"
        " the last that it wrote:\nits last words."
    )


def test_search_that_never_began_fails_when_another_version_pickled_it(farm):
    farm.queue.add("x", owner="alice", code=CODE)
    farm.experiments.turn()
    farm.processes[0].code = EXIT_MUST_WAIT
    farm.experiments.turn()
    assert farm.queue.get("x").state is State.FAILED
    assert farm.queue.get("x").reason == "its last words"


def test_search_that_waited_for_another_version_no_longer_says_so_once_it_runs(farm):
    """The scheduler that noted it was of the other version, and has ended."""
    farm.queue.add("x", owner="alice", code=CODE)
    farm.experiments.turn()
    farm.queue.explain("x", "waits: install TuneMQ 0.1.1 again")
    farm.processes[0].say(r.ExperimentAttached(redis_keys.events(farm.queue.get("x").id)))
    for connection in farm.experiments.connections():
        connection.on_readable()
    farm.experiments.turn()
    assert farm.queue.get("x").reason == ""


@pytest.mark.parametrize(
    "has_ended", [False, True], ids=["its search continues", "its trials are done"]
)
def test_silent_process_is_ended(tmp_path, monkeypatch, has_ended):
    monkeypatch.setattr(experiments_module, "POLL_INTERVAL_S", 0.0)
    farm = Farm(tmp_path, timeout_s=0.05)
    farm.queue.add("hangs", owner="alice", code=CODE)
    farm.experiments.turn()
    (process,) = farm.processes
    process.say(r.ExperimentAttached(redis_keys.events(farm.queue.get("hangs").id)))
    if has_ended:
        process.say(r.SearchEnded("finished"))
    for connection in farm.experiments.connections():
        connection.on_readable()
    for _ in range(3):
        time.sleep(0.1)
        farm.experiments.beat(0.0)
    farm.experiments.turn()
    code, trouble = process.code, farm.experiments.trouble("hangs")
    assert farm.experiments.troubles() == ({} if has_ended else {"hangs": "silent"})
    farm.end()
    assert (code == -signal.SIGABRT) is not has_ended
    assert ("has not answered for" in trouble) is not has_ended


def test_silent_process_is_killed_a_grace_after_its_search_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(experiments_module, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(experiments_module, "_SILENT_S", 0.0)
    farm = Farm(tmp_path)
    farm.queue.add("hangs", owner="alice", code=CODE)
    farm.experiments.turn()
    (process,) = farm.processes
    process.say(r.ExperimentAttached(redis_keys.events(farm.queue.get("hangs").id)))
    for connection in farm.experiments.connections():
        connection.on_readable()
    farm.experiments.turn()
    trouble = farm.experiments.trouble("hangs")
    assert "it is ended and restarted in 600 s" in trouble
    assert "`tunemq stop hangs`" in trouble

    farm.queue.move("hangs", State.STOPPING, "stopped by alice")
    monkeypatch.setattr(experiments_module, "_END_GRACE_S", 0.05)
    farm.experiments.stop("hangs", "stopped by alice")
    assert "it is killed in 0 s" in farm.experiments.trouble("hangs")
    time.sleep(0.06)
    farm.experiments.turn()
    assert process.code == -signal.SIGKILL
    farm.experiments.turn()
    stopped = farm.queue.get("hangs")
    assert stopped.state is State.STOPPED
    assert "stopped by alice; its process did not end by itself, and was killed" in stopped.reason


def test_process_that_should_stop_is_killed_also_by_the_next_scheduler(farm, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    farm.queue.add("hangs", owner="alice", code=CODE)
    farm.queue.move("hangs", State.RUNNING)
    farm.queue.move("hangs", State.STOPPING, "stopped by alice")
    farm.experiments.take_up()
    now += 179.0
    farm.experiments.turn()
    (process,) = farm.processes
    assert process.code is None
    assert farm.experiments.stop_again("hangs") == "its process is killed in 1 s unless it ends"
    now += 2.0
    farm.experiments.turn()
    assert process.code == -signal.SIGKILL
    farm.experiments.turn()
    assert farm.queue.get("hangs").state is State.STOPPED


def test_search_that_cannot_start_after_a_restart_blocks_others_only_for_a_while(
    farm, tmp_path, monkeypatch
):
    """Its trials run on nodes, and only its process knows which slots they hold."""
    monkeypatch.setattr(experiments_module, "_RESTART_S", (0.0, 0.0))
    farm.queue.add("x", owner="alice", code=CODE)
    farm.experiments.turn()
    _begin(farm)
    farm.end()

    again = Farm(tmp_path)
    again.refusal = OSError(errno.EROFS, os.strerror(errno.EROFS))
    again.experiments.take_up()
    again.experiments.turn()
    assert again.allocator.waits_for("x")
    assert again.ended == []
    monkeypatch.setattr(experiments_module, "_REPORTS_WITHIN_S", 0.0)
    monkeypatch.setattr(experiments_module, "_FREED_AFTER_S", 0.0)
    again.experiments.turn()
    again.experiments.turn()
    assert again.ended == [redis_keys.events(farm.queue.get("x").id)]
    assert not again.allocator.waits_for("x")

    again.refusal = None
    again.experiments.turn()
    assert len(again.processes) == 1
    assert again.queue.get("x").state is State.RUNNING
    again.end()


@pytest.mark.parametrize("others", [True, False])
def test_search_that_does_not_report_for_long_keeps_no_slot_from_others(
    tmp_path, monkeypatch, others
):
    """After a take-over its process may bring files from the store for hours."""
    farm = Farm(tmp_path)
    for name in ("x", "y") if others else ("x",):
        farm.queue.add(name, owner="alice", code=CODE)
        farm.experiments.turn()
        key = redis_keys.events(farm.queue.get(name).id)
        farm.processes[-1].say(r.ExperimentAttached(key))
        for connection in farm.experiments.connections():
            connection.on_readable()
        farm.experiments.turn()
    farm.end()

    again = Farm(tmp_path)
    again.experiments.take_up()
    monkeypatch.setattr(experiments_module, "SUBMITTED_WITHIN_S", 0.0)
    monkeypatch.setattr(experiments_module, "_FREED_AFTER_S", 0.0)
    if others:
        again.processes[1].say(r.OfferUsageUpdate(OfferUsage()))
        for connection in again.experiments.connections():
            connection.on_readable()
    for _ in range(4):
        again.experiments.turn()
    assert again.allocator.waits_for("x") is not others
    assert again.ended == ([redis_keys.events(farm.queue.get("x").id)] if others else [])
    assert again.queue.get("x").state is State.RUNNING
    if others:
        assert any("has not said within 0 s which slots" in line for line in again.told)
        assert not again.allocator.waits_for("y")
    again.end()


def test_search_that_waits_for_another_version_for_long_does_not_fail(tmp_path, monkeypatch):
    farm = Farm(tmp_path)
    farm.queue.add("x", owner="alice", code=CODE)
    farm.experiments.turn()
    _begin(farm)
    farm.end()

    again = Farm(tmp_path)
    again.experiments.take_up()
    monkeypatch.setattr(experiments_module, "_REPORTS_WITHIN_S", 0.0)
    monkeypatch.setattr(experiments_module, "_FREED_AFTER_S", 0.0)
    monkeypatch.setattr(experiments_module, "_RESTART_S", (0.0, 0.0))
    for _ in range(20):
        again.experiments.turn()
        for process in again.processes:
            process.code = EXIT_MUST_WAIT
    assert len(again.processes) > 3
    assert again.ended == [redis_keys.events(farm.queue.get("x").id)]
    assert again.queue.get("x").state is State.RUNNING
    assert again.queue.get("x").reason == "waits: its last words"
    again.end()


def test_search_of_which_a_node_has_deleted_events_restarts_without_its_trial_processes(
    farm, monkeypatch
):
    monkeypatch.setattr(experiments_module, "_FREED_AFTER_S", 0.0)
    farm.queue.add("x", owner="alice", code=CODE)
    farm.experiments.turn()
    _begin(farm)
    (connection,) = farm.experiments.connections()
    connection._client.incomplete_node = "one"
    farm.experiments.turn()  # kill its process
    farm.experiments.turn()
    key = redis_keys.events(farm.queue.get("x").id)
    assert farm.ended == [key]
    assert "x: node one has deleted events that this search lacks" in farm.told[-1]
    assert key not in farm.experiments.streams.values(), "the next process begins another stream"
    farm.experiments.turn()
    assert len(farm.processes) == 2
    assert farm.queue.get("x").state is State.RUNNING
    _begin(farm)
    farm.experiments.turn()
    assert farm.ended == [key]


def test_search_that_keeps_withdrawn_slots_restarts_without_its_trial_processes(farm, monkeypatch):
    monkeypatch.setattr(experiments_module, "_FREED_AFTER_S", 0.0)
    farm.queue.add("x", owner="alice", code=CODE)
    farm.experiments.turn()
    _begin(farm)
    monkeypatch.setattr(farm.allocator, "overdue", lambda: {"x", "unknown"})
    farm.experiments.turn()
    monkeypatch.setattr(farm.allocator, "overdue", set)
    for _ in range(3):
        farm.experiments.turn()
    assert farm.ended == [redis_keys.events(farm.queue.get("x").id)]
    assert farm.told[-1].startswith("x: its process has kept slots for 900 s longer than")
    assert len(farm.processes) == 2
    assert farm.queue.get("x").state is State.RUNNING


def test_report_on_which_the_allocator_fails_ends_its_search_alone(farm, monkeypatch, capsys):
    for name in ("x", "other"):
        farm.queue.add(name, owner="alice", code=CODE)
    farm.experiments.turn()
    farm.processes[0].say(r.OfferUsageUpdate(OfferUsage({"n": 1})))

    def fail(_name: str, _usage: OfferUsage) -> None:
        raise ZeroDivisionError("of something")

    monkeypatch.setattr(farm.allocator, "usage", fail)
    for connection in farm.experiments.connections():
        connection.on_readable()
    for _ in range(3):
        farm.experiments.turn()
    assert farm.queue.get("x").state is State.FAILED
    assert "ZeroDivisionError: of something" in farm.queue.get("x").reason
    assert "Traceback" in capsys.readouterr().err
    assert farm.queue.get("other").state is State.RUNNING


def test_lost_search_that_is_not_submitted_blocks_others_only_for_a_while(farm, monkeypatch):
    """A machine was lost, and nodes may still run the trials of its searches."""
    monkeypatch.setattr(experiments_module, "_FREED_AFTER_S", 0.0)
    key = redis_keys.events("lost")
    farm.experiments.expect("lost", key, has_ended=False)
    farm.experiments.take_up()
    farm.experiments.turn()
    assert farm.allocator.waits_for("lost")
    assert farm.ended == []
    assert farm.told[0].startswith("lost must be submitted again: ")
    assert farm.experiments.troubles() == {"lost": "waiting"}
    now = time.monotonic() + experiments_module.SUBMITTED_WITHIN_S
    monkeypatch.setattr(time, "monotonic", lambda: now)
    farm.experiments.turn()
    assert farm.ended == [key]
    assert farm.told[1].startswith("lost was not submitted again within")
    assert not farm.allocator.waits_for("lost")
    assert (farm.experiments.streams, farm.experiments.troubles()) == ({}, {})

    farm.queue.add("lost", owner="alice", code=CODE)
    farm.experiments.turn()
    assert farm.queue.get("lost").state is State.RUNNING


def test_lost_search_that_is_submitted_in_time_keeps_its_trials(farm, monkeypatch):
    farm.experiments.expect("lost", redis_keys.events("lost"), has_ended=False)
    farm.experiments.take_up()
    farm.queue.add("lost", owner="alice", code=CODE)
    farm.experiments.turn()
    now = time.monotonic() + experiments_module.SUBMITTED_WITHIN_S
    monkeypatch.setattr(time, "monotonic", lambda: now)
    farm.experiments.turn()
    assert (farm.ended, len(farm.processes)) == ([], 1)
    assert farm.allocator.waits_for("lost"), "its process has not said what it holds"


def test_lost_search_that_had_ended_blocks_others_until_nodes_have_ended_what_they_kept(
    farm, monkeypatch
):
    key = redis_keys.events("lost")
    farm.experiments.expect("lost", key, has_ended=True)
    farm.experiments.take_up()
    assert farm.ended == [key]
    now = time.monotonic() + experiments_module._FREED_AFTER_S
    monkeypatch.setattr(time, "monotonic", lambda: now)
    farm.experiments.turn()
    assert not farm.allocator.waits_for("lost")


def test_search_stopped_by_a_user_is_not_preempted(tmp_path):
    farm = Farm(tmp_path, max_running=2)
    for name in ("stopped", "stays"):
        farm.queue.add(name, owner="alice", code=CODE, priority=int(name == "stays"))
    farm.experiments.turn()
    farm.queue.move("stopped", State.STOPPING, "stopped by alice")
    farm.experiments.stop("stopped", "stopped by alice")
    farm.queue.add("urgent", owner="alice", code=CODE, priority=2)
    farm.experiments.turn()
    ends = {one.name: one.because for one in farm.experiments._running.values()}
    farm.end()
    assert ends == {"stopped": "", "stays": "preempted by a higher priority", "urgent": ""}


def test_known_trials_are_not_replaced_by_those_of_a_process_that_knows_none(farm):
    farm.queue.add("x", owner="alice", code=CODE)
    farm.queue.count("x", {"TERMINATED": 2}, 2)
    farm.experiments.turn()
    (process,) = farm.processes
    process.say(r.SearchStatus(counts={"RUNNING": 0, "TERMINATED": 0}))
    for connection in farm.experiments.connections():
        connection.on_readable()
    assert farm.experiments.counts(farm.queue.get("x")) == ({"TERMINATED": 2}, 2)
    process.say(r.SearchEnded("finished"))
    process.code = 0
    farm.experiments.turn()
    assert farm.queue.get("x").state is State.FINISHED
    assert farm.experiments.counts(farm.queue.get("x")) == ({"TERMINATED": 2}, 2)


def test_search_that_sends_itself_signals_fails(farm, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    farm.queue.add("x", owner="alice", code=CODE)
    for number in range(5):
        farm.experiments.turn()
        process = farm.processes[number]
        process.say(r.ExperimentAttached(redis_keys.events(farm.queue.get("x").id)))
        process.say(r.SearchEnded("was interrupted", is_interrupted=True))
        for connection in farm.experiments.connections():
            connection.on_readable()
        process.code = 128 + signal.SIGTERM
        farm.experiments.turn()
        now += 31.0
    assert farm.queue.get("x").state is State.FAILED
    assert "died 5 times in a row: was interrupted" in farm.queue.get("x").reason


def test_search_that_dies_while_loading_fails_however_long_that_takes(farm, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    farm.queue.add("x", owner="alice", code=CODE)
    for _ in range(5):
        farm.experiments.turn()
        now += 100.0
        farm.processes[-1].code = _SEGFAULT
        farm.experiments.turn()
        now += 100.0
    assert "died 5 times in a row" in farm.queue.get("x").reason


def test_experiment_process_that_cannot_start_waits_longer_each_time_and_counts(farm, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    farm.queue.add("x", owner="alice", code=CODE)
    farm.experiments.turn()
    assert farm.experiments.troubles() == {}
    _begin(farm)
    now += 3600.0  # it ran without a failure for an hour
    farm.refusal = OSError(errno.EROFS, os.strerror(errno.EROFS))
    farm.processes[0].code = _SEGFAULT
    pauses = []
    for _ in range(9):
        farm.experiments.turn()
        pauses.append(farm.experiments.next_due - now)
        now = farm.experiments.next_due
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]
    trouble = farm.experiments.trouble("x")
    assert trouble.startswith("The process of x failed 9 times in a row: no process: Read-only")
    assert farm.experiments.troubles() == {"x": "failing"}

    farm.refusal = None
    farm.experiments.turn()
    assert farm.experiments.troubles() == {"x": "failing"}  # it may fail at once
    now += 61.0
    farm.experiments.turn()
    assert farm.experiments.troubles() == {"x": "failing"}  # its code is not loaded yet
    _begin(farm)
    now += 61.0
    farm.experiments.turn()
    assert farm.experiments.troubles() == {}
