"""A program as a trial: its surroundings, its results, its end and its failures."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import eventually
from tests.unit.shared.fakes import World, up_to
from tunemq_shared.base.errors import TrainableError
from tunemq_shared.executables import report_socket
from tunemq_shared.executables.executable import executable
from tunemq_shared.protocol.messages import BlobRef, CheckpointRef, Environment
from tunemq_shared.trainable.run_trial import run_trial

LOSS = {"required_metrics": ("loss",), "finite_metrics": ("loss",)}


class Trials(World):
    """Runs programs in this process, as a trial process does."""

    def run(self, program, config=None, **changes):
        self.finish(program, self.session(config, **(LOSS | changes)))

    def run_again(self, program, **changes):
        self.finish(program, self.restored(**(LOSS | changes)))

    def finish(self, program, session):
        if isinstance(program, str):
            program = executable(["sh", "-c", program])
        run_trial(program, session)

    @property
    def metrics(self):
        return [result.metrics for result in self.channel.results]


def runs(noted: Path) -> bool:
    """Return whether the process with the recorded pid runs; zombies do not count."""
    try:
        return psutil.Process(int(noted.read_text())).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def trials(tmp_path) -> Trials:
    return Trials(tmp_path)


def test_printed_lines_are_results_and_exit_code_0_ends_the_trial(trials):
    trials.run("echo loss=1; echo working; echo loss=0.5 epoch=2; printf loss=0.25")

    assert trials.metrics == [{"loss": 1}, {"loss": 0.5, "epoch": 2}, {"loss": 0.25}]
    assert trials.channel.kinds[-1] == "TrialFinished"


def test_output_of_the_program_is_passed_on(trials, capfd):
    trials.run("echo loss=1; echo other; echo wrong >&2")

    assert capfd.readouterr() == ("loss=1\nother\n", "wrong\n")


def test_arguments_and_variables_contain_the_parameters(trials, monkeypatch):
    monkeypatch.setenv("MINE", "kept")
    program = executable(
        ["sh", "-c", '[ "$MINE" = kept ] && echo "loss=$1 a=$TUNEMQ_PARAM_OPT_A"', "-", "{lr}"]
    )  # fmt: skip
    trials.run(program, {"lr": 0.5, "opt": {"a": 2}})

    assert trials.metrics == [{"loss": 0.5, "a": 2}]


def test_program_finds_this_python_if_the_path_has_none(trials, tmp_path, monkeypatch):
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("tunemq", "sh"):
        (folder / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(folder))
    trials.run("exec python -c 'import tunemq, sys; print(\"loss=1\")'")
    assert trials.metrics == [{"loss": 1}]

    (folder / "python").write_text("#!/bin/sh\necho loss=2\n")
    (folder / "python").chmod(0o755)
    trials.channel.sent.clear()
    trials.run("exec python -c 'unused'")
    assert trials.metrics == [{"loss": 2}]


def test_the_configuration_is_in_a_file(trials):
    trials.run('echo "loss=1 $(cat $TUNEMQ_CONFIG | tr -d "\\n")"', {"deep": {"x": 7}})

    assert trials.metrics == [{"loss": 1, "x": 7}]


def test_program_runs_in_the_folder_of_its_trainable_or_in_the_given_one(
    trials, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("script.sh").write_text("#!/bin/sh\necho loss=1; pwd > $1\n")
    Path("script.sh").chmod(0o755)
    trials.run(executable(["./script.sh", "here"]))
    monkeypatch.chdir("/")
    other = tmp_path / "trial"
    trials.run(executable([str(tmp_path / "script.sh"), "there"], cwd="{trial_dir}"))

    assert (tmp_path / "here").read_text() == f"{tmp_path}\n"
    assert (other / "there").read_text() == f"{other}\n"


def test_program_on_a_farm_is_that_of_the_folder_that_was_sent(
    trials, tmp_path, monkeypatch, capfd
):
    (tmp_path / "sent").mkdir()
    for folder in (tmp_path, tmp_path / "sent"):
        (folder / "script.sh").write_text(f"#!/bin/sh\necho loss=1; echo {folder}; pwd\n")
        (folder / "script.sh").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    sent = {
        "bundle": BlobRef("sha", 0, ""),
        "environment": Environment("", (), {}, (str(tmp_path / "sent"),), inherits=True),
    }
    for cwd in (None, "{trial_dir}"):
        trials.run(executable(["./script.sh"], cwd=cwd), **sent)
    where = f"{tmp_path}/sent\n", f"{tmp_path}/trial\n"

    assert capfd.readouterr().out == "".join(f"loss=1\n{where[0]}{one}" for one in where)


@pytest.mark.parametrize("is_gone", [False, True])
def test_program_on_a_node_without_the_users_folder_runs_in_that_of_the_trial(
    trials, tmp_path, monkeypatch, capfd, is_gone
):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    program = executable(["sh", "-c", "echo loss=1; pwd"])
    monkeypatch.chdir(tmp_path)
    if is_gone:
        (tmp_path / "mine").rmdir()
    trials.run(program, environment=Environment("", (), {}, (), inherits=not is_gone))

    assert capfd.readouterr().out == f"loss=1\n{tmp_path}/trial\n"


def test_name_is_that_of_the_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()

    assert executable(["python3", "train.py"]).__name__ == "train"
    assert executable(["echo", "{lr}"]).__name__ == "echo"
    assert executable(["echo"], name="mine").__name__ == "mine"


# --- checkpoints ----------------------------------------------------------------------------------

COUNTS = """
n=0
[ -n "$TUNEMQ_CHECKPOINT" ] && n=$(cat "$TUNEMQ_CHECKPOINT/n")
while [ $n -lt 4 ]; do
  n=$((n + 1))
  echo $n > "$TUNEMQ_CHECKPOINT_DIR/.n"; mv "$TUNEMQ_CHECKPOINT_DIR/.n" "$TUNEMQ_CHECKPOINT_DIR/n"
  tunemq report loss=1 n=$n || exit 9
  [ $n = "$FAIL_AT" ] && kill -9 $$
