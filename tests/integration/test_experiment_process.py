"""An experiment in a separate process, on the supervisor's nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.integration.fake_node import FakeNode
from tests.integration.farm_support import is_alive
from tests.support.farms.farm_processes import SCRIPT, Farm, farms, m
from tests.support.farms.relay_supervisor import RelaySupervisor
from tests.support.waiting import eventually
from tunemq_scheduler.api.farm_answer_types import ExperimentDetail, RequestDone, RequestRejection
from tunemq_scheduler.farm.ipc import ipc_messages as r
from tunemq_scheduler.farm.ipc.experiment_processes import ERRORS, OUTPUT
from tunemq_scheduler.farm.ipc.supervisor_side import ExperimentOutcome
from tunemq_shared.base.failure_text import shortened
from tunemq_shared.code.blob_store import open_blobs
from tunemq_shared.code.bundles import bundle
from tunemq_shared.protocol.farm_requests import ScriptCode
from tunemq_shared.protocol.message_limits import LINE_CHARACTERS

pytestmark = pytest.mark.integration
_REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def farm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Farm]:
    monkeypatch.setenv("FARM_TEST_OPTIONS", str(tmp_path / "options.json"))
    monkeypatch.setenv("PYTHONPATH", str(_REPOSITORY))
    yield from farms(tmp_path)


@pytest.fixture
def supervisor(farm) -> Iterator[RelaySupervisor]:
    supervisor = RelaySupervisor(farm.redis.url)
    yield supervisor
    supervisor.close()


def job(farm: Farm, code: str = str(SCRIPT), **options: object) -> r.ExperimentJob:
    """A job for the search of ``farm_search.py`` with these options."""
    (farm.folder / "executed").mkdir(exist_ok=True)
    if "gate" in options:
        farm.open_gate(int(str(options["gate"])))
        options["gate"] = str(farm.folder / "gate")
    (farm.folder / "options.json").write_text(
        json.dumps({"executed": str(farm.folder / "executed"), **options})
    )
    farm.results.mkdir(exist_ok=True)
    with open_blobs(str(farm.results)) as blobs:
        packed = ScriptCode(bundle=bundle(Path(code), blobs), script=Path(code).name)
    return r.ExperimentJob(
        name="search",
        results=str(farm.results),
        code=packed,
        term=0,
        prefix="ab12c",
        folder_for_code=str(farm.folder / "code"),
    )


def script(farm: Farm, body: str) -> str:
    """Return a script whose search has a callback with this body of ``on_trial_result``."""
    path = farm.folder / "own.py"
    path.write_text(
        f"""
import ctypes, os, sys, time
import tunemq as tune

class Mine(tune.Callback):
    def on_trial_result(self, iteration, trials, trial, result, **info):
        {body}

def objective(config):
    for step in range(5):
        tune.report({{"score": step}})

