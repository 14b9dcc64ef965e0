"""The queue of a farm: order, preemption, and that no work is lost."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.farms.farm_service import FarmService, Search, farm_service
from tests.support.saved_tuners import changed_tuner, saved_fields
from tests.support.waiting import eventually
from tunemq_scheduler.farm.service.experiment_queue import ExperimentQueue
from tunemq_scheduler.settings.saved_tuner import TUNER_FILE
from tunemq_shared.code.blob_store import open_blobs
from tunemq_shared.code.bundles import bundle
from tunemq_shared.protocol.farm_requests import ScriptCode

pytestmark = pytest.mark.faults

_CLASS = "work.chain_class()"


@pytest.fixture
def farm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FarmService]:
    """With the settings that the test names, and a worker with two cores."""
    with farm_service(tmp_path, settings=getattr(request, "param", "")) as farm:
        farm.add_worker("one", cpus=2)
        farm.has_nodes("one")
        yield farm


def _settings(text: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("farm", [text], indirect=True, ids=["with settings"])


def _continues(
    farm: FarmService, name: str, begun: int, last: int, until: Callable[[], bool]
) -> None:
    """Let the trials run step by step until the condition holds; they must not end before.

    The steps slow down, so that the remaining ones suffice on a slow machine.
    """
    step, pause, due = begun, 0.03, 0.0

    def is_so() -> bool:
        nonlocal step, pause, due
        if step < last and time.monotonic() >= due:
            step, due, pause = step + 1, time.monotonic() + pause, 1.025 * pause
            farm.open_gate(name, step)
        return until()

    eventually(is_so, within=90, every=0.03, message=lambda: str(farm))


def _has_ended(farm: FarmService, name: str) -> bool:
    return (row := farm.rows().get(name)) is not None and row.state == "FINISHED"


def _trials_of_one(farm: FarmService) -> int | None:
    """The number of trials that worker one runs; None while the farm does not report it."""
    return (row := farm.nodes().get("one")) and row.trials


def _repeated(steps: list[int]) -> int:
    return len(steps) - len(set(steps))


# --- order ----------------------------------------------------------------------------------------


@_settings("max_running = 1")
def test_highest_priority_runs_next_and_preempts_a_lower_one(farm):
    farm.submit(Search(name="first", trials=2, steps=200, trainable=_CLASS, has_gate=True))
    farm.open_gate("first", 2)
    farm.wait_for_steps("first", 2, 2)
    farm.submit(Search(name="later"))
    assert farm.rows()["later"].position == 0
    farm.submit(Search(name="urgent"), "--priority", "5")
    _continues(farm, "first", 2, 199, lambda: _has_ended(farm, "urgent"))

    urgent = farm.wait_for("urgent", "FINISHED")
    farm.open_gate("first", 200)
    later, first = farm.wait_for("later", "FINISHED"), farm.wait_for("first", "FINISHED")
    # The preempted experiment was submitted earlier than the waiting one.
    assert urgent.ended <= first.started < first.ended <= later.started
    for name in ("first", "later", "urgent"):
        farm.check_results(name)
        farm.check_steps(name)


@_settings("max_running = 2")
def test_owners_take_turns(farm):
    for name in ("ann1", "ann2"):
        farm.submit(Search(name=name, trials=1, steps=2, has_gate=True), "--owner", "ann")
        farm.wait_for(name, "RUNNING")
    for name, owner in (("ann3", "ann"), ("ben1", "ben")):
        farm.submit(Search(name=name, trials=1, steps=2), "--owner", owner)
    assert [farm.rows()[name].position for name in ("ann3", "ben1")] == [0, 1]

    farm.open_gate("ann1", 2)
    # Of ann's one runs still, of ben's none.
    farm.wait_for("ben1", "FINISHED")
    farm.wait_for("ann3", "FINISHED")
    rows = farm.rows()
    assert rows["ben1"].started < rows["ann3"].started
    farm.open_gate("ann2", 2)
    farm.wait_for("ann2", "FINISHED")


# --- giving way -----------------------------------------------------------------------------------


def test_preempted_trials_that_save_on_demand_repeat_no_step(farm):
    farm.submit(Search(name="low", trials=3, steps=200, trainable=_CLASS, has_gate=True))
    farm.open_gate("low", 5)
    farm.wait_for_steps("low", 2, 5)
    farm.submit(Search(name="high", trials=2, steps=20), "--priority", "10")
    _continues(farm, "low", 5, 199, lambda: _has_ended(farm, "high"))

    assert farm.rows()["low"].state == "RUNNING"
    farm.open_gate("low", 200)
    farm.wait_for("low", "FINISHED")
    for name in ("low", "high"):
        farm.check_results(name)
        farm.check_steps(name)
    rows = farm.json("show", "low")["trials"]
    assert sum(row["preemptions"] for row in rows) >= 2
    assert all(row["repeated"] == 0 for row in rows)
    assert "preempted" in farm.tunemq("show", "low")


def test_preempted_functions_stop_at_their_next_checkpoint_and_repeat_no_step(farm):
    farm.submit(Search(name="low", trials=2, steps=200, save_every=7, has_gate=True))
    farm.open_gate("low", 3)
    farm.wait_for_steps("low", 2, 3)
    farm.submit(Search(name="high", trials=2, steps=20), "--priority", "10")
    _continues(farm, "low", 3, 199, lambda: _has_ended(farm, "high"))

    farm.open_gate("low", 200)
    farm.wait_for("low", "FINISHED")
    for name in ("high", "low"):
        farm.check_results(name)
        farm.check_steps(name)
    assert sum(row["preemptions"] for row in farm.json("show", "low")["trials"]) >= 1


@_settings("preempt_grace_s = 1")
def test_preempted_trial_without_a_checkpoint_in_time_shows_its_repeated_steps(farm):
    farm.submit(Search(name="low", trials=2, steps=80, save_every=1000, has_gate=True))
    farm.open_gate("low", 10)
    farm.wait_for_steps("low", 2, 10)
    farm.submit(Search(name="high", trials=2, steps=5), "--priority", "10")

    farm.wait_for("high", "FINISHED")
    farm.open_gate("low", 80)
    farm.wait_for("low", "FINISHED")
    farm.check_results("low")
    done = farm.steps("low")
    assert all(_repeated(steps) > 0 for steps in done.values())
    rows = farm.json("show", "low")["trials"]
    for row in rows:
        repeated = _repeated(done[int(row["trial"].rpartition("_")[2])])
        # The trial may have been stopped before it reported the step.
        assert repeated - 1 <= row["repeated"] <= repeated
        assert row["preemptions"] == 1
    assert "repeated" in farm.tunemq("show", "low")


def test_paused_and_resumed_search_repeats_at_most_one_interval(farm):
    interval = 4
    farm.submit(Search(name="exp", trials=2, steps=200, save_every=interval, has_gate=True))
    farm.open_gate("exp", 6)
    farm.wait_for_steps("exp", 2, 6)

    farm.tunemq("pause", "exp")
    _continues(farm, "exp", 6, 199, lambda: _trials_of_one(farm) == 0)
    farm.open_gate("exp", 200)
    farm.tunemq("resume", "exp")
    farm.wait_for("exp", "FINISHED")

    farm.check_results("exp")
    for steps in farm.steps("exp").values():
        assert _repeated(steps) <= interval


# --- scheduler failures ---------------------------------------------------------------------------


@_settings("max_running = 2")
def test_killed_scheduler_keeps_its_queue_and_loses_and_repeats_nothing(farm):
    farm.add_worker("two", cpus=2)
    farm.has_nodes("two")
    for name in ("a", "b"):
        farm.submit(Search(name=name, trials=2, steps=30, save_every=10, has_gate=True))
        farm.open_gate(name, 10)
        farm.wait_for_steps(name, 2, 10)
    for name, priority in (("c", "0"), ("d", "0"), ("e", "-1")):
        search = Search(name=name, trials=2, steps=10)
        farm.submit(search, "--priority", priority)
    before = {name: row.position for name, row in farm.rows().items()}

    farm.kill_scheduler()
    for name in "ab":  # trials run without the scheduler
        farm.open_gate(name, 20)
        farm.wait_for_steps(name, 2, 20)
    farm.start_scheduler()
    eventually(farm.rows, within=60, message=lambda: str(farm))
    assert {name: row.position for name, row in farm.rows().items()} == before
    for name in "ab":
        farm.open_gate(name, 30)

    for name in "abcde":
        farm.wait_for(name, "FINISHED")
        farm.check_results(name)
        farm.check_steps(name)
    rows = farm.rows()
    assert max(rows[name].started for name in "cd") <= rows["e"].started


def _replace_version(farm: FarmService, name: str, version: str) -> str:
    """Write another version of TuneMQ into a search's saved tuner; the one before."""
    path = farm.results / name / TUNER_FILE
    content = path.read_bytes()
    path.write_bytes(changed_tuner(content, tunemq=version))
    return str(saved_fields(content)["tunemq"])