done
exit 0
"""


@pytest.fixture(autouse=True)
def _tunemq_on_the_path(tmp_path, monkeypatch):
    """Put this checkout's command on the path, as an installation would."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "tunemq").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tunemq "$@"\n')
    (folder / "tunemq").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(report_socket, "_READ_S", 60.0)  # for a busy machine


def test_program_killed_by_sigkill_continues_from_its_last_checkpoint(trials, monkeypatch):
    monkeypatch.setenv("FAIL_AT", "2")
    trials.run(COUNTS)
    assert "killed by SIGKILL" in trials.channel.failure.error
    trials.channel.sent[:] = [event for event in trials.channel.sent if event.attempt != 1]
    monkeypatch.setenv("FAIL_AT", "0")
    trials.finish(COUNTS, trials.session(restore=(CheckpointRef("trial/1-2", "sha", 2),), **LOSS))

    assert [metrics["n"] for metrics in trials.metrics] == [3, 4]
    assert [result.step for result in trials.channel.results] == [3, 4]


def test_restored_checkpoint_is_a_copy_that_may_be_changed(trials):
    trials.run('echo 1 > "$TUNEMQ_CHECKPOINT_DIR/a"; echo loss=1')
    kept = trials.sink.root / trials.channel.checkpoints[0].key / "a"
    kept.chmod(0o444)
    trials.channel.sent[:] = trials.channel.checkpoints
    trials.run_again('echo 2 > "$TUNEMQ_CHECKPOINT/a" && echo loss=2')

    assert trials.metrics == [{"loss": 2}]
    assert kept.read_text() == "1\n"


def test_program_that_removes_its_checkpoint_folder_has_no_checkpoint(trials):
    trials.run('rmdir "$TUNEMQ_CHECKPOINT_DIR"; echo loss=1')

    assert trials.metrics == [{"loss": 1}]
    assert trials.channel.kinds[-1] == "TrialFinished"


