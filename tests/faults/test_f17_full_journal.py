"""F17: the scheduler's disk is full; the experiment waits, reports it, and resumes without loss."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_disk import with_small_disk

pytestmark = pytest.mark.integration

STEPS = 60

#: A search on a small disk that is filled during the search, until the search reports that it
#: waits.
SCRIPT = """
import contextlib, json, os, signal, sys, threading, time
from pathlib import Path

import tunemq as tune
from tests.support.waiting import eventually
from tunemq_scheduler.journal.journal_reader import recover

disk, steps, ending = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
is_full = disk.parent / "is-full"
said = []

class Tee:
    encoding, isatty, flush = "utf-8", (lambda self: False), (lambda self: None)
    def write(self, text):
        said.append(text)
        return len(text)

def text():
    return "".join(said)

def trains(config):
    for step in range(steps):
        while step == 20 and not is_full.exists():
            time.sleep(0.01)  # it is not over before the disk is full, however late that is
        time.sleep(0.02)
        tune.report({"loss": 1 / (step + 1)})

def journalled():
    return recover(disk / "e" / "journal").turn

seen = {}

def fill_and_free():
    eventually(lambda: list(disk.glob("e/*/result.json")))
    fillers = []
    while not "degraded" in text():
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        if free:
            fillers.append(disk / f"filler{len(fillers)}")
            with contextlib.suppress(OSError):  # the search may be quicker
                fillers[-1].write_bytes(b"x" * free)
            is_full.touch()
        time.sleep(0.01)
    before = journalled()
    time.sleep(1.5)
    seen["turns while full"] = journalled() - before
    seen["cut while full"] = recover(disk / "e" / "journal").cut
    if ending == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)
        return
    for filler in fillers:
        filler.unlink()

thread = threading.Thread(target=fill_and_free)
thread.start()
stdout, sys.stdout = sys.stdout, Tee()
try:
    grid = tune.Tuner(
        trains,
        tune_config=tune.TuneConfig(num_samples=2),
        run_config=tune.RunConfig(name="e", storage_path=str(disk), verbose=1),
    ).fit()
    lines = [
        [json.loads(line)["training_iteration"] for line in open(f"{one.path}/result.json")]
        for one in grid
    ]
    ended = str(grid.errors)
except BaseException as error:
    lines, ended = [], repr(error)
finally:
    sys.stdout = stdout
thread.join()
turns = list(recover(disk / "e" / "journal").turns)
print(json.dumps({**seen, "lines": lines, "ended": ended, "said": text(), "turns": len(turns)}))
"""


def search(disk: Path, ending: str) -> Any:
    """Run the script on a full disk; return what it prints."""
    python = [sys.executable, "-c", SCRIPT, str(disk), str(STEPS), ending]
    done = with_small_disk(disk, python, options="size=16m")
    assert done.returncode == 0, (done.stdout, done.stderr)
    return json.loads(done.stdout)


def test_f17_a_search_whose_disk_is_full_waits_and_continues_with_nothing_lost(
    tmp_path: Path,
) -> None:
    found = search(tmp_path / "disk", "freed")
    assert found["ended"] == "[]", found
    assert found["lines"] == [list(range(1, STEPS + 1))] * 2
    assert (found["turns while full"], found["cut while full"]) == (0, 0)
    said = found["said"]
    assert said.count("degraded: ") == 1
    assert "/disk/e/journal/000001.turns" in said
    assert "bytes are free" in said
    assert said.count("the disk has space again after") == 1


def test_f17_a_search_that_waits_for_room_can_be_interrupted(tmp_path: Path) -> None:
    found = search(tmp_path / "disk", "interrupted")
    # Which file finds the disk full last depends on the moment; restoring writes them all again.
    causes = ("JournalFull", "KeyboardInterrupt", "No space left on device")
    assert any(cause in found["ended"] for cause in causes), found
    assert found["said"].count("degraded: ") == 1
    assert found["turns"] > 2


#: Appends turns until the disk is full, then again after space was freed.
WRITER = """
import os, sys
from pathlib import Path
from tests.unit.scheduler.journals import HEADER, TURNS
from tests.support.journal_records import read_turns
from tunemq_scheduler.journal import journal_writer
from tunemq_scheduler.journal.journal_writer import Journal
from tunemq_shared.protocol import messages as m
from tunemq_shared.base.errors import JournalFull

disk = Path(sys.argv[1])
journal_writer.RESERVE_BYTES = 0
written = 0
big = [m.JournalRecord(m.NodeWarned("n" * 3000, False))]
with Journal.create(disk / "journal", HEADER) as journal:
    (disk / "filler").write_bytes(b"x" * 2**20)
    try:
        while True:
            journal.append(big)
            written += 1
    except JournalFull as full:
        print(full)
    try:
        journal.append(big)
    except JournalFull:
        print("again")
    size = journal.position.offset
    assert (disk / "journal" / "000001.turns").stat().st_size == size
    (disk / "filler").unlink()
    journal.append(TURNS[0])
found = list(read_turns(disk / "journal"))
assert found == [big] * written + [TURNS[0]], len(found)
print(written)
"""


def test_f17_turn_that_finds_the_disk_full_leaves_no_partial_record(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    done = with_small_disk(disk, [sys.executable, "-c", WRITER, str(disk)], options="size=3m")
    assert done.returncode == 0, done.stderr
    told, again, written = done.stdout.splitlines()
    assert "disk/journal/000001.turns: No space left on device (" in told
    assert again == "again"
    assert int(written) > 100
