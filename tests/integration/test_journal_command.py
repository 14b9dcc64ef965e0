"""``tunemq journal``: show, check, salvage, through the real command line."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest

import tunemq as tune
from tests.support.commands import Run, run_tunemq
from tests.support.journal_records import read_turns
from tests.support.other_users import NOBODY
from tests.support.searches.searches import fit
from tests.support.stores.object_servers import ObjectServer
from tests.support.waiting import eventually, need
from tests.unit.scheduler.journals import HEADER, TURNS, begun, state_of
from tunemq_scheduler.journal.journal_copy import JournalCopy
from tunemq_scheduler.journal.journal_files import FILE_NAME, snapshot_file, turns_file
from tunemq_scheduler.journal.journal_frames import JournalFrames
from tunemq_scheduler.journal.journal_reader import recover
from tunemq_scheduler.journal.journal_replay import replay_recovered
from tunemq_scheduler.journal.journal_writer import Journal
from tunemq_shared.checkpoints.open_store import join
from tunemq_shared.protocol import messages as m
from tunemq_shared.signing.key_files import journal_signer

pytestmark = pytest.mark.integration


def climbs(config):
    for step in range(1, 6):
        tune.report({"score": config["slope"] * step, "odd": float("nan")})


@pytest.fixture
def tunemq(tmp_path: Path) -> Run:
    return partial(run_tunemq, tmp_path, "journal", columns=100)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The read-only folder of a finished search."""
    results = tmp_path_factory.mktemp("results")
    grid = fit(
        climbs,
        {"slope": tune.grid_search([1.0, 2.0, 3.0])},
        name="e",
        storage_path=str(results),
        metric="score",
        mode="max",
    )
    return Path(grid.experiment_path)


@pytest.fixture
def experiment(searched: Path, tmp_path: Path) -> Path:
    """A copy of that folder, which a test may change."""
    return Path(shutil.copytree(searched, tmp_path / "copied"))


def test_root_writes_no_journal_into_a_folder_of_another_user(tmp_path, tunemq):
    need("root, to give folders away", os.geteuid() == 0 or None)
    folder = tmp_path / "search"
    folder.mkdir()
    with Journal.create(folder / FILE_NAME, HEADER) as journal:
        journal.append(TURNS[0])
    for path in (folder, folder / FILE_NAME):
        os.chown(path, NOBODY, NOBODY)
    for command in ("salvage", "copy"):
        assert "cannot open what root writes" in tunemq(command, folder, code=64).stderr


def test_journal_show_prints_a_line_for_each_event(experiment: Path, tunemq: Run) -> None:
    lines = tunemq("show", experiment).stdout.splitlines()
    entries = [entry for turn in read_turns(experiment / "journal") for entry in turn]
    assert len(lines) == len(entries)
    trial = next(one.event.trial for one in entries if isinstance(one.event, m.ConfigSuggested))
    about = tunemq("show", experiment, "--trial", trial).stdout.splitlines()
    assert about == [line for line in lines if f"trial={trial}" in line.split("->")[0]]
    (suggested,) = [line for line in about if "ConfigSuggested" in line]
    assert 'config={"slope": 1.0}' in suggested
    assert sum("ResultReported" in line for line in about) == 5
    assert tunemq("show", experiment / "journal", "--tail", 3).stdout.splitlines() == lines[-3:]


def test_journal_show_as_json_prints_an_object_a_line(experiment: Path, tunemq: Run) -> None:
    shown = [json.loads(line) for line in tunemq("show", experiment, "--json").stdout.splitlines()]
    results = [one for one in shown if one["event"] == "ResultReported"]
    assert [one["step"] for one in results if one["trial"] == results[0]["trial"]] == [*range(1, 6)]
    assert {one["metrics"]["score"] for one in results if one["step"] == 5} == {5.0, 10.0, 15.0}
    assert sorted({one["turn"] for one in shown}) == [*range(1, shown[-1]["turn"] + 1)]


def test_journal_check_of_an_intact_journal_finds_no_damage(experiment: Path, tunemq: Run) -> None:
    said = tunemq("check", experiment).stdout.splitlines()
    assert said[0].startswith("experiment e (")
    assert "3 trials: 3 TERMINATED" in said[2]
    assert said[-1] == "whole"


def test_journal_check_reports_a_torn_end_as_no_damage(experiment: Path, tunemq: Run) -> None:
    path = turns_file(experiment / "journal", 1)
    os.truncate(path, path.stat().st_size - 5)
    torn = path.stat().st_size - list(JournalFrames(path))[-1].end
    assert f"{torn} bytes at the end" in tunemq("check", experiment).stdout