def test_hidden_file_is_not_taken_as_a_checkpoint(trials):
    trials.run('echo 1 > "$TUNEMQ_CHECKPOINT_DIR/.unfinished"; echo loss=1')

    assert trials.channel.checkpoints == []


def test_checkpoint_after_the_last_result_belongs_to_that(trials):
    proceed = trials.touched_when_sent("proceed")  # earlier files may be sent with the line itself
    trials.run(
        f"echo loss=1; until [ -e {proceed} ]; do sleep 0.05; done; "
        'echo 7 > "$TUNEMQ_CHECKPOINT_DIR/end"'
    )

    (kept,) = trials.channel.checkpoints
    assert kept.step == 1
    assert (trials.sink.root / kept.key / "end").read_text() == "7\n"


def test_files_of_a_failed_program_after_its_last_result_are_no_checkpoint(trials):
    trials.run('tunemq report loss=1; echo half > "$TUNEMQ_CHECKPOINT_DIR/end"; exit 3')

    assert trials.channel.checkpoints == []


def test_report_accepts_any_folder_as_a_checkpoint(trials, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model").write_text("m")
    trials.run(f'tunemq report loss=1 --checkpoint "{tmp_path}/mine" && '
               'mkdir "$TUNEMQ_CHECKPOINT_DIR/x" && touch "$TUNEMQ_CHECKPOINT_DIR/x/y" && '
               'tunemq report loss=2 --checkpoint="$TUNEMQ_CHECKPOINT_DIR/x"')  # fmt: skip

    first, second = (trials.sink.root / kept.key for kept in trials.channel.checkpoints)
    assert (first / "model").read_text() == "m"
    assert (tmp_path / "mine" / "model").exists()
    assert os.listdir(second) == ["y"]


def test_ended_program_leaves_no_files_in_the_trials_folder(trials):
    trials.run('touch "$TUNEMQ_CHECKPOINT_DIR/a"; tunemq report loss=1')

    assert os.listdir(trials.folder / "trial") == []


# --- tunemq report, files, patterns ---------------------------------------------------------------


def test_report_waits_until_the_trial_may_continue(trials, tmp_path):
    first = tmp_path / "first"
    session = trials.session(run_until=up_to(1), **LOSS)
    runner = threading.Thread(
        target=trials.finish,
        args=(f"tunemq report loss=1; touch {first}; tunemq report loss=2", session),
    )

    def wait():
        eventually(lambda: len(trials.channel.results) == 1)
        assert not first.exists()
        return trials.order()

    trials.channel.wait = wait
    runner.start()
    runner.join(60)

    assert first.exists()
    assert trials.metrics == [{"loss": 1}, {"loss": 2}]


def test_report_accepts_json_and_text(trials):
    trials.run("""tunemq report '{{"loss": 1, "deep": {{"x": [1]}}}}' note=fine ok=true n=1_000""")

    assert trials.metrics == [
        {"loss": 1, "deep": {"x": [1]}, "note": "fine", "ok": True, "n": "1_000"}
    ]


def test_report_explains_an_error_and_the_program_may_try_again(trials, capfd):
    trials.run(
        "tunemq report loss=nan && exit 9; tunemq report acc=1 && exit 9; tunemq report loss=1"
    )

    assert trials.metrics == [{"loss": 1}]
    assert "tunemq report: Metric 'loss' is nan" in capfd.readouterr().err


def test_lines_are_ignored_once_report_was_called(trials):
    trials.run("tunemq report loss=1; echo loss=2; tunemq report loss=3; echo loss=4")

    assert trials.metrics == [{"loss": 1}, {"loss": 3}]


def test_duplicate_results_are_rejected(trials):
    proceed = trials.touched_when_sent("proceed")
    trials.run(
        f"echo loss=1; until [ -e {proceed} ]; do sleep 0.05; done; tunemq report loss=1; sleep 600"
    )

    assert "metrics_from='report'" in trials.channel.failure.error


def test_lines_are_ignored_where_only_reports_count(trials):
    trials.run(executable(["sh", "-c", "echo loss=1; tunemq report loss=2"], metrics_from="report"))

    assert trials.metrics == [{"loss": 2}]


def test_growing_file_of_json_lines_is_read(trials):
    script = (
        'f="$TUNEMQ_TRIAL_DIR/log.jsonl"; echo \'{{"loss": 1}}\' > $f; echo loss=9; '
        'until [ -e "$0" ]; do sleep 0.05; done; '
        "echo '{{\"other\": 1}}' >> $f; printf '{{\"loss\": 2}}' >> $f"
    )
    proceed = trials.touched_when_sent("proceed")
    trials.run(executable(["sh", "-c", script, str(proceed)], metrics_from="log.jsonl"))

    assert trials.metrics == [{"loss": 1}, {"loss": 2}]


def test_pattern_finds_metrics_in_other_lines(trials):
    trials.run(executable(["echo", "final loss 0.3"], pattern=r"loss (?P<loss>\S+)"))

    assert trials.metrics == [{"loss": 0.3}]


# --- failures -------------------------------------------------------------------------------------


def test_other_exit_code_is_a_failure_with_the_end_of_stderr(trials, tmp_path):
    # The failure's text comes from the file that is the program's stderr.
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path\n"
        "from tests.unit.shared.executables.test_executables import Trials\n"
        "trials = Trials(Path(sys.argv[1]))\n"
        "trials.run('echo loss=1; echo first >&2; echo out of memory >&2; exit 3')\n"
        "print(repr(trials.channel.failure))\n"
    )
    with (tmp_path / "err").open("w") as err:
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parents[4])],
            stdout=subprocess.PIPE, stderr=err, text=True, check=True,
        )  # fmt: skip

    assert "sh ended with exit code 3; its stderr ends with: first out of memory" in done.stdout
    assert "Traceback" not in done.stdout


