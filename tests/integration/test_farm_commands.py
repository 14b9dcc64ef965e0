"""The user commands of a farm: their output for people and programs, and their exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.farm_support import RedisServer
from tests.integration.node_fixtures import server
from tests.support.farms.farm_api_server import ServedApi, served
from tests.support.waiting import eventually
from tunemq.__main__ import main
from tunemq_scheduler.api.farm_answer_types import ExperimentState as State
from tunemq_scheduler.farm.service import farm_api
from tunemq_shared.protocol.farm_requests import ScriptCode

__all__ = ["server"]

pytestmark = pytest.mark.integration

SCRIPT = "import tunemq as tune\nraise SystemExit('this does not run here')\n"


@pytest.fixture
def api(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ServedApi]:
    monkeypatch.setenv("TUNEMQ_REDIS", server.url)
    monkeypatch.setenv("LOGNAME", "ann")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    with served(server.url, server.client, tmp_path) as api:
        yield api


@pytest.fixture
def tunemq(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that runs the command, checks its exit code, and returns its output."""

    def run(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main(arguments) == code, capsys.readouterr()
        captured = capsys.readouterr()
        run.err = captured.err
        return captured.out

    return run


@pytest.fixture
def queued(api: ServedApi, tunemq: Any) -> ServedApi:
    tunemq("submit", "train.py", "--name", "exp", "--detach")
    return api


def as_json(text: str) -> Any:
    return json.loads(text)


def test_submit_passes_on_all_options_of_a_script(api, tunemq):
    name = tunemq(
        *("submit", "train.py:other", "--name", "exp", "--owner", "bob", "--priority", "-3"),
        *("--python", "/venv/bin/python", "--env", "A=1=2", "--env", "B=", "--preload", "a.b, c"),
        "--detach",
    )

    entry = api.queue.get("exp")
    assert name == "exp\n"
    assert (entry.owner, entry.priority) == ("bob", -3)
    assert isinstance(entry.code, ScriptCode)
    assert (entry.code.script, entry.code.tuner) == ("train.py", "other")
    assert (api.folder / "store" / "blobs" / entry.code.bundle.sha256).stat().st_size > 0
    assert entry.settings.python == "/venv/bin/python"
    assert entry.settings.variables == {"A": "1=2", "B": ""}
    assert entry.settings.preload == ("a.b", "c")


def test_submit_variable_without_a_value_takes_it_from_the_environment(api, tunemq, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hidden")
    tunemq("submit", "train.py", "--name", "exp", "--env", "WANDB_API_KEY", "--detach")
    assert api.queue.get("exp").settings.variables == {"WANDB_API_KEY": "hidden"}


def test_command_with_a_password_among_its_arguments_warns(tunemq):
    tunemq("ls", "--redis", "redis://:hidden@127.0.0.1:1/0", code=69)
    assert "see the password in --redis; set TUNEMQ_REDIS instead" in tunemq.err
    assert "hidden" not in tunemq.err


def test_submit_without_name_or_owner_makes_a_name_and_uses_the_login(api, tunemq):
    told = as_json(tunemq("submit", "train.py", "--detach", "--json"))
    assert told["name"].startswith("train_20")
    assert api.queue.get(told["name"]).owner == "ann"
    assert told == {"name": told["name"], "id": api.queue.get(told["name"]).id, "ahead": 0}


def test_submit_shows_the_progress_until_it_has_ended(api, tunemq):
    def live():
        eventually(lambda: api.queue.get("exp"))
        api.run("exp")
        log = api.folder / "exp.log"
        log.write_text("trial 1 runs\n")
        eventually(lambda: "trial 1" in log.read_text())
        with log.open("a") as file:
            file.write("trial 1 has ended\n")
        api.end("exp", State.FINISHED, "8 trials have ended")

    living = threading.Thread(target=live)
    living.start()
    out = tunemq("submit", "train.py", "--name", "exp")
    living.join()

    assert out == "trial 1 runs\ntrial 1 has ended\n"
    assert "exp is FINISHED: 8 trials have ended" in tunemq.err


def test_submit_ends_with_1_where_the_experiment_fails(api, tunemq):
    def live():
        eventually(lambda: api.queue.get("exp"))
        api.run("exp")
        api.end("exp", State.FAILED, "its callback raised")

    living = threading.Thread(target=live)
    living.start()
    out = as_json(tunemq("submit", "train.py", "--name", "exp", "--json", code=1))
    living.join()

    assert out["experiment"]["state"] == "FAILED"
    assert "its callback raised" in tunemq.err


def test_ctrl_c_of_submit_leaves_the_experiment_running_and_says_so(api):
    process = subprocess.Popen(
        [sys.executable, "-m", "tunemq", "submit", "train.py", "--name", "exp"],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    eventually(lambda: api.queue.get("exp"), within=60)
    (api.folder / "exp.log").write_text("it runs\n")
    assert process.stdout.readline() == "it runs\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)

    assert process.returncode == 130
    assert "exp continues. Follow it with: tunemq logs -f exp" in err
    assert api.queue.get("exp").state is State.QUEUED


def test_ls_prints_a_table_or_json(queued, tunemq):
    tunemq("submit", "train.py", "--name", "old", "--detach", "--owner", "bob")
    tunemq("stop", "old")
    tunemq("submit", "train.py", "--name", "next", "--detach", "--owner", "bob")
    queued.run("exp")

    lines = tunemq("ls").splitlines()
    rows = as_json(tunemq("ls", "--json"))["experiments"]

    assert lines[0].split() == ["name", "state", "owner", "prio", "trials", "age", "ran"]
    assert [line.split()[:2] for line in lines[2:]] == [
        ["exp", "RUNNING"],
        ["next", "QUEUED"],
        ["old", "STOPPED"],
    ]
    assert "1/8, 2 running" in lines[2]
    assert "stopped by ann" in lines[4]
    assert [row["name"] for row in rows] == ["exp", "next", "old"]
    assert rows[0]["trials"] == {"RUNNING": 2, "TERMINATED": 1}
    assert rows[1]["position"] == 0
    assert len(as_json(tunemq("ls", "--owner", "bob", "--json"))["experiments"]) == 2
    assert "old" not in tunemq("ls", "--active")


def test_show_prints_the_experiment_and_its_trials(queued, tunemq):
    assert "QUEUED: next" in tunemq("show", "exp")
    queued.run("exp")

    out = tunemq("show", "exp")
    told = as_json(tunemq("show", "exp", "--json", "--trials", "1"))

    assert "best    loss 0.5" in out
    assert "aaaaa_00001" in out
    assert [trial["trial"] for trial in told["trials"]] == ["aaaaa_00000"]
    assert told["experiment"]["owner"] == "ann"


def test_logs_prints_all_lines_the_tail_or_json(queued, tunemq):
    text = "".join(f"line {number}\n" for number in range(50_000))
    (queued.folder / "exp.log").write_text(text)
    (queued.folder / "exp-aaaaa_00000.log").write_text("of a trial\n")

    assert tunemq("logs", "exp") == text
    assert tunemq("logs", "exp", "--tail", "25") == "line 49998\nline 49999\n"
    assert tunemq("logs", "exp/aaaaa_00000") == tunemq("logs", "exp", "aaaaa_00000")
    pages = [as_json(line) for line in tunemq("logs", "exp", "--json").splitlines()]
    assert "".join(page["text"] for page in pages) == text
    assert pages[-1]["end"] == pages[-1]["size"] == len(text)


def test_help_of_logs_says_that_the_tail_is_in_bytes(capsys):
    with pytest.raises(SystemExit):
        main(["logs", "--help"])
    assert "in its last BYTES bytes" in " ".join(capsys.readouterr().out.split())


def test_logs_are_followed_to_the_experiments_end(queued, tunemq):
    queued.run("exp")
    (queued.folder / "exp.log").write_text("one\n")

    def live():
        queued.end("exp", State.FINISHED)

    ending = threading.Timer(0.5, live)
    ending.start()
    assert tunemq("logs", "-f", "exp") == "one\n"
    assert "exp is FINISHED" in tunemq.err


def test_commands_print_each_change_as_a_line_and_as_json(queued, tunemq):
    assert tunemq("pause", "exp") == "exp is paused\n"
    assert tunemq("resume", "exp") == "exp is queued again\n"
    queued.run("exp")
    assert "aaaaa_00001 is being stopped" in tunemq("stop", "exp/aaaaa_00001")
    assert tunemq("retry", "exp", "aaaaa_00001") == "continues\n"
    told = as_json(tunemq("stop", "exp", "--json"))
    assert told == {
        "text": "exp is being stopped; its trials save first",
        "state": "STOPPING",
    }
    queued.end("exp", State.STOPPED)
    assert tunemq("rm", "exp") == "exp is removed; its files remain\n"


def test_resume_of_a_stopped_search_says_that_ended_trials_stay_ended(queued, tunemq):
    tunemq("stop", "exp")
    said = tunemq("resume", "exp")
    assert said == "exp is queued again; trials that the stop ended stay ended\n"


def test_retry_of_a_stopped_search_says_that_ended_trials_stay_ended(queued, tunemq):
    tunemq("stop", "exp")
    said = tunemq("retry", "exp")
    assert said == "exp is queued again; trials that the stop ended stay ended\n"


def test_rm_removes_files_only_when_confirmed(queued, tunemq, monkeypatch):
    tunemq("stop", "exp")
    monkeypatch.setattr("builtins.input", lambda: "n")
    tunemq("rm", "exp", "--files", code=1)
    assert queued.queue.get("exp") is not None
    out = tunemq("rm", "exp", "--files", "--yes")
    assert out == "exp is removed with its results and checkpoints\n"
    assert queued.experiments.told == [("remove_files", "exp"), ("forget", "exp")]


def test_rm_says_where_files_may_still_arrive_that_nodes_upload(queued, tunemq):
    queued.experiments.stored_at = "s3://bucket/exp"
    tunemq("stop", "exp")
    assert tunemq("rm", "exp", "--files", "--yes") == (
        "exp is removed with its results and checkpoints; if a node still uploads files of its "
        "trials, they stay in s3://bucket/exp\n"
    )


def test_rm_says_nothing_of_uploads_long_after_the_end_of_a_search(queued, tunemq, monkeypatch):
    queued.experiments.stored_at = "s3://bucket/exp"
    tunemq("stop", "exp")
    monkeypatch.setattr(farm_api, "_UPLOADED_WITHIN_S", 0.0)
    out = tunemq("rm", "exp", "--files", "--yes")
    assert out == "exp is removed with its results and checkpoints\n"


def test_why_prints_the_reason(queued, tunemq):
    assert tunemq("why", "exp").splitlines()[0] == "exp is QUEUED"
    queued.run("exp")
    assert "no node has 1 gpu free" in tunemq("why", "exp/aaaaa_00000")
    assert as_json(tunemq("why", "exp", "--json"))["lines"]


def test_nodes_are_listed_drained_taken_back_and_retired(api, tunemq):
    lines = tunemq("nodes").splitlines()
    told = as_json(tunemq("nodes", "--json"))["nodes"]

    assert lines[2].split()[:3] == ["alpha", "ready", "ok"]
    assert "cpu 3/8  gpu 0.5/1" in lines[2]
    assert "1 x H100" in lines[2]
    assert told[0]["gpus"][0]["used"] == 0.5
    assert "1 of 2 x T4, 1 x H100 MIG 1g.10gb" in lines[3]
    assert lines[4:] == [
        "GPU GPU-2 of node beta is set aside: XID 79",
        "other processes use GPU GPU-3 of node beta: process 12 (python) holds 1 GiB",
    ]
    assert [gpu["withheld"] for gpu in told[1]["gpus"]] == ["XID 79", None, None]
    assert tunemq("nodes", "drain", "alpha") == "alpha-1 is drained\n"
    tunemq("nodes", "resume", "beta")
    tunemq("nodes", "retire", "beta-1")
    assert api.nodes.told == [
        ("drain", "alpha-1", "drained by ann"),
        ("resume", "beta-1"),
        ("retire", "beta-1", "retired by ann"),
    ]


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ("submit missing.py", 64, "the script missing.py does not exist"),
        ("submit train.py:a-b", 64, "write SCRIPT:NAME"),
        ("submit train.py --name a/b", 64, "use 'ab'"),
        ("submit train.py --name exp", 64, "the experiment exp exists already, and is QUEUED"),
        ("submit train.py --env =X", 64, "--env '=X' is invalid: write NAME=VALUE, or NAME"),
        ("submit train.py --env X", 64, "--env X takes the value from your environment"),
        ("submit train.py --preload a-b", 64, "--preload 'a-b' is not the name of a module"),
        ("submit train.py --folder nowhere", 64, "--folder nowhere is not a folder"),
        ("submit train.py --owner a/b --detach", 1, "the owner 'a/b' is invalid"),
        ("show expp", 64, "the experiment 'expp' does not exist; did you mean exp?"),
        (
            "logs exp/aaaa_00000",
            64,
            "the trial 'aaaa_00000' does not exist; did you mean aaaaa_00000",
        ),
        ("stop exp/a b", 64, "names two trials"),
        ("stop exp a", 1, "experiment exp is QUEUED, so none of its trials can be stopped"),
        ("retry exp", 1, "experiment exp waits; no trial of it is in ERROR"),
        ("rm exp", 1, "experiment exp is QUEUED; stop it first: tunemq stop exp"),
        ("pause nothing", 64, "the experiment 'nothing' does not exist; it can be: exp"),
        ("nodes drain", 64, "name the node: tunemq nodes drain NODE"),
        ("nodes drain alfa", 64, "the node 'alfa' does not exist; did you mean alpha?"),
    ],
)
def test_wrong_use_is_an_error_that_says_what_to_do(queued, tunemq, line, code, told):
    tunemq(*line.split(), code=code)
    assert told in tunemq.err
    assert tunemq.err.count("\n") == 1


@pytest.mark.parametrize("line", ["show", "nodes dance", "ls --dance", "logs exp --tail -1", "why"])
def test_invalid_arguments_end_with_2(line):
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2


def test_command_without_a_redis_that_answers_says_what_to_do(tunemq, monkeypatch):
    monkeypatch.delenv("TUNEMQ_REDIS", raising=False)
    tunemq("ls", code=64)
    assert "TUNEMQ_REDIS" in tunemq.err
    tunemq("ls", "--redis", "redis://localhost:1", code=69)
    assert "cannot be reached" in tunemq.err
    tunemq("ls", "--redis", "http://localhost", code=64)
    assert "redis://user:password@host:6379/0" in tunemq.err


def test_a_farm_without_a_scheduler_ends_with_75(server, tunemq):
    tunemq("ls", "--redis", server.url, code=75)
    assert "tunemq scheduler" in tunemq.err


def test_names_from_programs_are_escaped(api, tunemq):
    tunemq("submit", "train.py", "--name", "exp", "--detach")
    with api.lock:
        api.queue.explain("exp", "bad \x1b[31m [bold]thing")
    out = tunemq("ls")
    assert "\x1b" not in out
    assert "[bold]thing" in out
