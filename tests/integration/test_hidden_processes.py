"""A farm's processes on machines whose ``/proc`` hides processes (hidepid=, ProtectProc=)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.integration.farm_support import is_alive
from tests.support.farms.farm_processes import TcpRedis
from tests.support.farms.farm_service import FarmService, Here, Search
from tests.support.hidden_processes import hiding
from tests.support.other_users import NOBODY, open_folder, reachable
from tests.support.waiting import eventually
from tunemq_scheduler.farm.common.scheduler_exit_codes import EXIT_SUPERSEDED

__all__ = ["open_folder"]

pytestmark = pytest.mark.integration

HIDING = ["noaccess", "invisible", "ptraceable"]


class HidingFarm(FarmService):
    """A farm of a user without root rights, on machines whose ``/proc`` hides processes."""

    def __init__(self, folder: Path, url: str, hidepid: str) -> None:
        self.hiding = hiding(hidepid)
        as_user = reachable(NOBODY)
        super().__init__(folder, url, head=Here([*self.hiding, *as_user]), laptop=Here(as_user))
        _give(folder, folder / "head", folder / "laptop")

    def add_worker(
        self, name: str, cpus: int = 2, *more: str, before: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """Start a worker, as the farm's user unless ``before`` says otherwise."""
        home = self.folder / name
        home.mkdir()
        _give(home)
        more = ("--workdir", str(home / "node"), *more)
        machine = Here([*self.hiding, *(before or reachable(NOBODY))])
        return super().add_worker(name, cpus, *more, machine=machine)

    def submit(self, search: Search, *more: str) -> None:
        """Submit a search."""
        # The code is passed as a folder, so the submitter is the scheduler's user, too.
        line = ["submit", str(self.write(search)), "--name", search.name, "--detach", *more]
        executed = self.folder / "executed"
        _give(executed, executed / search.name)
        log = self.folder / "laptop" / "submit.log"
        self.await_scheduler()
        asking = self.laptop.start(self.command(*line), self.environ("laptop"), log)
        assert asking.wait(60) == 0, log.read_text()


def _give(*paths: Path) -> None:
    for path in paths:
        os.chown(path, NOBODY, NOBODY)


@pytest.fixture(params=HIDING)
def farm(request, open_folder: Path, tmp_path: Path) -> Iterator[HidingFarm]:
    redis = TcpRedis(tmp_path)
    try:
        farm = HidingFarm(open_folder, redis.url, request.param)  # may skip the test
        yield farm
        farm.close()
    finally:
        redis.end()


def test_scheduler_that_does_not_see_its_forkserver_starts_each_search_once(farm):
    farm.start_scheduler()
    farm.add_worker("one")
    farm.has_nodes("one")
    names = [f"search-{number}" for number in range(4)]
    for name in names:
        farm.submit(Search(name=name, trials=1, steps=2))
    for name in names:
        farm.wait_for(name, "FINISHED")
    assert "is restarted" not in farm.said()


def test_second_scheduler_that_cannot_see_the_first_does_not_take_its_farm(farm):
    first = farm.start_scheduler()
    farm.add_worker("one")
    farm.has_nodes("one")
    log = farm.folder / "head" / "second.log"
    second = farm.head.start(farm.command("scheduler"), farm.environ("head"), log)
    assert second.wait(60) == EXIT_SUPERSEDED, log.read_text()
    assert f"process {first.pid} on" in log.read_text()
    farm.submit(Search(name="search", trials=1, steps=2))
    farm.wait_for("search", "FINISHED")
    assert first.poll() is None


_STALLS = """
def train(config):
    import subprocess, time
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open(f"{config['executed']}/{config['own']}", "w") as file:
        file.write(str(left.pid))
    tune.report({"score": 1.0})
    time.sleep(600)
"""


@pytest.fixture
def workdir() -> Iterator[str]:
    """A folder of root's that all may enter, for ``--trial-user``."""
    with tempfile.TemporaryDirectory(prefix="tunemq-") as folder:
        os.chmod(folder, 0o711)
        yield os.path.join(folder, "node")