def test_journal_damage_is_named_and_salvage_keeps_everything_before_it(
    experiment: Path, tunemq: Run
) -> None:
    folder = experiment / "journal"
    path = turns_file(folder, 1)
    turns = list(read_turns(folder))
    frames = list(JournalFrames(path))
    place = len(frames) // 2
    data = bytearray(path.read_bytes())
    data[frames[place].offset + 40] ^= 1
    path.write_bytes(data)
    (folder / "term").write_text("3")

    said = tunemq("check", experiment, code=1).stdout
    assert f"{path} is damaged at byte {frames[place].offset}" in said
    assert "tunemq journal salvage" in said
    shown = tunemq("show", experiment, code=64)
    assert shown.stdout
    assert f"at byte {frames[place].offset}" in shown.stderr

    said = tunemq("salvage", experiment).stdout
    assert f"at byte {frames[place].offset}" in said
    assert f"The new journal has {place - 1} turns" in said
    assert f"Lost: turn {place}, and {len(turns) - place} whole turns behind it" in said
    assert m.encode(list(read_turns(folder))) == m.encode(turns[: place - 1])  # there are NaNs
    (kept,) = experiment.glob("journal.damaged-*")
    assert turns_file(kept, 1).read_bytes() == data
    assert str(kept) in said
    assert (folder / "term").read_text() == "3"
    assert tunemq("check", experiment).stdout.endswith("whole\n")
    assert "Nothing was done" in tunemq("salvage", experiment).stdout
    told = json.loads(tunemq("salvage", experiment, "--json").stdout)
    assert (told["kept"], told["turns"], told["gone"]) == (None, place - 1, [])
    Journal.resume(folder)[0].close()


@pytest.mark.parametrize("what", ["snapshot", "header", "history"])
def test_damage_covered_by_the_last_generation_is_salvaged_without_loss(
    tmp_path: Path, what: str
) -> None:
    from tunemq_scheduler.journal.salvage import salvage

    folder = tmp_path / "journal"
    # The first snapshot has no history: damage in the history leaves that snapshot intact.
    states = begun(folder, TURNS, snapshot_before=(0, 3))
    path, place = {
        "snapshot": (snapshot_file(folder, 3), 100),
        "header": (turns_file(folder, 3), 50),
        "history": (folder / "history", 130),
    }[what]
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)
    done = salvage(folder)
    assert (done.turns, done.unusable) == (len(TURNS), 0)
    assert state_of(recover(folder)) == states[-1]
    assert recover(folder).header == HEADER


def test_a_journal_in_use_is_not_salvaged(tmp_path: Path, tunemq: Run) -> None:
    folder = tmp_path / "journal"
    begun(folder, TURNS)
    journal, _ = Journal.resume(folder)
    with journal:
        path = snapshot_file(folder, 3)
        path.write_bytes(path.read_bytes()[:-1])
        rejected = tunemq("salvage", folder, code=64).stderr
        assert f"process {os.getpid()} on" in rejected
    assert list(tmp_path.glob("journal*")) == [folder]


def test_a_journal_in_a_store_is_shown_and_checked(
    minio: ObjectServer, bucket: str, tunemq: Run, tmp_path: Path
) -> None:
    address = minio.address(bucket, "results")
    grid = fit(climbs, {"slope": 1.0}, name="e", storage_path=address)
    there, here = join(address, "e"), grid.experiment_path
    assert tunemq("show", there).stdout == tunemq("show", here).stdout
    assert tunemq("check", there).stdout == tunemq("check", here).stdout
    assert replay_recovered(recover(Path(here, "journal"))).counts["TERMINATED"] == 1


def test_copy_with_a_lost_piece_is_shown_up_to_there_and_called_damaged(
    minio: ObjectServer, bucket: str, tunemq: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in minio.environ.items():
        monkeypatch.setenv(name, value)
    address = minio.address(bucket, "e")
    with minio.objects(bucket, "e") as objects:
        with Journal.create(tmp_path / "journal", HEADER) as journal:
            copied = JournalCopy(journal, objects, journal_signer())
            for turn in TURNS[:4]:
                journal.append(turn)
                eventually(lambda: not copied.is_behind)
            assert copied.close(within_s=60)
        *_, lost, _ = (one.key for one in objects.list() if ".turns/" in one.key)
        objects.delete([lost])
    checked = tunemq("check", address, code=1).stdout
    assert checked.startswith("damaged: the copy of the journal lacks bytes")
    assert "--take-over" in checked
    shown = tunemq("show", address)
    assert "lacks bytes" in shown.stderr
    assert shown.stdout
    assert "needs no salvage" in tunemq("salvage", address, code=64).stderr


def test_commands_without_a_journal_say_so(tunemq: Run, tmp_path: Path) -> None:
    for command in ("show", "check", "salvage"):
        said = tunemq(command, tmp_path, code=64).stderr
        assert said == (
            f"tunemq: there is no journal at {tmp_path}: give the folder of a search, or "
            "the folder journal in it.\n"
        )
    assert (
        "'x' is invalid: use a whole number from 0"
        in tunemq("show", tmp_path, "--tail", "x", code=2).stderr
    )


def test_help_explains_the_exit_codes(tunemq: Run) -> None:
    assert "salvage" in tunemq("--help").stdout
    assert "Exit codes: 0" in tunemq("check", "--help").stdout
    assert "under another name" in " ".join(tunemq("salvage", "--help").stdout.split())
    assert "--tail" in tunemq("show", "--help").stdout
