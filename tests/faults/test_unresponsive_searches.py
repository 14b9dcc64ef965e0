"""A farm's searches whose own code never returns: the farm shows, ends and stops them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.farms.farm_service import FarmService, Search, farm_service
from tests.support.waiting import eventually
from tunemq_scheduler.api import farm_answer_types as a
from tunemq_scheduler.api.farm_client import FarmClient
from tunemq_scheduler.storage.last_run import read_record
from tunemq_shared.protocol import farm_requests as r
from tunemq_shared.protocol.messages import BlobRef

pytestmark = [pytest.mark.faults, pytest.mark.integration]

#: Hangs at the third result of each process of the search.
HANGS = """
import time

class Hangs(tune.Callback):
    results = 0

    def on_trial_result(self, iteration, trials, trial, result, **info):
        self.results += 1
        if self.results == 3:
            time.sleep(3600)
"""
#: Its script does not return when it is loaded.
HANGS_AT_ONCE = """
import time
time.sleep(3600)
"""
#: Its last callback waits for a file.
ENDS_LATER = """
import os, time

class EndsLater(tune.Callback):
    def on_experiment_end(self, trials, **info):
        while not os.path.exists({gate!r}):
            time.sleep(0.05)
"""
LEAVES_A_THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(3600,), name="upload-1").start()
"""
LEAVES_AN_EXIT_HANDLER = """
import atexit, time
atexit.register(time.sleep, 3600)
"""


@pytest.fixture
def farm(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FarmService]:
    with farm_service(tmp_path, settings=getattr(request, "param", "")) as farm:
        farm.add_worker("one", 1)
        yield farm