def test_search_of_another_version_waits_and_continues_when_that_version_is_back(farm):
    farm.submit(Search(name="exp", trials=2, steps=30, save_every=10, has_gate=True))
    farm.open_gate("exp", 10)
    farm.wait_for_steps("exp", 2, 10)

    farm.kill_scheduler()
    ours = _replace_version(farm, "exp", "0.0.9")
    farm.start_scheduler()

    eventually(
        lambda: (row := farm.rows().get("exp")) is not None and "TuneMQ 0.0.9" in row.reason,
        within=60,
        message=lambda: str(farm),
    )
    assert farm.rows()["exp"].state == "RUNNING"
    assert "waits: " in (why := farm.tunemq("why", "exp"))
    assert "Install TuneMQ 0.0.9 again" in why
    farm.open_gate("exp", 20)
    farm.wait_for_steps("exp", 2, 20)  # trials run on

    farm.kill_scheduler()
    _replace_version(farm, "exp", ours)
    farm.start_scheduler()
    farm.open_gate("exp", 30)
    assert "TuneMQ" not in farm.wait_for("exp", "FINISHED").reason
    farm.check_results("exp")
    farm.check_steps("exp")


def test_search_that_waits_for_another_version_can_be_stopped(farm):
    farm.submit(Search(name="exp", trials=2, steps=30, has_gate=True))
    farm.open_gate("exp", 5)
    farm.wait_for_steps("exp", 2, 5)
    farm.kill_scheduler()
    _replace_version(farm, "exp", "0.0.9")
    farm.start_scheduler()
    eventually(
        lambda: (row := farm.rows().get("exp")) is not None and "TuneMQ 0.0.9" in row.reason,
        within=60,
        message=lambda: str(farm),
    )

    farm.tunemq("stop", "exp")

    farm.wait_for("exp", "STOPPED", within=30)
    eventually(lambda: _trials_of_one(farm) == 0, within=60, message=lambda: str(farm))


