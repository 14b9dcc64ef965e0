"""A farm's scheduler is killed at each step of a request; the client still gets its answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.integration.farm_support import RedisServer
from tests.integration.node_fixtures import server
from tests.support.farms.farm_api_server import CODE, ServedApi
from tests.support.waiting import eventually
from tunemq_scheduler.api import farm_answer_types as a
from tunemq_scheduler.api.farm_client import FarmClient
from tunemq_scheduler.farm.service.experiment_queue import ExperimentQueue
from tunemq_shared.base.failpoints import VARIABLE
from tunemq_shared.protocol import farm_requests as r

__all__ = ["server"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]

_REPOSITORY = Path(__file__).parents[2]
_SERVE = """
import sys, threading
from pathlib import Path
from tests.support.farms.farm_api_server import ServedApi
with ServedApi(sys.argv[1], Path(sys.argv[2])) as api:
    print("serves", flush=True)
    sys.stdin.read()
"""

#: By the kind of request that comes there.
OF_SUBMISSIONS = (
    "requests.after_taken",
    "queue.before_rename",
    "queue.after_rename",
    "requests.after_done",
    "requests.after_record",
)
OF_REMOVALS = ("queue.before_removal", "queue.after_removal")
OF_REQUESTS = (*OF_SUBMISSIONS, *OF_REMOVALS)


class Scheduler:
    """A process that answers requests."""

    def __init__(self, url: str, folder: Path, failpoint: str = "") -> None:
        command = [sys.executable, "-c", _SERVE, url, str(folder)]
        environ = {**os.environ, VARIABLE: f"{failpoint}=kill" if failpoint else ""}
        self.process = subprocess.Popen(
            command, cwd=_REPOSITORY, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"serves\n"

    def end(self) -> None:
        """End it, unless it was killed."""
        self.process.communicate(timeout=60)


def ask_across_a_kill(server: RedisServer, folder: Path, failpoint: str, request, answer):
    """Kill the first scheduler of a request at a failpoint; return the answer of the second one."""
    announced = ServedApi(server.url, folder / "nobody")  # only announces a scheduler
    announced.folder = folder
    announced.announce(server.client)
    first = Scheduler(server.url, folder, failpoint)
    found: list[a.FarmAnswer | BaseException] = []

    def ask() -> None:
        try:
            with FarmClient(server.url, owner="ann") as client:
                found.append(client.ask(request, answer))
        except BaseException as error:  # noqa: BLE001  looked at below
            found.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    eventually(lambda: first.process.poll() is not None)
    assert first.process.returncode == -signal.SIGKILL
    first.end()
    second = Scheduler(server.url, folder)
    asking.join(60)
    second.end()
    (outcome,) = found
    return outcome


@pytest.mark.parametrize("failpoint", OF_SUBMISSIONS)
def test_a_submission_is_queued_once_whenever_the_scheduler_dies(server, tmp_path, failpoint):
    request = r.SubmitExperiment(name="exp", code=CODE, is_made_up=True)

    outcome = ask_across_a_kill(server, tmp_path, failpoint, request, a.ExperimentSubmitted)

    assert outcome.name == "exp"
    queue = ExperimentQueue(tmp_path / ".farm" / "experiments")
    assert [entry.name for entry in queue.all()] == ["exp"]
    assert queue.damaged == []
    assert not list((tmp_path / ".farm" / "experiments").glob("*.new"))


@pytest.mark.parametrize("failpoint", OF_REMOVALS)
def test_an_experiment_is_removed_whenever_the_scheduler_dies(server, tmp_path, failpoint):
    queue = ExperimentQueue(tmp_path / ".farm" / "experiments")
    queue.add("exp", owner="ann", code=CODE)
    queue.move("exp", a.ExperimentState.STOPPED)

    outcome = ask_across_a_kill(
        server, tmp_path, failpoint, r.RemoveExperiment(name="exp"), a.RequestDone
    )

    # If the request took effect before the kill, the next scheduler finds no experiment.
    assert isinstance(outcome, a.RequestDone) or "the experiment 'exp' does not exist" in str(
        outcome
    )
    assert ExperimentQueue(tmp_path / ".farm" / "experiments").all() == []