def test_gpu_memory_error_is_recognized_by_its_message():
    from tunemq_shared.base.errors import ExecutableFailed
    from tunemq_shared.trial import memory_errors

    error = ExecutableFailed("x ended with exit code 1; its stderr ends with:\nCUDA out of memory.")
    assert memory_errors.kind_of(error) == "cuda_memory"


def test_exit_code_0_without_a_result_is_an_error_that_shows_the_output(trials):
    trials.run("echo accuracy=1 Loss=2")

    failure = trials.channel.failure
    assert failure.kind == "metric"
    assert "ended without a result: 'loss'" in failure.error
    assert "Printed were 'accuracy', 'Loss'" in failure.error


def test_without_a_metric_a_program_just_runs(trials):
    trials.finish("echo loss=1", trials.session())

    assert trials.channel.kinds == ["TrialFinished"]


def test_program_that_cannot_be_executed_is_reported(trials, tmp_path):
    script = tmp_path / "noline.sh"
    script.write_text("echo loss=1\n")
    script.chmod(0o755)
    trials.run(executable([str(script)]))

    assert "begin with a line such as #!/bin/sh" in trials.channel.failure.error


def test_metric_that_is_no_finite_number_fails_the_trial(trials):
    trials.run("echo loss=nan; sleep 600")

    assert "Metric 'loss' is nan" in trials.channel.failure.error


# --- ends -----------------------------------------------------------------------------------------

#: A program with a child that runs longer; both record the signal to end.
FAMILY = """
trap 'echo term > "$0/parent"; exit 0' TERM
sh -c '
  trap "sleep 0.3; echo term > $0/child; exit 0" TERM
  echo $$ > $0/pid
  while :; do sleep 0.05; done
' "$0" &
child=$!
until [ -s "$0/pid" ]; do sleep 0.02; done
echo loss=1
while :; do sleep 0.05; done
"""