def test_worker_that_does_not_see_its_forkserver_ends_stalled_trials_and_shows_their_stacks(
    farm, workdir
):
    farm.start_scheduler()
    before = [*reachable(), "setpriv", "--bounding-set=-sys_ptrace"]
    user = ("--trial-user", f"{NOBODY}:{NOBODY}", "--workdir", workdir)
    worker = farm.add_worker("one", 2, *user, before=before)
    farm.has_nodes("one")
    limits = "trial_limits=tune.TrialLimits(stall_s=4)"
    farm.submit(Search(name="stalls", trainable="train", code=_STALLS, failures=0, run=limits))
    farm.wait_for("stalls", "FINISHED")
    stacks = [path.read_text() for path in farm.results.glob("stalls/*/stderr")]
    assert ["in train" in text for text in stacks] == [True, True]
    left = [int(path.read_text()) for path in (farm.folder / "executed" / "stalls").iterdir()]
    assert len(left) == 2
    eventually(lambda: not any(map(is_alive, left)))
    assert worker.poll() is None
    assert "broken" not in (farm.folder / "one" / "worker.log").read_text()


#: Hides its memory from other processes, and prints its identity as a lease holder.
_HIDES = """
import sys
import msgspec
from tunemq_scheduler.base.lease_holder import LeaseHolder
from tunemq_shared.system.process_attributes import keep_memory_private
keep_memory_private()
print(msgspec.json.encode(LeaseHolder.this_process()).decode(), flush=True)
input()
"""
_LOOKS = """
import json, os, signal, subprocess, sys, tempfile
from pathlib import Path
import msgspec
from tunemq_scheduler.base.lease_holder import LeaseHolder
from tunemq_shared.system.claimed_process import exists, is_hidden, open_claimed
from tunemq_shared.system.stopped_process import StoppedProcessDetector
from tunemq_shared.system.processes import children_of
from tunemq_workers.processes.memory_groups import MemoryCgroups

def loses_its_memory_group():
    with tempfile.TemporaryDirectory() as root:
        own, left = Path(root, "memory/own"), Path(root, f"memory/own/tunemq-{pid}-0/h1")
        left.mkdir(parents=True)
        (own / "cgroup.procs").write_text(str(os.getpid()))
        (own / "memory.use_hierarchy").write_text("1")
        (about := Path(root, "about")).write_text("2:memory:/own\\n")
        MemoryCgroups("1", root, str(about)).begin("h1", 10**9)
        return not left.exists()

def how_it_opens():
    try:
        os.close(open_claimed(pid))
    except OSError as problem:
        return f"{type(problem).__name__}: {problem.strerror}"
    return "opened"

def told():
    return {
        "opens": how_it_opens(),
        "exists": exists(pid),
        "is hidden": is_hidden(pid),
        "is gone": holder.is_gone,
        "children": children_of(pid),
        "loses its memory group": loses_its_memory_group(),
    }

child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=-1, stdout=-1)
holder = msgspec.json.decode(child.stdout.readline(), type=LeaseHolder)
pid, stops = child.pid, StoppedProcessDetector()
found = {"runs": told(), "stops": [stops.look(pid), stops.look(pid)]}
child.send_signal(signal.SIGSTOP)
os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
found["stops"] += [stops.look(pid), stops.look(pid)]
child.kill()
child.wait()
found["ended"] = told()
found["stops"] += [stops.look(pid)]
print(json.dumps(found))
"""


@pytest.mark.parametrize("hidepid", HIDING)
def test_process_that_proc_hides_has_not_ended_until_it_has(hidepid):
    line = [*hiding(hidepid), *reachable(NOBODY), sys.executable, "-c", _LOOKS, _HIDES]
    done = subprocess.run(line, stdout=subprocess.PIPE, cwd="/", check=True, text=True)
    found = json.loads(done.stdout)
    opens = found["runs"].pop("opens")
    assert "PermissionError: process " in opens
    assert "is hidden by the hidepid= or ProtectProc= of /proc" in opens
    assert found["runs"] == {
        "exists": True,
        "is hidden": True,
        "is gone": False,
        "children": [],
        "loses its memory group": False,
    }
    assert found["stops"] == [False, False, False, True, False]
    assert found["ended"].pop("opens").startswith("ProcessLookupError")
    assert found["ended"] == {
        "exists": False,
        "is hidden": False,
        "is gone": True,
        "children": [],
        "loses its memory group": True,
    }
