"""Result files of a trial that continues from another state: its lineages stand in one file."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.scheduler.output.test_result_rebuild import TRIAL, Search
from tests.unit.scheduler.scripted_loop import result, started
from tunemq_scheduler.output.result_file_reader import ends_with
from tunemq_scheduler.schedulers import Exploit, TrialScheduler
from tunemq_shared.protocol import messages as m

#: Lineage and step of each row.
PLACES = [(0, 1), (0, 2), (0, 3), (1, 3), (1, 4)]


class BackToTwo(TrialScheduler):
    """At its third step the trial continues from its checkpoint of the second."""

    def on_trial_result(self, runner: Any, trial: Any, result: dict[str, Any]) -> Any:
        if (result["lineage"], result["training_iteration"]) != (0, 3):
            return self.CONTINUE
        return Exploit(trial, "once more", trial)


def searched(tmp_path: Path, *, has_snapshot: bool) -> Search:
    """A search whose trial has done five steps in two lineages; its first turns may be gone."""
    search = Search(tmp_path, BackToTwo())
    key = f"{TRIAL}/checkpoint_1-000002"
    search.loop.batch(4, m.CheckpointCommitted(TRIAL, 1, 2, 2, key, "hash", 1))
    search.restart()
    search.loop.batch(5, result(3))
    search.loop.batch(6, m.SlotFreed(TRIAL, 1))
    attempt = search.loop.runner.live[TRIAL].attempt
    newest = [msgspec.structs.replace(result(step), attempt=attempt) for step in (3, 4)]
    if has_snapshot:
        search.restart()
        search.take_snapshot()
    search.loop.batch(7, msgspec.structs.replace(started(), attempt=attempt), *newest)
    return search


@pytest.fixture(params=[False, True])
def search(request: pytest.FixtureRequest, tmp_path: Path) -> Search:
    return searched(tmp_path, has_snapshot=request.param)


def rows_of(search: Search) -> list[list[tuple[int, int]]]:
    lines = (search.folder / "result.json").read_text().splitlines()
    found = [(row["lineage"], row["training_iteration"]) for row in map(json.loads, lines)]
    with (search.folder / "progress.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    return [found, [(int(row["lineage"]), int(row["training_iteration"])) for row in table]]


def test_rows_of_a_new_lineage_follow_those_of_the_one_before(search: Search) -> None:
    assert search.restart() == []
    assert rows_of(search) == [PLACES, PLACES]
    assert search.restart() == []
    assert ends_with(str(search.folder / "result.json"), TRIAL, (1, 4))
    assert ends_with(str(search.folder / "progress.csv"), TRIAL, (1, 4))
    assert not ends_with(str(search.folder / "result.json"), TRIAL, (0, 4))


def test_rows_that_the_journal_lacks_are_put_aside_also_in_an_earlier_lineage(
    search: Search,
) -> None:
    search.restart()
    for name in ("result.json", "progress.csv"):
        path = search.folder / name
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:-1]))  # a row of replayed turns
    assert search.restart() == []
    assert rows_of(search) == [PLACES, PLACES]
    journal = search.loop.journal
    ended = [type(one.event) is m.ResultReported for one in journal.journal_records]
    del journal.journal_records[len(ended) - 1 - ended[::-1].index(True) :]
    told = search.restart()
    assert rows_of(search) == [PLACES[:-1], PLACES[:-1]]
    assert told[0].startswith("The journal lost its last turns: removed ")


def test_lost_rows_of_a_lineage_are_named(tmp_path: Path) -> None:
    search = searched(tmp_path, has_snapshot=True)
    search.restart()
    path = search.folder / "result.json"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], *lines[2:]]))
    (told,) = search.restart()
    assert told == (
        f"Results are missing from {path} (step 2): the journal does not have them any more."
    )