@pytest.mark.timeout(400)
def test_thousand_waiting_searches_do_not_delay_an_urgent_one(tmp_path):
    with farm_service(tmp_path, settings="max_running = 2", starts=False) as farm:
        script = farm.write(Search(name="many", trials=1, steps=9999, step_s=0.1, trainable=_CLASS))
        farm.results.mkdir(parents=True)
        with open_blobs(str(farm.results)) as blobs:
            code = ScriptCode(bundle=bundle(script.parent, blobs), script=script.name)
        queue = ExperimentQueue(farm.results / ".farm" / "experiments")
        for number in range(1_000):
            queue.add(f"many_{number:04}", owner=f"owner{number % 7}", code=code)
        farm.start_scheduler()
        farm.add_worker("one", cpus=2)
        farm.has_nodes("one")
        eventually(lambda: _trials_of_one(farm) == 2, within=60, message=lambda: str(farm))

        farm.submit(Search(name="urgent", trials=1, steps=2), "--priority", "1")

        farm.wait_for("urgent", "FINISHED")
        farm.check_results("urgent")
        states = [row.state for name, row in farm.rows().items() if name != "urgent"]
        assert len(states) == 1_000
        assert set(states) <= {"QUEUED", "RUNNING"}


_FAILS = """
def fails(config):
    raise ValueError("as planned")
"""


