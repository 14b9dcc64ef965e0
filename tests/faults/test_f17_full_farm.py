"""F17: the disk of a farm's scheduler is full; it stays up, and rejects what it cannot store."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.test_farm_metrics import scrape
from tests.support.farms.farm_service import FarmService, Here, Search, farm_service
from tests.support.small_disk import on_small_disk, with_small_disk
from tests.support.waiting import eventually
from tunemq_scheduler.farm.common import small_files
from tunemq_scheduler.farm.service.experiment_queue import ExperimentQueue
from tunemq_shared.base.errors import JournalFull

pytestmark = pytest.mark.integration


class SmallDisk:
    """The disk with the results: 24 MiB, in a mount namespace that exists until `close`."""

    def __init__(self, disk: Path) -> None:
        disk.mkdir()
        command = on_small_disk(disk, ["sh", "-c", "echo && cat"], options="size=24m")
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline()
        #: The path of the disk as seen from outside the namespace.
        self.folder = Path(f"/proc/{self._holder.pid}/root{disk}")

    def machine(self) -> Here:
        """A machine whose processes see the disk."""
        target = ["--target", str(self._holder.pid)]
        return Here(["nsenter", *target, "--user", "--mount", "--preserve-credentials"])

    def fill(self) -> None:
        """Fill the disk to the last byte."""
        with contextlib.suppress(OSError), open(self.folder / "filler", "ab", buffering=0) as file:
            while True:
                file.write(b"x" * 512)

    def free(self) -> None:
        """Free the disk again."""
        (self.folder / "filler").unlink()

    def make_writable(self, yes: bool) -> None:
        """Make its files writable again, or read-only except for open ones."""
        disk = str(self.folder).partition("/root")[2]
        change = f'mount -o remount,bind,{"rw" if yes else "ro"} "$1"'
        # The kernel refuses to make it read-only while a process writes there.
        script = f"for _ in $(seq 100); do {change} && exit; sleep 0.1; done; exit 1"
        if not yes:
            script = f'mount --bind "$1" "$1" && {script}'
        enter = ["nsenter", "--target", str(self._holder.pid), "--user", "--mount"]
        shell = ["--preserve-credentials", "sh", "-c", script, "sh", disk]
        subprocess.run([*enter, *shell], check=True)

    def close(self) -> None:
        """End the namespace."""
        self._holder.communicate()


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[FarmService]:
    with farm_service(tmp_path, starts=False) as farm:
        yield farm


@pytest.fixture
def disk(farm: FarmService) -> Iterator[SmallDisk]:
    disk = SmallDisk(farm.results)
    farm.results = disk.folder
    farm.head, farm.laptop = disk.machine(), disk.machine()
    yield disk
    farm.close()
    farm.head.kill()
    disk.close()


def is_rejected(done: subprocess.CompletedProcess[str]) -> None:
    """Check that a request was rejected because the disk is full."""
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "No space left on device" in said
    assert "nothing was changed" in said
    assert "tunemq rm --files" in said


def test_f17_scheduler_on_a_full_disk_refuses_requests_and_continues_later(
    farm: FarmService, disk: SmallDisk, tmp_path: Path
) -> None:
    disk.fill()
    farm.start_scheduler()
    farm.add_worker("one", 8, machine=disk.machine())
    farm.has_nodes("one")

    is_rejected(farm.run("nodes", "drain", "one"))
    assert farm.rows() == {}
    eventually(lambda: "degraded: " in farm.said(), message=farm.said)
    disk.free()
    eventually(
        lambda: "the scheduler's files can be written again" in farm.said(),
        message=farm.said,
    )
    farm.submit(Search(name="early"))
    farm.wait_for("early", "FINISHED")
    for name in ("kept", "stopped"):
        farm.submit(Search(name=name, has_gate=True))
    for name in ("kept", "stopped"):
        farm.open_gate(name, 3)
        farm.wait_for_steps(name, 2, 3)

    disk.fill()
    # Its code is in the store, which is full, too.
    script = str(tmp_path / "laptop" / "early" / "search.py")
    submit = ("submit", script, "--name", "late", "--detach")
    for request in (submit, ("pause", "kept"), ("retry", "early"), ("resume", "early")):
        is_rejected(farm.run(*request))
    is_rejected(farm.run("nodes", "drain", "one"))
    is_rejected(farm.run("nodes", "retire", "one"))
    for request in (("ls",), ("show", "kept"), ("why", "kept"), ("nodes",), ("logs", "early")):
        farm.tunemq(*request)
    farm.kill_scheduler()
    farm.start_scheduler()
    eventually(lambda: set(farm.rows()) == {"early", "kept", "stopped"}, within=60)
    is_rejected(farm.run(*submit))
    assert "early is removed with its results" in farm.tunemq("rm", "--files", "--yes", "early")
    assert set(farm.rows()) == {"kept", "stopped"}
    eventually(lambda: not list((farm.results / ".farm/trash").iterdir()))
    disk.fill()
    assert "No space left on device" in farm.tunemq("stop", "stopped")
    farm.open_gate("kept", 10)

    disk.free()
    farm.wait_for("stopped", "STOPPED")
    farm.wait_for("kept", "FINISHED")
    farm.tunemq(*submit)
    farm.wait_for("late", "FINISHED")
    assert farm.scheduler.poll() is None
    farm.check_results("kept")
    assert not list((farm.results / ".farm").rglob("*.new"))
    states = {
        one.name: str(one.state)
        for one in ExperimentQueue(farm.results / ".farm/experiments").all()
    }
    assert states == {"kept": "FINISHED", "stopped": "STOPPED", "late": "FINISHED"}


def test_f17_scheduler_on_a_read_only_disk_waits_and_continues(
    farm: FarmService, disk: SmallDisk
) -> None:
    farm.start_scheduler()
    farm.add_worker("one", 8, machine=disk.machine())
    farm.submit(Search(name="stopped", has_gate=True))
    farm.submit(Search(name="kept", has_gate=True, save_every=100))
    farm.open_gate("kept", 3)
    farm.wait_for_steps("kept", 2, 3)

    disk.make_writable(False)
    farm.open_gate("kept", 5)
    rejected = farm.run("pause", "kept")
    assert rejected.returncode == 1
    assert "Read-only file system" in rejected.stdout + rejected.stderr
    eventually(lambda: "degraded: " in farm.said(), message=farm.said)
    for request in (("ls",), ("show", "kept"), ("why", "kept"), ("nodes",)):
        farm.tunemq(*request)
    stopped = farm.tunemq("stop", "stopped")
    assert "Read-only file system" in stopped
    assert "full" not in stopped
    assert farm.scheduler.poll() is None
    disk.make_writable(True)

    eventually(lambda: "can be written again" in farm.said(), message=farm.said)
    farm.open_gate("kept", 10)
    farm.wait_for("kept", "FINISHED")
    farm.wait_for("stopped", "STOPPED")
    farm.check_results("kept")
    assert farm.scheduler.poll() is None


@pytest.mark.parametrize("killed", ["the scheduler", "the process of the search"])
def test_f17_search_whose_process_starts_on_a_full_disk_waits_and_continues(
    farm: FarmService, disk: SmallDisk, killed: str
) -> None:
    farm.start_scheduler("--metrics", "127.0.0.1:0")
    farm.add_worker("one", 8, machine=disk.machine())
    farm.has_nodes("one")
    farm.submit(Search(name="kept", has_gate=True, save_every=100))
    farm.open_gate("kept", 3)
    farm.wait_for_steps("kept", 2, 3)
    disk.fill()
    if killed == "the scheduler":
        farm.kill_scheduler()
        farm.start_scheduler()
    else:
        kill_process_of("kept", farm.scheduler.pid)
        in_trouble = "tunemq_search_trouble{experiment=kept,kind=failing}"
        eventually(lambda: scrape(farm).get(in_trouble) == 1, message=lambda: str(farm))
    eventually(
        lambda: "No space left on device" in farm.rows()["kept"].trouble,
        message=lambda: f"{farm.rows()}{farm}",
    )
    assert farm.rows()["kept"].state == "RUNNING"
    assert "No space left on device" in farm.tunemq("why", "kept")
    farm.open_gate("kept", 10)
    farm.wait_for_steps("kept", 2, 10)

    disk.free()

    farm.wait_for("kept", "FINISHED")
    farm.check_results("kept")
    farm.check_steps("kept")  # the nodes kept running its trials
    assert not list(farm.results.rglob("*.new"))


def kill_process_of(name: str, scheduler: int) -> None:
    """Kill the process of a search, as the kernel does when memory runs out."""
    (found,) = (
        process
        for process in psutil.Process(scheduler).children(recursive=True)
        if process.name() == name
    )
    found.kill()


#: Writes the files of a supervisor to a disk that is full for a while.
KEPT = """
import contextlib, json, os, sys
from pathlib import Path
from tests.support.farms.farm_api_server import CODE
from tests.unit.scheduler.farm.service.test_running_experiments import Farm
from tests.unit.scheduler.farm.output.test_trial_output_files import Printed, chunk
from tunemq_scheduler.farm.service.done_requests import DoneRequests
from tunemq_scheduler.farm.service.experiment_queue import ExperimentQueue
from tunemq_scheduler.farm.ipc import ipc_messages as r
from tunemq_scheduler.farm.output.event_stream_registry import EventStreams
from tunemq_shared.broker import redis_keys
from tunemq_scheduler.api.farm_answer_types import ExperimentState as State
from tunemq_shared.base.errors import JournalFull

