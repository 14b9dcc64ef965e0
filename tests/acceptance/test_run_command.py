"""`tunemq run`, as a person uses it: programs in several languages, failures, and wrong use."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import tunemq as tune
from tests.acceptance.scripts import write
from tests.support.searches.searches import fit, printed_by, results_of
from tests.support.waiting import eventually
from tunemq_scheduler.journal.journal_files import FILE_NAME

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "executable"

SPACE = "lr: {loguniform: [1e-4, 1e-1]}\n"
#: Its loss is how far the rate is from 0.01, so that the best configuration is known.
TRAIN = """\
#!/bin/bash
set -eu
step=0
[ -n "$TUNEMQ_CHECKPOINT" ] && step=$(cat "$TUNEMQ_CHECKPOINT/step")
while [ "$step" -lt 3 ]; do
  step=$((step + 1))
  echo "$step" > "$TUNEMQ_CHECKPOINT_DIR/.step"
  mv "$TUNEMQ_CHECKPOINT_DIR/.step" "$TUNEMQ_CHECKPOINT_DIR/step"
  echo "epoch $step: loss=$2 epoch=$step"
done
"""
#: Steps take no time, so the test must wait for each to know its checkpoint.
REPORTS = TRAIN.replace(
    'echo "epoch $step: loss=$2 epoch=$step"', "tunemq report loss=$2 epoch=$step"
)


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder with a script and a space, in which `tunemq` is a command."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "tunemq").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tunemq "$@"\n')
    (commands / "tunemq").chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    folder = write(tmp_path / "project", {"space.yaml": SPACE, "train.sh": TRAIN})
    (folder / "train.sh").chmod(0o755)
    return folder


def tunemq(project: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["tunemq", *arguments],
        cwd=project,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done
    return done


def run(project: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    return tunemq(project, "run", *arguments, code=code)


def trials_in(told: dict) -> list[dict]:
    """The last result of each trial of a search with JSON output."""
    files = sorted(Path(told["folder"]).glob("*/result.json"))
    return [json.loads(path.read_text().splitlines()[-1]) for path in files]


# --- programs -------------------------------------------------------------------------------------


def test_run_finds_the_best_configuration_of_a_bash_script(project):
    done = run(
        project,
        "./train.sh", "--lr", "{lr}", "--space", "space.yaml", "--metric", "loss",
        "--num-samples", "5", "--seed", "3",
    )  # fmt: skip

    assert "Each trial runs: ./train.sh --lr '{lr}'" in done.stdout
    assert "5 TERMINATED" in done.stdout
    (folder,) = (project.parent / "tunemq_results").iterdir()
    trials = trials_in({"folder": folder})
    best = re.search(r"best loss: (\S+)", done.stdout)
    assert best
    assert float(best[1]) == min(trial["loss"] for trial in trials)
    assert all(trial["loss"] == trial["config"]["lr"] for trial in trials)
    assert all(trial["training_iteration"] == trial["epoch"] == 3 for trial in trials)
    assert folder.name.startswith("train_")


def test_a_python_script_with_argparse_needs_no_change(project):
    shutil.copy(EXAMPLES / "train.py", project)
    done = run(
        project,
        "--space", "space.yaml", "--metric", "loss", "--num-samples", "2", "--json",
        "--", sys.executable, "train.py", "--lr", "{lr}", "--epochs", "4",
    )  # fmt: skip

    told = json.loads(done.stdout)
    assert told["trials"] == 2
    assert [trial["training_iteration"] for trial in trials_in(told)] == [4, 4]
    assert told["best"]["metrics"]["loss"] == min(trial["loss"] for trial in trials_in(told))
    assert set(told["best"]["config"]) == {"lr"}
    printed = Path(told["best"]["folder"], "stdout").read_text()
    assert printed.startswith("Epoch 1/4 - loss: ")


def test_a_program_that_fails_half_the_time_continues_from_its_checkpoints(project):
    # Every other start of a trial fails, in its second step.
    write(
        project,
        {
            "flaky.sh": REPORTS.replace(
                "tunemq report",
                'if [ "$step" = 2 ] && mkdir "$TUNEMQ_TRIAL_DIR/failed" 2> /dev/null; then'
                ' echo "no luck" >&2; exit 3; fi\n  tunemq report',
            )
        },
    )
    done = run(
        project,
        "--space", "space.yaml", "--metric", "loss", "--num-samples", "4", "--max-failures", "1",
        "--json", "--", "bash", "flaky.sh", "--lr", "{lr}",
    )  # fmt: skip

    told = json.loads(done.stdout)
    assert (told["trials"], told["errors"]) == (4, 0)
    for trial in trials_in(told):
        assert trial["training_iteration"] == trial["epoch"] == 3
        assert trial["iterations_since_restore"] <= 2
    errors = [path.read_text() for path in Path(told["folder"]).glob("*/error.txt")]
    assert len(errors) == 4
    assert all("ended with exit code 3; its stderr ends with:\nno luck" in one for one in errors)
    assert not any("Traceback" in one for one in errors)


def test_program_that_always_fails_is_in_error_with_its_output(project):
    done = run(
        project,
        "--space", "space.yaml", "--metric", "loss", "--", "bash", "-c", "echo why >&2; exit 7",
        code=1,
    )  # fmt: skip

    assert "bash ended with exit code 7; its stderr ends with: why" in done.stdout
    assert "no trial has reported a result" in done.stderr


def test_after_kill_9_of_the_program_its_trial_continues(project):
    write(
        project,
        {
            "slow.sh": REPORTS.replace(
                "tunemq report",
                'if [ "$step" = 3 ] && mkdir "$TUNEMQ_TRIAL_DIR/waits" 2> /dev/null; then'
                ' echo $$ > "$TUNEMQ_TRIAL_DIR/pid"; sleep 600; fi\n  tunemq report',
            )
        },
    )
    search = subprocess.Popen(
        ["tunemq", "run", "--space", "space.yaml", "--metric", "loss", "--max-failures", "1",
         "--json", "--", "bash", "slow.sh", "--lr", "{lr}"],
        cwd=project, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with search:
        noted = project.parent / "tunemq_results"
        eventually(
            lambda: [p for p in noted.glob("*/*/pid") if p.read_text().endswith("\n")], within=60
        )
        (pid,) = noted.glob("*/*/pid")
        os.kill(int(pid.read_text()), signal.SIGKILL)
        told = json.loads(search.communicate()[0])

    assert search.returncode == 0
    (trial,) = trials_in(told)
    # The third step's checkpoint was written, but its result was not printed: it is repeated.
    assert (trial["training_iteration"], trial["iterations_since_restore"]) == (3, 1)
    (error,) = Path(told["folder"]).glob("*/error.txt")
    assert "bash was killed by SIGKILL" in error.read_text()


# --- in a script ----------------------------------------------------------------------------------


def test_asha_stops_programs_with_their_child_processes(project):
    """ASHA also stops a child that survives SIGTERM, and a child in a separate session."""
    write(
        project,
        {
            "family.sh": """
                trap '' TERM
                (trap '' TERM; echo $BASHPID >> "$TUNEMQ_TRIAL_DIR/pids"; exec sleep 600) &
                setsid bash -c 'echo $$ >> "$TUNEMQ_TRIAL_DIR/pids"; exec sleep 600' &
                while [ "$(wc -l < "$TUNEMQ_TRIAL_DIR/pids")" -lt 2 ]; do :; done 2> /dev/null
                for step in 1 2 3 4; do tunemq report "loss=$1"; done
                [ "$1" = 1 ] || sleep 600
            """
        },
    )
    results = fit(
        tune.executable(["bash", "family.sh", "{loss}"], cwd=project),
        {"loss": tune.grid_search([1, 2, 3])},
        metric="loss",
        mode="min",
        max_concurrent_trials=1,
        scheduler=tune.schedulers.ASHAScheduler(max_t=4, grace_period=2, reduction_factor=2),
    )

    steps = [len(results_of(result)) for result in results]
    assert steps == [4, 2, 2]
    assert [result.status for result in results] == ["TERMINATED"] * 3
    pids = [int(pid) for one in results for pid in Path(one.path, "pids").read_text().split()]
    assert len(pids) == 6
    eventually(lambda: not [pid for pid in pids if _runs(pid)])


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_search_in_a_script_gets_the_results_of_its_programs(project, monkeypatch):
    monkeypatch.chdir(project)
    results = fit(
        tune.with_resources(tune.executable(["./train.sh", "--lr", "{opt.lr}"]), {"cpu": 1}),
        {"opt": {"lr": tune.grid_search([0.1, 0.01])}},
        metric="loss",
        mode="min",
        num_to_keep=1,
    )

    best = results.get_best_result()
    assert best.config == {"opt": {"lr": 0.01}}
    assert printed_by(best).splitlines()[-1] == "epoch 3: loss=0.01 epoch=3"
    assert best.checkpoint is not None
    assert os.path.exists(os.path.join(best.checkpoint.path, "step"))


def test_a_debug_run_runs_the_program_here(project, monkeypatch, capfd):
    monkeypatch.chdir(project)
    (result,) = fit(
        tune.executable(["./train.sh", "--lr", "1"]), metric="loss", mode="min", debug=True
    )

    assert result.metrics["training_iteration"] == 3
    assert "epoch 3: loss=1" in capfd.readouterr().out


def test_results_come_from_a_file_of_json_lines(project):
    script = (
        "for i in 1 2 3; do echo '{{\"loss\": '$i', \"lr\": {lr}}}' >> {trial_dir}/log.jsonl; done"
    )
    done = run(
        project,
        "--space", "space.yaml", "--metric", "loss", "--metrics-from", "log.jsonl", "--json",
        "--", "bash", "-c", script,
    )  # fmt: skip

    (trial,) = trials_in(json.loads(done.stdout))
    assert (trial["training_iteration"], trial["loss"]) == (3, 3)


def test_run_with_text_that_steers_a_terminal_prints_it_escaped(project):
    script = r"printf 'bad \033]0;x\007 \302\233 words' >&2; exit 3"
    done = run(
        project, "--metric", "loss", "--", "bash", "-c", script, "\x1b]0;title\x07\x9b2J", code=1
    )  # fmt: skip

    said = done.stdout + done.stderr
    assert r"bad \x1b]0;x\x07 \x9b words" in done.stderr
    assert r"'\x1b]0;title\x07\x9b2J'" in done.stdout
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", said)


def test_ctrl_c_ends_programs_and_keeps_their_results(project):
    search = subprocess.Popen(
        [
            "tunemq", "run", "--metric", "loss", "--name", "mine", "--",
            "bash", "-c", "echo loss=1; echo $$ > {trial_dir}/pid; sleep 600",
        ],
        cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with search:
        folder = project.parent / "tunemq_results" / "mine"
        eventually(
            lambda: [p for p in folder.glob("*/pid") if p.read_text().endswith("\n")], within=60
        )
        eventually(lambda: [p for p in folder.glob("*/result.json") if p.read_text()])
        search.send_signal(signal.SIGINT)
        said, _ = search.communicate()

    assert search.returncode == 130
    assert (folder / FILE_NAME).exists()
    (noted,) = folder.glob("*/pid")
    eventually(lambda: not _runs(int(noted.read_text())))
    assert "best loss: 1" in said


# --- options --------------------------------------------------------------------------------------


def test_every_option_reaches_the_search(project):
    done = run(
        project,
        "--space", "space.yaml", "--metric", "score", "--mode", "max", "--num-samples", "3",
        "--search", "random", "--scheduler", "asha,max_t=2,grace_period=1", "--cpus", "0.5",
        "--max-concurrent", "2", "--max-failures", "2", "--seed", "5", "--time-budget", "600",
        "--name", "named", "--results", "here", "--json", "--cwd", "{trial_dir}",
        "--metrics-from", "report", "--",
        "bash", "-c", "touch made; for i in 1 2 3; do tunemq report score={lr}; done",
    )  # fmt: skip

    told = json.loads(done.stdout)
    assert told["folder"] == str(project / "here" / "named")
    trials = trials_in(told)
    assert max(trial["training_iteration"] for trial in trials) == 2
    assert told["best"]["metrics"]["score"] == max(trial["score"] for trial in trials)
    assert len(list((project / "here" / "named").glob("*/made"))) == 3


def test_without_a_metric_every_configuration_just_runs(project):
    write(project, {"grid.json": '{"a": {"grid_search": [1, 2]}, "b": {"grid_search": [3, 4]}}'})
    done = run(project, "--space", "grid.json", "--", "bash", "-c", "echo {a}{b} >> all")

    assert "4 TERMINATED" in done.stdout
    assert sorted((project / "all").read_text().split()) == ["13", "14", "23", "24"]


def test_run_passes_everything_after_two_dashes_to_the_program(project):
    run(
        project,
        "--metric", "loss", "--name", "ours", "--",
        "bash", "-c", 'echo "$@" > said; echo loss=1', "-", "--name", "theirs", "--", "--help",
    )  # fmt: skip

    assert (project / "said").read_text() == "--name theirs -- --help\n"


def test_run_help_shows_an_example(project):
    told = run(project, "--help").stdout

    assert "tunemq run --space space.yaml --metric loss --num-samples 20 -- ./train.sh" in told
    assert "loguniform" in told
    assert "TUNEMQ_CHECKPOINT_DIR" in told
    assert "run " in tunemq(project, "--help").stdout


# --- the pages ------------------------------------------------------------------------------------


def commands_of(page: str) -> list[str]:
    """The commands that a page shows, as they are typed in the folder of the examples."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ tunemq run ")]


@pytest.mark.parametrize("page", ["docs/executables.md", "README.md"])
def test_every_command_of_the_pages_works(project, page):
    shutil.copytree(EXAMPLES, project, dirs_exist_ok=True)
    commands = commands_of(page)
    assert commands
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command], cwd=project, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done)


def test_the_script_of_the_page_works(project):
    shutil.copytree(EXAMPLES, project, dirs_exist_ok=True)
    text = (ROOT / "docs" / "executables.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=project, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done
    assert "8 TERMINATED" in done.stdout