tuner = tune.Tuner(
    objective,
    param_space={{"x": tune.grid_search([1, 2])}},
    run_config=tune.RunConfig(callbacks=[Mine()]),
)
"""
    )
    return str(path)


def test_a_search_runs_to_its_end_in_its_own_process(farm, supervisor):
    farm.worker("a")
    connection = supervisor.start(job(farm, trials=4, steps=5), farm.results / "search")
    process_exit = supervisor.ends()
    assert process_exit.outcome is ExperimentOutcome.FINISHED, process_exit
    farm.nothing_is_missing_or_doubled(4, 5)
    assert connection.status is not None
    assert connection.status.counts["TERMINATED"] == 4
    assert "search" in (farm.results / "search" / OUTPUT).read_text()
    eventually(lambda: not is_alive(connection.pid))


def test_search_starts_only_on_offered_slots_and_returns_revoked_ones(farm, supervisor):
    supervisor.is_stingy = True
    farm.worker("a")
    connection = supervisor.start(job(farm, trials=2, steps=20, gate=3), farm.results / "search")
    supervisor.until(
        lambda: connection.usage is not None and connection.usage.wants and connection.usage.seen
    )
    assert not connection.usage.held
    supervisor.is_stingy = False
    supervisor.until(lambda: connection.usage.held)
    supervisor.is_stingy = True
    farm.open_gate(
        19
    )  # they continue, and none of them ends before it has to give back what it has
    supervisor.until(lambda: not connection.usage.held)
    waits = supervisor.answer(r.ExplainTrial("ab12c_00001"))
    assert isinstance(waits, r.TrialExplanation)
    assert waits.request == {"cpu": 1.0}
    farm.open_gate(20)
    supervisor.is_stingy = False
    assert supervisor.ends().outcome is ExperimentOutcome.FINISHED
    farm.nothing_is_missing_or_doubled(2, 20)


def test_callback_that_segfaults_ends_its_process_and_is_named(farm, supervisor):
    farm.worker("a")
    left = farm.folder / "left"
    sleeps = (
        f"open({str(left)!r}, 'w').write(str(os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '999')))"
    )
    path = script(farm, f"{sleeps}; ctypes.string_at(0)")
    supervisor.start(job(farm, path), farm.results / "search")
    process_exit = supervisor.ends()
    assert process_exit.outcome is ExperimentOutcome.DIED
    assert "SIGSEGV" in process_exit.text
    assert "on_trial_result" in process_exit.text  # where it was
    eventually(lambda: not is_alive(int(left.read_text())))  # nothing of it is left


def test_a_callback_finds_no_key_of_the_farm_and_no_descriptor_but_its_own(
    farm, supervisor, monkeypatch
):
    monkeypatch.setenv("TUNEMQ_REDIS", "redis://:secret@nowhere/0")
    farm.worker("a")
    seen = farm.folder / "seen"
    body = f"open({str(seen)!r}, 'w').write(repr((dict(os.environ), os.listdir('/proc/self/fd'))))"
    supervisor.start(job(farm, script(farm, body)), farm.results / "search")
    assert supervisor.ends().outcome is ExperimentOutcome.FINISHED
    assert "secret" not in seen.read_text()
    assert "HOME" in seen.read_text()


def test_a_process_that_raises_says_why_and_the_search_is_not_started_again(farm, supervisor):
    farm.worker("a")
    path = script(farm, "raise RuntimeError('no such day')")
    supervisor.start(job(farm, path), farm.results / "search")
    process_exit = supervisor.ends()
    assert process_exit.outcome is ExperimentOutcome.FAILED
    assert "no such day" in process_exit.text


def test_killed_search_process_is_replaced_and_no_step_is_repeated(farm, supervisor):
    farm.worker("a")
    wanted = job(farm, trials=2, steps=30, gate=5)
    connection = supervisor.start(wanted, farm.results / "search")
    supervisor.until(lambda: sum(len(done) >= 5 for done in farm.steps().values()) == 2)
    os.kill(connection.pid, signal.SIGKILL)
    process_exit = supervisor.ends()
    assert process_exit.outcome is ExperimentOutcome.DIED
    assert "SIGKILL" in process_exit.text
    farm.open_gate(12)  # trials continue
    supervisor.until(lambda: sum(len(done) >= 12 for done in farm.steps().values()) == 2)
    again = msgspec.structs.replace(wanted, events_key=connection.events_key)
    supervisor.start(again, farm.results / "search")
    farm.open_gate(30)
    assert supervisor.ends().outcome is ExperimentOutcome.FINISHED
    farm.nothing_is_missing_or_doubled(2, 30)
    assert all(steps == list(range(1, 31)) for steps in farm.steps().values())


def test_search_continues_when_its_forkserver_is_killed(farm, supervisor):
    farm.worker("a")
    wanted = job(farm, trials=2, steps=20, gate=5)
    connection = supervisor.start(wanted, farm.results / "search")
    supervisor.until(lambda: sum(len(done) >= 5 for done in farm.steps().values()) == 2)
    forkserver = psutil.Process(connection.pid).ppid()
    assert forkserver != os.getpid()
    os.kill(forkserver, signal.SIGKILL)
    process_exit = supervisor.ends()
    assert process_exit.outcome is ExperimentOutcome.LEFT  # the search itself has no fault
    assert "SIGKILL" in process_exit.text
    farm.open_gate(20)
    again = msgspec.structs.replace(wanted, events_key=connection.events_key)
    supervisor.start(again, farm.results / "search")
    assert supervisor.ends().outcome is ExperimentOutcome.FINISHED
    farm.nothing_is_missing_or_doubled(2, 20)
    assert all(steps == list(range(1, 21)) for steps in farm.steps().values())


def test_killed_supervisor_is_replaced_and_no_step_is_repeated(farm):
    farm.worker("a")
    path = farm.folder / "job.json"
    path.write_bytes(msgspec.json.encode(job(farm, trials=2, steps=30, gate=5)))
    line = [sys.executable, "-m", "tests.support.farms.relay_supervisor", farm.redis.url, str(path)]
    line += [str(farm.results / "search")]
    first = subprocess.Popen(line, cwd=_REPOSITORY)
    farm.wait_for_steps(2, 5)
    first.kill()
    first.wait()
    farm.open_gate(12)
    farm.wait_for_steps(2, 12)
    second = subprocess.Popen(line, cwd=_REPOSITORY, stdout=subprocess.PIPE)
    farm.open_gate(30)
    said, _ = second.communicate(timeout=150)
    assert b"FINISHED" in said
    farm.nothing_is_missing_or_doubled(2, 30)
    assert all(steps == list(range(1, 31)) for steps in farm.steps().values())
    assert not farm.all_of(m.TrialProcessDied)


def test_requests_are_answered_while_it_runs(farm, supervisor):
    farm.worker("a")
    connection = supervisor.start(job(farm, trials=2, steps=20, gate=2), farm.results / "search")
    supervisor.until(lambda: sum(len(done) >= 2 for done in farm.steps().values()) == 2)
    detail = supervisor.answer(r.ShowTrials(1))
    assert isinstance(detail, ExperimentDetail)
    assert [row.status for row in detail.trials] == ["RUNNING"]
    assert detail.hidden == 1
    runs = supervisor.answer(r.ExplainTrial("ab12c_00001"))
    assert isinstance(runs, r.TrialExplanation)
    assert not runs.request
    assert isinstance(supervisor.answer(r.StopOneTrial("ab12c_00000", "enough")), RequestDone)
    assert isinstance(supervisor.answer(r.ExplainTrial("nobody")), RequestRejection)
    assert isinstance(supervisor.answer(r.RetryTrial("ab12c_00001")), RequestRejection)
    answer = supervisor.answer(r.StopSearch("a person wants it to"))
    assert isinstance(answer, RequestDone), f"{answer} {supervisor.told()}"
    farm.open_gate(20)
    assert supervisor.ends().outcome is ExperimentOutcome.FINISHED
    assert "a person wants it to" in connection.process_exit.text


def test_an_interrupted_search_is_resumed_by_its_next_process(farm, supervisor):
    farm.worker("a")
    wanted = job(farm, trials=2, steps=10, save_every=1, gate=4)
    connection = supervisor.start(wanted, farm.results / "search")
    supervisor.until(lambda: sum(len(done) >= 4 for done in farm.steps().values()) == 2)
    connection.stop(r.InterruptSearch("pause"), grace_s=100.0)
    assert supervisor.ends(within=90.0).outcome is ExperimentOutcome.INTERRUPTED
    farm.open_gate(10)
    supervisor.start(wanted, farm.results / "search")
    assert supervisor.ends().outcome is ExperimentOutcome.FINISHED
    farm.nothing_is_missing_or_doubled(2, 10)


def test_exception_of_an_unusable_script_is_reported(farm, supervisor):
    path = farm.folder / "broken.py"
    path.write_text("import no_such_module_of_mine\n")
    supervisor.start(job(farm, str(path)), farm.results / "search")
    process_exit = supervisor.ends()
    assert process_exit.outcome is ExperimentOutcome.FAILED
    assert "no_such_module_of_mine" in process_exit.text
    assert "no_such_module_of_mine" in (farm.results / "search" / ERRORS).read_text()


def test_a_trial_in_error_is_tried_again_while_the_search_runs(farm, supervisor):
    farm.worker("a")
    path = farm.folder / "own.py"
    path.write_text(
        f"""
