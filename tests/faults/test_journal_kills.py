"""A process that writes a journal is killed at each durable step; its successor resumes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.failpoints import FAILPOINTS
from tests.unit.scheduler.journals import TURNS, after, begun, state_of
from tunemq_scheduler.journal.journal_reader import recover
from tunemq_scheduler.journal.journal_writer import Journal
from tunemq_shared.base.errors import JournalError
from tunemq_shared.base.failpoints import VARIABLE

#: Append the missing turns, take a snapshot before every second turn, and print the durable turns.
WRITER = """
import sys
from pathlib import Path
from tests.unit.scheduler.journals import HEADER, TURNS, after, state_of, take_snapshot
from tunemq_scheduler.journal.journal_writer import Journal
from tunemq_scheduler.journal.journal_files import TURNS_SUFFIX, numbers

folder = Path(sys.argv[1])
if numbers(folder, TURNS_SUFFIX):
    journal, found = Journal.resume(folder)
    state = state_of(found)
else:
    journal, state = Journal.create(folder, HEADER), ((), ())
while journal.turn < len(TURNS):
    if journal.turn % 2:
        print("snapshot", take_snapshot(journal, state), flush=True)
    turn = TURNS[journal.turn]
    journal.append(turn)
    state = after(state, turn)
    print("turn", flush=True)
"""

JOURNALS = [name for name in FAILPOINTS if name.startswith("journal.")]


def run(folder: Path, failpoints: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WRITER, str(folder)],
        env={**os.environ, VARIABLE: failpoints},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("name", JOURNALS)
def test_f03_killed_journal_writer_loses_no_durable_turn(
    tmp_path: Path, name: str, times: int
) -> None:
    folder, other = tmp_path / "journal", tmp_path / "other"
    states = begun(other, TURNS)
    died = run(folder, f"{name}=kill@{times}")
    assert died.returncode == -9, died
    durable = died.stdout.count("turn")
    if (folder / "000001.turns").exists() or durable:
        found = recover(folder)
        assert durable <= found.turn <= durable + 1
        assert state_of(found) == states[found.turn]
    ended = run(folder, "")
    assert ended.returncode == 0, ended
    assert ended.stdout.count("turn") == len(TURNS) - durable - _was_written(name)
    assert state_of(recover(folder)) == states[-1]
    assert not list(folder.glob("*.part"))


def _was_written(name: str) -> int:
    """Return how many turns became durable although their writer died before it printed them."""
    return name == "journal.after_append"


@pytest.mark.parametrize("name", [name for name in JOURNALS if "append" not in name])
def test_f03_snapshot_on_a_full_disk_is_an_error_and_loses_nothing(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "journal"
    states = begun(tmp_path / "other", TURNS)
    failed = run(folder, f"{name}=error@2")
    assert failed.returncode == 1
    assert JournalError.__name__ in failed.stderr
    found = recover(folder)
    assert state_of(found) == states[found.turn]
    journal, found = Journal.resume(folder)
    with journal:
        journal.append(TURNS[found.turn])
    assert state_of(recover(folder)) == after(state_of(found), TURNS[found.turn])
