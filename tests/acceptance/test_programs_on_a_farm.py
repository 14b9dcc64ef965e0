"""Programs as trials on a farm whose machines have none of the user's folders."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import tunemq as tune
from tests.acceptance.scripts import write
from tests.acceptance.test_results_elsewhere import farm
from tests.support.farms.farm_service import FarmService, farm_service
from tests.support.waiting import eventually

__all__ = ["farm"]

pytestmark = pytest.mark.faults

SCRIPT = """\
import tunemq as tune

tuner = tune.Tuner(
    tune.executable({command}),
    tune_config=tune.TuneConfig(metric="loss", mode="min"),
)
"""
#: Reads a file beside it, and writes one into its folder if that is allowed.
TRAIN = """\
#!/bin/sh
touch here && rm here && echo writable
echo "loss=$(cat loss.txt)"
"""


@pytest.fixture
def project(farm: FarmService) -> Path:
    """The user's folder, with a program and its data."""
    folder = write(farm.folder / "laptop" / "project", {"train.sh": TRAIN, "loss.txt": "0.5\n"})
    (folder / "train.sh").chmod(0o755)
    return folder


def tuner_of(command: list[str], name: str) -> tune.Tuner:
    return tune.Tuner(
        tune.executable(command),
        tune_config=tune.TuneConfig(metric="loss", mode="min"),
        run_config=tune.RunConfig(name=name, verbose=0),
    )


@pytest.mark.parametrize("command", [["./train.sh"], ["sh", "train.sh"]])
def test_submitted_program_runs_in_the_folder_of_its_script(
    farm: FarmService, project: Path, command: list[str]
) -> None:
    script = write(project, {"search.py": SCRIPT.format(command=command)}) / "search.py"
    done = farm.tunemq("submit", str(script), "--folder", str(project.parent), "--name", "search")

    assert "search is FINISHED" in done or farm.rows()["search"].state == "FINISHED"
    (result,) = farm.recorded("search").values()
    assert [line["loss"] for line in result] == [0.5]


@pytest.mark.parametrize(
    "code",
    [
        SCRIPT.format(command=["./train.sh"]),
        SCRIPT.format(command=["sh", "train.sh"]),
        "from pathlib import Path\nPath(__file__).with_name('loss.txt').read_text()\n",
    ],
    ids=["program", "argument", "data"],
)
def test_file_beside_a_script_that_travels_alone_needs_its_folder(
    farm: FarmService, project: Path, code: str
) -> None:
    script = write(project, {"search.py": code}) / "search.py"
    done = farm.run("submit", str(script), "--name", "alone")

    assert done.returncode == 1
    assert "tunemq submit --folder ." in farm.rows()["alone"].reason


def test_command_in_a_folder_that_only_the_user_has_runs_in_the_folder_of_its_trial(
    farm: FarmService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    tuner = tuner_of(["bash", "-c", 'echo loss=1; [ "$PWD" = "{trial_dir}" ]'], "command")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").rmdir()

    (result,) = tuner.fit(address=farm.url)

    assert result.error is None
    assert result.metrics["loss"] == 1


def test_fit_sends_the_folder_with_the_program(
    farm: FarmService, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    (result,) = tuner_of(["./train.sh"], "sent").fit(address=farm.url, folder=".")
    (without,) = tuner_of(["./train.sh"], "not-sent").fit(address=farm.url)

    assert result.error is None
    assert result.metrics["loss"] == 0.5
    assert "fit(folder=" in str(without.error)


#: Counts, and saves and reports the number, until it finds the file `end`.
COUNTS = """\
n=$(cat "$TUNEMQ_CHECKPOINT/n" 2> /dev/null || echo 0)
while [ ! -e "$1" ]; do
    n=$((n + 1))
    (cd "$TUNEMQ_CHECKPOINT_DIR" && echo $n > .n && mv .n n)
    echo "{\\"loss\\": $n}" >> "$TUNEMQ_TRIAL_DIR/m.jsonl"
    sleep 0.1
done
"""


def test_program_of_a_lost_node_changes_nothing_in_a_shared_folder(tmp_path: Path) -> None:
    project, end = write(tmp_path / "project", {"count.sh": COUNTS}), tmp_path / "end"
    command = ["sh", str(project / "count.sh"), str(end)]
    script = SCRIPT.format(command=f"{command}, metrics_from='{{trial_dir}}/m.jsonl'")
    write(project, {"search.py": script})
    with farm_service(tmp_path) as farm:
        lost = farm.add_worker("one")
        farm.has_nodes("one")
        farm.tunemq("submit", str(project / "search.py"), "--name", "counts", "--detach")

        def results() -> list[dict]:
            return farm.recorded("counts").get(0, [])

        eventually(lambda: len(results()) >= 5, within=90, message=lambda: str(farm))
        before = len(results())
        lost.send_signal(signal.SIGSTOP)  # its program continues
        farm.add_worker("two")
        eventually(lambda: len(results()) >= before + 50, within=90, message=lambda: str(farm))
        end.touch()
        farm.wait_for("counts", "FINISHED")
        lines = results()
        lost.send_signal(signal.SIGKILL)
    assert len({line["pid"] for line in lines}) == 2
    assert [line["loss"] for line in lines] == [line["training_iteration"] for line in lines]
