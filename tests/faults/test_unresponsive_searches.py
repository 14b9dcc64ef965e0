"""A farm's searches whose own code never returns: the farm shows, ends and stops them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.farms.farm_service import FarmService, Search, farm_service
from tests.support.waiting import eventually

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
def test_search_whose_callback_hangs_gives_way_and_fails_after_three_times(farm: FarmService):
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
def test_search_whose_callback_hangs_fails_although_nobody_waits_for_its_slots(farm: FarmService):
    farm.submit(Search(name="hangs", trials=1, steps=500, code=HANGS, run="callbacks=[Hangs()],"))
    hangs = farm.wait_for("hangs", "FAILED")
    assert "its own code did not return for 4 s, 3 times" in hangs.reason


@_settings("unresponsive_after_s = 20")
def test_search_whose_callback_hangs_says_what_to_do_and_stops_when_asked_to(farm: FarmService):
    farm.submit(Search(name="hangs", trials=1, steps=500, code=HANGS, run="callbacks=[Hangs()],"))
    eventually(lambda: "has not answered for" in farm.rows()["hangs"].trouble, within=60)
    why = farm.tunemq("why", "hangs")
    assert "has not returned" in why
    assert "it is ended and started again in" in why
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
def test_search_that_is_over_ends_although_its_process_does_not(
    farm: FarmService, code: str, named: str
):
    farm.submit(Search(name="stays", trials=1, code=code))
    farm.submit(Search(name="next", trials=1))
    stays = farm.wait_for("stays", "FINISHED")
    assert f"its process was killed: {named} had not ended 4 s after it" in stays.reason
    farm.wait_for("next", "FINISHED")
    farm.check_results("stays")
    farm.check_results("next")