disk = Path(sys.argv[1])
(disk / "train_a").mkdir()
printed = Printed(disk)
printed.come(chunk(0, b"one\\n"))
done = DoneRequests(disk / "requests")
for number in range(200):
    done.add(f"before{number}", b"x" * 10)
farm = Farm(disk)
for name in ("first", "second", "third"):
    farm.queue.add(name, owner="alice", code=CODE)
farm.experiments._max_running = 1
farm.experiments.turn()
(entry,) = farm.queue.in_state(State.RUNNING)
(process,) = farm.processes

with contextlib.suppress(OSError), open(disk / "filler", "ab", buffering=0) as file:
    while True:
        file.write(b"x" * 100)

for number in range(100):
    done.add(f"full{number}", b"y" * 1000)
assert done.get("full99") == b"y" * 1000
process.say(r.ExperimentAttached(redis_keys.events(entry.id)))
farm.experiments.turn()
process.say(r.SearchEnded("finished"))
process.code = 0
for _ in range(3):
    farm.experiments.turn()
assert farm.queue.get("first").state is State.FINISHED
assert farm.queue.get("second").state is State.QUEUED
assert len(farm.processes) == 1
for change in (lambda: farm.queue.add("new", owner="alice", code=CODE),
               lambda: farm.queue.move("third", State.PAUSED), done.save, farm.experiments.save):
    try:
        change()
        raise AssertionError(change)
    except JournalFull as full:
        assert "No space left on device" in str(full), full