def test_stop_during_a_step_signals_the_whole_process_tree(trials, tmp_path):
    session = trials.session(stop_grace_s=60.0, **LOSS)
    trials.channel.notices.append(trials.order())
    order = trials.order(stop=True)

    def poll():
        return order if trials.channel.results and (tmp_path / "pid").exists() else None

    trials.channel.poll = poll
    trials.finish(executable(["sh", "-c", FAMILY, str(tmp_path)]), session)

    assert (tmp_path / "parent").read_text() == "term\n"
    assert (tmp_path / "child").read_text() == "term\n"
    eventually(lambda: not runs(tmp_path / "pid"))
    assert "TrialFailed" not in trials.channel.kinds


def test_program_that_ignores_a_stop_is_killed_with_its_children(trials, tmp_path):
    script = (
        "trap '' TERM; sleep 600 & echo $! > \"$0/pid\"; echo loss=1; while :; do sleep 0.05; done"
    )
    session = trials.session(run_until=up_to(1), stop_grace_s=1.6, **LOSS)
    trials.channel.waited_for.append(trials.order(stop=True))
    trials.finish(executable(["sh", "-c", script, str(tmp_path)]), session)

    eventually(lambda: not runs(tmp_path / "pid"))


def test_children_of_an_ended_program_are_killed(trials, tmp_path):
    trials.run(f"sleep 600 & echo $! > {tmp_path}/pid; echo loss=1")

    assert trials.channel.kinds[-1] == "TrialFinished"
    eventually(lambda: not runs(tmp_path / "pid"))


def test_child_that_prints_without_end_does_not_keep_the_trial_of_an_ended_program(trials):
    trials.run("yes & yes & echo loss=1; sleep 0.5")

    assert trials.channel.kinds[-1] == "TrialFinished"


def test_metrics_file_that_is_a_fifo_fails_the_trial_at_once(trials):
    script = 'mkfifo "$TUNEMQ_TRIAL_DIR/m.jsonl"; sleep 600'
    trials.run(executable(["sh", "-c", script], metrics_from="m.jsonl"))

    assert "m.jsonl is not a regular file" in trials.channel.failure.error