def _settings(text: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("farm", [text], indirect=True, ids=["with settings"])


@_settings("preempt_grace_s = 1\nunresponsive_after_s = 4")
def test_search_whose_callback_hangs_is_preempted_and_fails_after_three_times(farm: FarmService):
    farm.submit(Search(name="hangs", trials=1, steps=500, code=HANGS, run="callbacks=[Hangs()],"))
    farm.wait_for_steps("hangs", 1, 3)
    for number in range(3):
        name = f"waits-{number}"
        farm.submit(Search(name=name, trials=1), "--priority", "5" if number else "0")
        farm.wait_for(name, "FINISHED")
    hangs = farm.wait_for("hangs", "FAILED")
    assert "its own code did not return for 4 s, 3 times" in hangs.reason
    assert "on_trial_result" in hangs.reason  # where it hung
    assert "the process of hangs has not answered" in farm.said()
    for number in range(3):
        farm.check_results(f"waits-{number}")


@_settings("unresponsive_after_s = 4")
def test_search_whose_callback_hangs_fails_even_with_free_slots(farm: FarmService):
    farm.submit(Search(name="hangs", trials=1, steps=500, code=HANGS, run="callbacks=[Hangs()],"))
    hangs = farm.wait_for("hangs", "FAILED")
    assert "its own code did not return for 4 s, 3 times" in hangs.reason


@_settings("unresponsive_after_s = 20")
def test_search_whose_callback_hangs_says_what_to_do_and_stops_when_asked_to(farm: FarmService):
    farm.submit(Search(name="hangs", trials=1, steps=500, code=HANGS, run="callbacks=[Hangs()],"))
    eventually(lambda: "has not answered for" in farm.rows()["hangs"].trouble, within=60)
    why = farm.tunemq("why", "hangs")
    assert "has not returned" in why
    assert "it is ended and restarted in" in why
    assert "tunemq stop hangs" in why
    assert "has not answered for" in farm.tunemq("ls")
    assert "it is killed in 30 s" in farm.tunemq("stop", "hangs")
    stopped = farm.wait_for("hangs", "STOPPED", within=60)
    assert "stopped by" in stopped.reason
    farm.submit(Search(name="next", trials=1))
    farm.wait_for("next", "FINISHED")  # in the slot of the trial that was stopped


@pytest.mark.parametrize(
    ("code", "named"),
    [
        (LEAVES_A_THREAD, "the threads upload-1"),
        (LEAVES_AN_EXIT_HANDLER, "an exit handler (atexit)"),
    ],
    ids=["a thread", "an exit handler"],
)
@_settings("max_running = 1\nunresponsive_after_s = 4")
def test_finished_search_ends_although_its_process_hangs(farm: FarmService, code: str, named: str):
    farm.submit(Search(name="stays", trials=1, code=code))
    farm.submit(Search(name="next", trials=1))
    stays = farm.wait_for("stays", "FINISHED")
    assert f"its process was killed: {named} had not ended 4 s after it" in stays.reason
    farm.wait_for("next", "FINISHED")
    farm.check_results("stays")
    farm.check_results("next")


@_settings("max_running = 1\nunresponsive_after_s = 6")
def test_search_whose_script_does_not_return_fails_and_notifies_waiting_clients(
    farm: FarmService,
):
    farm.submit(Search(name="hangs", trials=1, code=HANGS_AT_ONCE))
    farm.submit(Search(name="next", trials=1))
    eventually(lambda: "has not answered for" in farm.rows()["hangs"].trouble, within=60)
    assert "its script, what that imports, or the setup" in farm.tunemq("why", "hangs")
    assert "all places (max_running = 1) are taken by hangs (does not answer)" in farm.tunemq(
        "why", "next"
    )
    hangs = farm.wait_for("hangs", "FAILED")
    assert "its own code did not return for 6 s, 3 times" in hangs.reason
    assert "search.py" in hangs.reason  # where it hung
    farm.wait_for("next", "FINISHED")


@_settings("unresponsive_after_s = 30")
def test_hanging_search_stops_despite_a_scheduler_restart(
    farm: FarmService,
):
    farm.submit(Search(name="hangs", trials=1, code=HANGS_AT_ONCE))
    farm.wait_for("hangs", "RUNNING")
    farm.tunemq("stop", "hangs")
    farm.kill_scheduler()
    farm.start_scheduler()
    eventually(lambda: "it is killed in" in farm.rows()["hangs"].trouble, within=60)
    assert "is killed now" in farm.tunemq("stop", "hangs")
    assert "stopped by" in farm.wait_for("hangs", "STOPPED", within=60).reason
    farm.tunemq("rm", "hangs", "--yes")


@pytest.mark.parametrize("kind", ["pickled Tuner", "bundle"])
def test_search_whose_code_is_no_file_fails(farm: FarmService, kind: str):
    path = farm.folder / "blobs" / ("0" * 64)
    path.parent.mkdir()
    os.mkfifo(path)
    ref = BlobRef(sha256="0" * 64, size=0, path=str(path))
    pickled = kind == "pickled Tuner"
    code = r.PickledCode(tuner=ref) if pickled else r.ScriptCode(bundle=ref, script="a.py")
    farm.has_nodes("one")
    with FarmClient(farm.url) as client:
        client.ask(r.SubmitExperiment(name="odd", code=code), a.ExperimentSubmitted)
    assert "no regular file" in farm.wait_for("odd", "FAILED", within=60).reason


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "ended"])
def test_search_that_ends_while_the_scheduler_is_away_keeps_its_trials(
    farm: FarmService, is_killed: bool
):
    gate = str(farm.folder / "ends")
    code = ENDS_LATER.format(gate=gate)
    farm.submit(Search(name="ends", trials=2, code=code, run="callbacks=[EndsLater()],"))
    eventually(lambda: farm.rows()["ends"].trials.get("TERMINATED") == 2, within=90)
    folder = str(farm.results / "ends")
    eventually(lambda: (record := read_record(folder)) and record.is_over, within=60)
    if is_killed:
        farm.kill_scheduler()
    else:
        farm.scheduler.terminate()
        farm.scheduler.wait()
    farm.start_scheduler()
    ends = farm.wait_for("ends", "FINISHED")
    assert ends.trials["TERMINATED"] == 2
    shown = farm.json("show", "ends")
    assert [row["status"] for row in shown["trials"]] == ["TERMINATED"] * 2