assert farm.queue.get("new") is None
assert farm.queue.get("third").state is State.QUEUED
assert not list(disk.rglob("*.new")), list(disk.rglob("*.new"))
known = [DoneRequests(disk / "requests").get(f"before{n}") is not None for n in range(200)]
assert all(known)
try:
    printed.come(chunk(4, b"two\\n" * 5000))
    raise AssertionError("it was written")
except OSError:
    printed.entries -= 1
assert printed.read() == b"one\\n"

(disk / "filler").unlink()
assert printed.files.asks()[-1] == "1-0"
printed.come(chunk(4, b"two\\n" * 5000))
assert printed.read() == b"one\\n" + b"two\\n" * 5000
done.save()
with contextlib.suppress(JournalFull):
    farm.experiments.save()  # says once more why the second one waited
farm.experiments.save()
again = DoneRequests(disk / "requests")
assert all(again.get(f"full{n}") == b"y" * 1000 for n in range(100))
assert all(again.get(f"before{n}") == b"x" * 10 for n in range(200))
assert EventStreams(disk / "streams.json").keys == {}
found = ExperimentQueue(disk / "experiments")
print(json.dumps({one.name: str(one.state) for one in found.all()}))
farm.end()
"""


def test_f17_supervisor_state_is_written_when_the_disk_has_space_again(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    done = with_small_disk(disk, [sys.executable, "-c", KEPT, str(disk)], options="size=3m")
    assert done.returncode == 0, done.stderr
    states = json.loads(done.stdout)
    assert states == {"first": "FINISHED", "second": "QUEUED", "third": "QUEUED"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_f17_exhausted_disk_quota_is_reported_like_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fsync(_descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(small_files.os, "fsync", fsync)
    with pytest.raises(JournalFull, match=os.strerror(number)):
        small_files.replace_file(tmp_path / "nodes.json", b"{}")
    assert list(tmp_path.iterdir()) == []
