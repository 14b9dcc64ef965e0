"""A node's working folder: removal of a dead node's leftovers, and the size limit of logs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.unit.workers.fakes import Clock
from tunemq_shared.base.errors import ConfigError
from tunemq_workers import work_folder
from tunemq_workers.broker.outbox_spool import Spool
from tunemq_workers.work_folder import (
    FORKSERVER_LOGS,
    PERIOD_S,
    cap_logs,
    check_ours,
    forkserver_log,
    keep_logs_short,
)


class Disk:
    """Runs every job at once."""

    def __init__(self) -> None:
        self.problem: OSError | None = None

    def run(self, place, job, then, failed=None):
        if self.problem is not None:
            failed(self.problem)
        else:
            then(job())


@pytest.mark.parametrize("name", ["code", "trials", "logs", "lock"])
def test_folder_with_files_of_other_programs_is_refused(tmp_path: Path, name: str) -> None:
    if name == "lock":
        (tmp_path / name).write_text("of yarn")
    else:
        (tmp_path / name / "ours").mkdir(parents=True)
    with pytest.raises(ConfigError) as error:
        check_ours(str(tmp_path))
    assert f"{tmp_path / name} is not TuneMQ's" in str(error.value)


def test_folder_where_a_worker_worked_and_empty_ones_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "cache" / "lost+found").mkdir(parents=True)
    (tmp_path / "code").mkdir()
    (tmp_path / "notes").touch()
    check_ours(str(tmp_path))
    (tmp_path / "lock").write_text("123\n")
    (tmp_path / "code" / "bundle").touch()
    check_ours(str(tmp_path))
    check_ours(str(tmp_path / "missing"))


def test_only_the_outbox_of_a_dead_node_is_removed(tmp_path: Path) -> None:
    kept = [".outboxes", "node.log", "forkserver-1.log", "lock"]
    for name in (*kept, ".outbox-0123", ".outbox-4567"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "cache").mkdir()
    assert work_folder.remove_leftovers(str(tmp_path)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "cache"])


def test_spool_that_kept_its_name_is_a_leftover(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("os.unlink", lambda _: None)
    spool = Spool(str(tmp_path))
    spool.write(b"event")
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 1
    assert work_folder.remove_leftovers(str(tmp_path)) == 1
    assert list(tmp_path.iterdir()) == []


def test_long_logs_are_cut_to_their_newest_half_and_other_files_left_alone(tmp_path: Path) -> None:
    lines = [f"line {n}\n" for n in range(1000)]
    for name in ("node.log", "forkserver-1.log", "weights.bin"):
        (tmp_path / name).write_text("".join(lines))
    (tmp_path / "consumer.log").write_text("short\n")
    cap_logs(str(tmp_path), 4_000)
    for name in ("node.log", "forkserver-1.log"):
        first, *rest = (tmp_path / name).read_text().splitlines(keepends=True)
        assert "of older output dropped" in first
        assert rest == lines[-len(rest) :]
        assert (tmp_path / name).stat().st_size <= 2_100
    assert (tmp_path / "weights.bin").read_text() == "".join(lines)
    assert (tmp_path / "consumer.log").read_text() == "short\n"


def test_logs_are_checked_again_even_if_the_disk_fails(tmp_path: Path, monkeypatch) -> None:
    clock, disk = Clock(), Disk()
    monkeypatch.setattr(work_folder, "cap_logs", partial(cap_logs, limit_bytes=100))
    disk.problem = OSError(28, "No space left on device")
    keep_logs_short(clock, disk, str(tmp_path))
    disk.problem = None
    (tmp_path / "node.log").write_text("a line\n" * 100)
    clock.advance(PERIOD_S - 0.1)
    assert (tmp_path / "node.log").stat().st_size == 700
    clock.advance(0.2)
    assert (tmp_path / "node.log").stat().st_size < 100


def test_any_number_of_forkservers_share_a_few_logs() -> None:
    logs = {forkserver_log("/w", number) for number in range(1, 100)}
    assert len(logs) == FORKSERVER_LOGS
    assert forkserver_log("/w", 1) == "/w/logs/forkserver-1.log"