def test_checkpoint_folder_that_became_a_link_keeps_what_it_leads_to(trials, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").write_text("m")
    script = f'rmdir "$TUNEMQ_CHECKPOINT_DIR"; ln -s {tmp_path}/data "$TUNEMQ_CHECKPOINT_DIR"; '
    trials.run(script + "echo loss=1; sleep 1")

    assert "by a link" in trials.channel.failure.error
    assert (tmp_path / "data" / "mine").read_text() == "m"


def paused(trials, exit_code: int, report: str = "echo loss=1") -> list[str]:
    """Pause a program that saves on SIGTERM and exits; return the content of its checkpoints."""
    script = (
        f"trap 'echo late > \"$TUNEMQ_CHECKPOINT_DIR/n\"; exit {exit_code}' TERM; "
        f'echo early > "$TUNEMQ_CHECKPOINT_DIR/n"; {report}; while :; do sleep 0.05; done'
    )
    session = trials.session(run_until=up_to(1), stop_grace_s=60.0, **LOSS)
    trials.channel.waited_for.append(trials.order(pause=True))
    trials.finish(script, session)

    assert trials.channel.kinds[-1] == "TrialPaused"
    kept = [trials.sink.root / one.key / "n" for one in trials.channel.checkpoints]
    return [path.read_text() for path in kept]


def test_paused_program_that_saves_on_sigterm_loses_nothing(trials):
    assert paused(trials, exit_code=0) == ["early\n", "late\n"]


def test_what_a_program_saves_that_is_paused_while_it_reports_is_no_checkpoint(trials):
    """It may save the step before: the call has not said that its result counts."""
    assert paused(trials, exit_code=0, report="tunemq report loss=1") == ["early\n"]


@pytest.mark.parametrize("end", ["kill -9 $$", "exit 3"])
@pytest.mark.parametrize("source", ["stdout", "m.jsonl"])
def test_last_line_of_a_program_that_failed_counts_only_with_its_line_end(trials, source, end):
    if source == "stdout":
        script = f"echo loss=2; printf loss=1; {end}"
        program = executable(["sh", "-c", script])
    else:
        lines = '\'{{"loss": 2}}\\n{{"loss": 1\''
        script = f'printf {lines} > "$TUNEMQ_TRIAL_DIR/m.jsonl"; {end}'
        program = executable(["sh", "-c", script], metrics_from=source)
    trials.run(program)

    assert trials.metrics == [{"loss": 2}]
    assert ("SIGKILL" if "kill" in end else "exit code 3") in trials.channel.failure.error


def test_files_of_a_paused_program_that_fails_are_no_checkpoint(trials):
    assert paused(trials, exit_code=143) == ["early\n"]


STEPS = (
    "trap 'echo late > \"$TUNEMQ_CHECKPOINT_DIR/n\"; exit 0' TERM; "
    "for n in 1 2 3; do echo $n > $TUNEMQ_TRIAL_DIR/.n; "
    'mv $TUNEMQ_TRIAL_DIR/.n "$TUNEMQ_CHECKPOINT_DIR/n"; echo loss=$n; '
    'while test -e "$TUNEMQ_CHECKPOINT_DIR/n"; do sleep 0.01; done; done; '
    "touch $TUNEMQ_TRIAL_DIR/did; while :; do sleep 0.05; done"
)


def steps_ahead(trials, session, told=None, program=STEPS):
    """Run a program that has done its steps when its first result is handled; ``told`` comes then.

    Return the step and the content of each checkpoint.
    """
    did, send = Path(session.start.folder, "did"), trials.channel.send

    def send_late(event):
        eventually(did.exists)
        if told is not None and not trials.channel.sent:
            trials.channel.notices.append(told)
        send(event)

    trials.channel.send = send_late
    trials.finish(program, session)
    kept = [(one.step, trials.sink.root / one.key / "n") for one in trials.channel.checkpoints]
    return [(step, path.read_text().strip()) for step, path in kept]


def test_results_that_a_paused_program_had_printed_are_reported_with_their_checkpoints(trials):
    session = trials.session(stop_grace_s=60.0, **LOSS)
    checkpoints = steps_ahead(trials, session, trials.order(pause=True))
    assert [metrics["loss"] for metrics in trials.metrics] == [1, 2, 3]
    assert checkpoints == [(1, "1"), (2, "2"), (3, "3"), (3, "late")]
    assert trials.channel.kinds[-1] == "TrialPaused"


def test_program_that_is_paused_beyond_its_horizon_repeats_what_it_did_there(trials):
    session = trials.session(run_until=up_to(2), stop_grace_s=60.0, **LOSS)
    checkpoints = steps_ahead(trials, session, trials.order(up_to(2), pause=True))
    assert [metrics["loss"] for metrics in trials.metrics] == [1, 2]
    assert checkpoints == [(1, "1"), (2, "2")]
    assert trials.channel.kinds[-1] == "TrialPaused"


def test_of_many_results_that_wait_only_the_newest_keeps_its_checkpoint(trials):
    ends = STEPS.replace("1 2 3", "$(seq 1 200)").replace("while :; do sleep 0.05; done", "exit")
    checkpoints = steps_ahead(trials, trials.session(**LOSS), program=ends)
    assert [metrics["loss"] for metrics in trials.metrics] == list(range(1, 201))
    assert all(str(step) == found for step, found in checkpoints)
    assert {step for step, _ in checkpoints} >= {1, 50, 200}
    assert len(checkpoints) < 80


def test_program_that_prints_without_end_can_be_stopped(trials):
    session = trials.session(run_until=up_to(1), **LOSS)
    trials.channel.waited_for.append(trials.order(stop=True))
    trials.finish("while :; do echo loss=1; done", session)

    assert len(trials.metrics) == 1


def test_ten_thousand_lines_arrive_in_order(trials):
    trials.run("i=0; while [ $i -lt 10000 ]; do i=$((i + 1)); echo loss=$i; done")

    assert [metrics["loss"] for metrics in trials.metrics] == list(range(1, 10_001))


# --- before the start -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "options", "told"),
    [
        ("./train.sh --lr {lr}", {}, "give a list of texts"),
        ([], {}, "give a list of texts"),
        (["./nothere.sh"], {}, "there is none at"),
        (["nosuchcommand"], {}, "no command 'nosuchcommand'"),
        (["/etc/passwd"], {}, "chmod"),
        (["echo", "{lr"], {}, "without its partner"),
        (["echo"], {"metrics_from": ""}, "metrics_from"),
        (["echo"], {"metrics_from": "/tmp/x"}, "all trials would write that file"),
        (["echo"], {"pattern": "("}, "no regular expression"),
        (["echo"], {"pattern": "x"}, "no named group"),
        (["echo"], {"pattern": "(?P<x>.)", "metrics_from": "report"}, "leave one"),
    ],
)
def test_invalid_command_is_rejected_at_once(command, options, told):
    if command == ["/etc/passwd"] and os.access("/etc/passwd", os.X_OK):
        pytest.skip("everything can be executed here")
    with pytest.raises(TrainableError, match=told):
        executable(command, **options)


