"""F18: journals of a real experiment, damaged at random: check, salvage and restart each of them.

Check and salvage agree. A restart rejects damage that it cannot repair and says what to do. An
experiment that restarts reaches the results of an undisturbed run, each row once. `make soak` does
this to 300 journals with a new seed; set ``TUNEMQ_DAMAGE_SEED`` to repeat a run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tunemq as tune
from tests.support.searches.searches import tuner
from tunemq_scheduler.api.tuner import Tuner
from tunemq_scheduler.cli.journal_command import EXIT_DAMAGED, check_journal, salvage_journal
from tunemq_scheduler.experiment.run_experiment import Experiment
from tunemq_scheduler.journal import journal_writer
from tunemq_scheduler.journal.journal_files import FILE_NAME, SNAPSHOT_SUFFIX, TURNS_SUFFIX
from tunemq_scheduler.journal.journal_frames import JournalFrames
from tunemq_shared.base.errors import JournalCorrupt, JournalError

pytestmark = pytest.mark.integration

STEPS = 4
TRIALS = 12
SEED = 20261123


def climbs(config: dict[str, Any]) -> None:
    """Report four steps, each with a checkpoint; some trials fail once on the way."""
    folder = Path(tune.get_context().get_trial_dir())
    step = 0
    if (given := tune.get_checkpoint()) is not None:
        step = json.loads(Path(given.path, "step").read_text(encoding="ascii"))
    while step < STEPS:
        step += 1
        (folder / "state").mkdir(exist_ok=True)
        (folder / "state" / "step").write_text(str(step), encoding="ascii")
        saved = tune.Checkpoint.from_directory(folder / "state")
        tune.report({"score": config["slope"] * step}, checkpoint=saved)
        if step == config["slope"] % STEPS and not (folder / "failed").exists():
            (folder / "failed").touch()
            raise ValueError("once")


class Damaged(NamedTuple):
    """A description of the damage to a journal."""

    folder: Path
    others: Path
    draw: random.Random

    def file(self, *suffixes: str) -> Path:
        """One of the journal's files."""
        suffixes = suffixes or (TURNS_SUFFIX, SNAPSHOT_SUFFIX, "history", "history.copy")
        files = sorted(one for one in self.folder.iterdir() if one.name.endswith(suffixes))
        return self.draw.choice(files)

    def bit(self) -> None:
        path = self.file()
        data = bytearray(path.read_bytes())
        if data:
            data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
            path.write_bytes(data)

    def both_histories(self) -> None:
        place = None
        for name in ("history", "history.copy"):
            data = bytearray((self.folder / name).read_bytes())
            place = self.draw.randrange(len(data)) if place is None else place
            data[place] ^= 1
            (self.folder / name).write_bytes(data)

    def cut(self) -> None:
        path = self.file()
        os.truncate(path, self.draw.randint(0, path.stat().st_size))

    def cut_between_turns(self) -> None:
        path = self.file(TURNS_SUFFIX)
        with contextlib.suppress(JournalError):
            os.truncate(path, self.draw.choice([0, *(one.end for one in JournalFrames(path))]))

    def _slice(self) -> tuple[Path, bytes, int, int]:
        path = self.file()
        data = path.read_bytes()
        begin = self.draw.randint(0, len(data))
        return path, data, begin, min(len(data), begin + self.draw.randint(1, 400))

    def doubled(self) -> None:
        path, data, begin, end = self._slice()
        path.write_bytes(data[:end] + data[begin:])

    def doubled_turn(self) -> None:
        path = self.file(TURNS_SUFFIX)
        with contextlib.suppress(JournalError):
            frame, data = self.draw.choice([*JournalFrames(path)] or [None]), path.read_bytes()
            if frame is not None:
                path.write_bytes(data[: frame.end] + data[frame.offset :])

    def doubled_file(self) -> None:
        path = self.file()
        path.write_bytes(path.read_bytes() * 2)

    def removed(self) -> None:
        path, data, begin, end = self._slice()
        path.write_bytes(data[:begin] + data[end:])

    def overwritten(self) -> None:
        path, data, begin, end = self._slice()
        path.write_bytes(data[:begin] + self.draw.randbytes(end - begin) + data[end:])

    def garbage_behind(self) -> None:
        with open(self.file(), "ab") as file:
            file.write(self.draw.randbytes(self.draw.randint(1, 300)))

    def missing(self) -> None:
        self.file().unlink()

    def empty(self) -> None:
        os.truncate(self.file(), 0)

    def swapped(self) -> None:
        one, other = self.file(), self.file()
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)

    def of_another_search(self) -> None:
        path = self.file()
        if (other := self.others / path.name).exists():
            shutil.copy(other, path)
        else:
            shutil.copy(self.draw.choice(sorted(self.others.glob(f"*{path.suffix}"))), path)

    def older(self) -> None:
        kind = self.draw.choice([SNAPSHOT_SUFFIX, TURNS_SUFFIX])
        files = sorted(self.folder.glob(f"*{kind}"))
        if len(files) > 1:
            shutil.copy(files[0], files[-1])

    def folder_in_its_place(self) -> None:
        path = self.file()
        path.unlink()
        path.mkdir()

    def unreadable(self) -> None:
        self.file().chmod(0)