import os, time
import tunemq as tune

def objective(config):
    if config["x"] == 1 and not os.path.exists({str(farm.folder / "fixed")!r}):
        raise ValueError("broken")
    while config["x"] == 2 and not os.path.exists({str(farm.folder / "fixed")!r}):
        time.sleep(0.05)
    tune.report({{"score": 1}})

tuner = tune.Tuner(objective, param_space={{"x": tune.grid_search([1, 2])}})
"""
    )
    connection = supervisor.start(job(farm, str(path)), farm.results / "search")
    supervisor.until(lambda: connection.status is not None and connection.status.counts["ERROR"])
    (farm.folder / "fixed").touch()
    assert isinstance(supervisor.answer(r.RetryTrial("ab12c_00000")), RequestDone)
    assert supervisor.ends().outcome is ExperimentOutcome.FINISHED
    assert connection.status is not None
    assert connection.status.counts["TERMINATED"] == 2
    # The next process of a finished search does it, too: once, however often it starts.
    (farm.folder / "fixed").unlink()
    again = msgspec.structs.replace(job(farm, str(path)), name="other", prefix="cd34e")
    connection = supervisor.start(again, farm.results / "other")
    supervisor.until(lambda: connection.status is not None and connection.status.counts["ERROR"])
    (farm.folder / "fixed").touch()
    assert supervisor.ends().outcome is ExperimentOutcome.FINISHED
    retried = msgspec.structs.replace(again, retry="cd34e_00000")
    for _ in range(2):
        supervisor.start(retried, farm.results / "other")
        assert supervisor.ends().outcome is ExperimentOutcome.FINISHED
    results = sorted((farm.results / "other").glob("*/result.json"))
    assert [len(result.read_text().splitlines()) for result in results] == [1, 1]


def test_experiment_that_does_not_read_is_throttled_and_gets_all_events_later(farm, supervisor):
    farm.worker("a")
    connection = supervisor.start(
        job(farm, trials=2, steps=40, gate=5, payload=10), farm.results / "search"
    )
    supervisor.until(lambda: sum(len(done) >= 5 for done in farm.steps().values()) == 2)
    os.kill(connection.pid, signal.SIGSTOP)
    client = connection._client
    assert client is not None
    warned = m.NodeWarned("x" * 2**20)
    client.read_events += [warned] * 10
    connection.attend()
    held = connection._frames.waiting
    client.read_events += [warned] * 30
    connection.attend()
    assert client.is_full
    assert connection._frames.waiting == held
    began, turns = time.monotonic(), 0
    while time.monotonic() < began + 0.4:
        supervisor.turn(0.2)  # the full channel delays no turn, and turns do not spin
        turns += 1
    assert turns < 40
    assert time.monotonic() < began + 30.0
    os.kill(connection.pid, signal.SIGCONT)
    supervisor.until(lambda: client.given >= 40)
    farm.open_gate(40)
    assert supervisor.ends().outcome is ExperimentOutcome.FINISHED
    farm.nothing_is_missing_or_doubled(2, 40)
    told = shortened(warned.text, LINE_CHARACTERS)
    assert sum(line == told for line in connection.take_notices()) == 40


def test_search_process_that_sends_forbidden_messages_is_killed_alone(farm, supervisor):
    farm.worker("a")
    body = "[os.write(n, b'x' * 99) for n in range(3, 4096) if 'socket' in os.path.realpath(f'/proc/self/fd/{n}')]"  # noqa: E501
    connection = supervisor.start(job(farm, script(farm, body)), farm.results / "search")
    process_exit = supervisor.ends()
    assert process_exit.outcome is ExperimentOutcome.FAILED
    assert "cannot be read" in process_exit.text
    supervisor.transport.add(connection.events_key).close()  # it is not started again
    (farm.results / "search").rename(farm.results / "before")
    other = msgspec.structs.replace(job(farm, trials=2, steps=5), prefix="cd34e")
    supervisor.start(other, farm.results / "search")
    assert supervisor.ends().outcome is ExperimentOutcome.FINISHED


def test_malformed_events_fail_their_search_and_not_the_node(farm, supervisor):
    farm.worker("a")
    wanted = job(farm, trials=2, steps=30, gate=5)
    connection = supervisor.start(wanted, farm.results / "search")
    supervisor.until(lambda: sum(len(done) >= 5 for done in farm.steps().values()) == 2)
    (node,) = supervisor.nodes
    forger = FakeNode(farm.redis.url, node)  # sends the next message in the node's name
    next_event = connection._client.cursors[node].read + 1
    assert forger.send(connection.events_key, ["result", "t", "one"], first=next_event)
    forger.close()
    process_exit = supervisor.ends()
    assert process_exit.outcome is ExperimentOutcome.FAILED
    assert f"of node {node} cannot be read" in process_exit.text
    supervisor.transport.add(connection.events_key).close()  # it is not started again
    (farm.results / "search").rename(farm.results / "before")
    farm.open_gate(30)
    other = msgspec.structs.replace(job(farm, trials=2, steps=5), prefix="cd34e")
    supervisor.start(other, farm.results / "search")
    assert supervisor.ends().outcome is ExperimentOutcome.FINISHED
    assert list(supervisor.nodes) == [node], "the node continued"