# --- tunemq report outside of a trial -------------------------------------------------------------


def report(*arguments: str, code: int) -> str:
    done = subprocess.run(
        ["tunemq", "report", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done
    return done.stdout + done.stderr


def test_report_outside_a_trial_is_rejected():
    assert "no trial runs here" in report("loss=1", code=64)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "nothing to report"),
        (("loss",), "'loss' is no metric"),
        (("--los=1",), "is no metric"),
        (("loss=1", "--checkpoint"), "needs a folder"),
        (("loss=1", "--checkpoint", "/nothere"), "is no folder"),
        (("{1",), "no JSON object"),
    ],
)
def test_report_explains_invalid_arguments(arguments, told):
    assert told in report(*arguments, code=64)


def test_report_tells_that_the_trial_has_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEMQ_REPORT", str(tmp_path / "gone"))

    assert "it has ended" in report("loss=1", code=1)


def test_report_has_help():
    assert "usage: tunemq report" in report("--help", code=0)


def test_report_imports_no_other_module_of_tunemq():
    code = (
        "import sys; from tunemq.__main__ import main; main(['report', '--help']); "
        "print(*(n for n in sys.modules if n.startswith('tunemq_') or n == 'argparse'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert sorted(done.stdout.splitlines()[-1].split()) == [
        "tunemq_shared",
        "tunemq_shared.executables",
        "tunemq_shared.executables.report_command",
    ]


#: Continues to write after its attempt has ended, as on a machine that was cut off.
LOST = """
setsid sh -c 'echo $$ > pid; while :; do
    echo "{{\\"loss\\": 9}}" >> $TUNEMQ_TRIAL_DIR/m.jsonl
    touch $TUNEMQ_CHECKPOINT_DIR/lost; sleep 0.05
done' > /dev/null 2>&1 &
while ! grep -q 9 $TUNEMQ_TRIAL_DIR/m.jsonl; do sleep 0.02; done
sleep 0.3
"""


def test_lost_attempt_in_a_shared_folder_changes_nothing_of_the_next_one(trials, tmp_path):
    def program(text):
        return executable(["sh", "-c", text], cwd=str(tmp_path), metrics_from="{trial_dir}/m.jsonl")

    trials.run(program(LOST), is_shared=True)
    assert {one["loss"] for one in trials.metrics} == {9}
    before = len(trials.metrics)
    try:
        assert runs(tmp_path / "pid")
        trials.run(
            program(
                "sleep 0.5; touch $TUNEMQ_CHECKPOINT_DIR/mine;"
                """ echo '{{"loss": 2}}' >> $TUNEMQ_TRIAL_DIR/m.jsonl; sleep 0.5"""
            ),
            is_shared=True,
        )
        assert runs(tmp_path / "pid")
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    assert trials.metrics[before:] == [{"loss": 2}]
    files = os.listdir(trials.sink.root / trials.channel.checkpoints[-1].key)
    assert "mine" in files
    assert "lost" not in files