KINDS: list[Callable[[Damaged], None]] = [
    Damaged.bit,
    Damaged.bit,
    Damaged.both_histories,
    Damaged.cut,
    Damaged.cut_between_turns,
    Damaged.doubled,
    Damaged.doubled_turn,
    Damaged.doubled_file,
    Damaged.removed,
    Damaged.overwritten,
    Damaged.garbage_behind,
    Damaged.missing,
    Damaged.empty,
    Damaged.swapped,
    Damaged.of_another_search,
    Damaged.older,
    Damaged.folder_in_its_place,
    Damaged.unreadable,
]


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all trials of a search in this process, one by one, to allow hundreds of searches."""
    search = Experiment._search
    monkeypatch.setattr(
        Experiment,
        "_search",
        lambda self, plan, executor, opened, copy, **_more: search(
            self, plan, executor, opened, copy
        ),
    )
    monkeypatch.setattr(journal_writer, "SEGMENT_BYTES", 5_000)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(os, "fdatasync", lambda _: None)


def searched(folder: Path) -> Path:
    space = {"slope": tune.grid_search([float(n) for n in range(1, TRIALS + 1)])}
    options = {"metric": "score", "mode": "max", "max_failures": 2}
    grid = tuner(climbs, space, name="e", storage_path=str(folder), **options).fit(debug=True)
    assert len(grid) == TRIALS
    assert not grid.errors
    check_rows(Path(grid.experiment_path))
    return Path(grid.experiment_path)


def check_rows(experiment: Path) -> None:
    """Check that each step of each trial has one row in each file, with the right values."""
    folders = sorted(path.parent for path in experiment.glob("*/params.json"))
    assert len(folders) == TRIALS, folders
    for folder in folders:
        slope = json.loads((folder / "params.json").read_bytes())["slope"]
        rows = [json.loads(line) for line in (folder / "result.json").read_bytes().splitlines()]
        expected = [(step, slope * step) for step in range(1, STEPS + 1)]
        assert [(one["training_iteration"], one["score"]) for one in rows] == expected, folder
        assert len((folder / "progress.csv").read_bytes().splitlines()) == STEPS + 1, folder
        result = tune.Result.from_path(folder)
        assert [*result.metrics_dataframe["training_iteration"]] == [one for one, _ in expected]


def check_restart(experiment: Path) -> str:
    """Restore and run it: it reaches the right end, or is rejected with a helpful message."""
    grid, rejection = None, None
    try:
        grid = Tuner.restore(str(experiment), climbs).fit(debug=True)
    except JournalError as error:
        rejection = error
    if grid is None:
        told = str(rejection)
        assert str(experiment / FILE_NAME) in told
        if isinstance(rejection, JournalCorrupt):
            assert "at byte" in told
            assert "tunemq journal salvage" in told
        return "refused"
    assert not grid.errors, grid.errors
    check_rows(experiment)
    return "right"


def said_by_check(experiment: Path) -> str:
    told = ""
    try:
        code = check_journal(argparse.Namespace(path=str(experiment), json=False))
    except JournalError as error:
        told = str(error)
    if told:
        assert str(experiment / FILE_NAME) in told
        return "unreadable"
    return "damaged" if code == EXIT_DAMAGED else "whole"


def said_by_salvage(experiment: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    rejection = ""
    try:
        salvage_journal(argparse.Namespace(path=str(experiment), json=False))
    except JournalError as error:
        rejection = str(error)
    if rejection:
        assert str(experiment / FILE_NAME) in rejection
        return "refused, and named" if "is damaged" in rejection else "unreadable"
    told = capsys.readouterr().out
    if "Nothing was done" in told:
        return "whole"
    return "salvaged, records lost" if "of the history." in told else "salvaged"


def check_case(experiment: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Check, restart and salvage one damaged journal; return the outcome."""
    copied = experiment.with_name("direct") / "e"
    shutil.copytree(experiment, copied)
    checked = said_by_check(experiment)
    direct = check_restart(copied)
    shutil.rmtree(copied.parent)
    assert direct == "right" or checked != "whole", "check calls whole what a restart refuses"
    salvaged = said_by_salvage(experiment, capsys)
    agrees = {
        "whole": {"whole"},
        "damaged": {"salvaged", "salvaged, records lost", "refused, and named"},
        "unreadable": {"unreadable"},
    }
    assert salvaged in agrees[checked], f"check says {checked}, salvage {salvaged}"
    if salvaged.startswith("salvaged"):
        assert said_by_check(experiment) == "whole"
    if salvaged != "unreadable" and not salvaged.startswith("refused"):
        assert check_restart(experiment) == "right"
    return f"{checked}; restart {direct}; {salvaged}"