def test_why_of_a_search_names_pauses_after_failures(farm):
    farm.submit(Search(name="fails", trials=2, trainable="fails", code=_FAILS))
    said: list[str] = []

    def is_named() -> bool:
        said[:] = farm.json("why", "fails")["lines"]
        return any(
            re.fullmatch(r"2 trials failed and are tried again in \d+ .*s", one) for one in said
        )

    eventually(is_named, within=60, every=0.2, message=lambda: f"{said}{farm}")
    farm.tunemq("stop", "fails")


def test_why_of_a_paused_search_names_trials_that_have_not_saved(farm):
    farm.submit(Search(name="stays", trials=2, has_gate=True))
    farm.open_gate("stays", 2)
    farm.wait_for_steps("stays", 2, 2)
    farm.tunemq("pause", "stays")
    trials = [one["trial"] for one in farm.json("show", "stays")["trials"]]
    said: list[str] = []

    def are_named() -> bool:
        said[:] = farm.json("why", "stays")["lines"]
        return any("have to save and give back their slots" in one for one in said)

    eventually(are_named, within=30, every=0.2, message=lambda: f"{said}{farm}")
    assert any("paused by" in one for one in said), said
    (line,) = (one for one in said if "give back their slots" in one)
    assert all(trial in line for trial in trials), (line, trials)
    farm.open_gate("stays", 10)
    eventually(lambda: "is PAUSED" in farm.tunemq("why", "stays"), within=60, every=0.2)


# --- damage ---------------------------------------------------------------------------------------


def test_search_whose_file_is_damaged_is_failed_until_the_file_is_put_back(farm):
    farm.submit(Search(name="search", trials=1, steps=20, has_gate=True))
    farm.open_gate("search", 5)
    farm.wait_for_steps("search", 1, 5)
    farm.kill_scheduler()
    path = farm.results / ".farm" / "experiments" / "search.json"
    whole, recorded = path.read_bytes(), farm.recorded("search")
    path.write_bytes(whole[:100])
    farm.start_scheduler()
    row = farm.wait_for("search", "FAILED")
    assert f"{path} is damaged" in row.reason
    assert "tunemq rm search" in row.reason
    assert row.reason in farm.said()
    resumed = farm.run("resume", "search")
    assert resumed.returncode == 1
    assert row.reason in resumed.stderr
    assert farm.recorded("search") == recorded
    assert path.read_bytes() == whole[:100]
    farm.kill_scheduler()
    path.write_bytes(whole)  # as it says
    farm.start_scheduler()
    farm.open_gate("search", 20)
    farm.wait_for("search", "FINISHED")
    farm.check_results("search")


# --- a scheduler without the farm's folder --------------------------------------------------------


def test_scheduler_in_an_unused_folder_does_not_end_the_searches_of_another_folder(farm):
    """For instance before the disk with the results is mounted."""
    farm.submit(Search(name="search", trials=2, steps=20, has_gate=True))
    farm.open_gate("search", 5)
    farm.wait_for_steps("search", 2, 5)
    farm.kill_scheduler()
    farm.start_scheduler("--results", str(farm.folder / "empty"))
    assert farm.scheduler.wait(60) == 64
    said = " ".join(farm.said().split())
    assert "was never used by a scheduler, and 1 searches of another folder run on" in said
    farm.start_scheduler()
    farm.open_gate("search", 20)
    eventually(lambda: _has_ended(farm, "search"), within=90, message=lambda: str(farm))
    assert all(not _repeated(steps) for steps in farm.steps("search").values())
    # Ended searches are no reason.
    farm.kill_scheduler()
    farm.start_scheduler("--results", str(farm.folder / "other"))
    farm.await_scheduler()
    assert farm.rows() == {}