def cases(count: int, seed: int) -> Iterator[tuple[int, random.Random]]:
    for number in range(count):
        yield number, random.Random(f"{seed} {number}")


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("count", [10, pytest.param(300, marks=pytest.mark.soak)])
def test_f18_journal_damaged_at_random_gives_right_rows_or_names_the_loss(
    tmp_path: Path, in_this_process: None, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    is_soak = count > 10
    drawn = random.SystemRandom().randrange(2**32) if is_soak else SEED
    seed = int(os.environ.get("TUNEMQ_DAMAGE_SEED", drawn))
    experiment, other = searched(tmp_path / "one"), searched(tmp_path / "other")
    became: Counter[str] = Counter()
    failed = []
    for number, draw in cases(count, seed):
        folder = Path(shutil.copytree(experiment, tmp_path / "case" / "e"))
        damage = Damaged(folder / FILE_NAME, other / FILE_NAME, draw)
        done = [draw.choice(KINDS) for _ in range(draw.choice([1, 1, 1, 2]))]
        try:
            for one in done:
                with contextlib.suppress(OSError, IndexError):  # of what the one before left
                    one(damage)
            became[check_case(folder, capsys)] += 1
        except Exception:  # noqa: BLE001  each case is told, not only the first that fails
            names = ", ".join(one.__name__ for one in done)
            failed.append(f"case {number} ({names}):\n{traceback.format_exc()}")
        shutil.rmtree(tmp_path / "case")
    with capsys.disabled():
        if is_soak:
            print(f"\n{count} damaged journals, TUNEMQ_DAMAGE_SEED={seed}:")
            print("\n".join(f"{n:>5}  {what}" for what, n in became.most_common()))
    assert not failed, f"TUNEMQ_DAMAGE_SEED={seed}\n" + "\n".join(failed)
