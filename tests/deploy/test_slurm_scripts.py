"""The scripts for SLURM, with a program that only records its arguments."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.farms.slurm import Job, Slurm
from tests.support.waiting import eventually
from tunemq_scheduler.storage.folders import farm_results_folder

pytestmark = pytest.mark.integration

_SCRIPTS = Path(__file__).parents[2] / "deploy" / "slurm"
_PAGE = Path(__file__).parents[2] / "docs" / "deploy" / "slurm.md"
_BATCH = _SCRIPTS / "tunemq.sbatch"
#: Records its arguments, then ends at a SIGTERM, or as the variables say.
_PROGRAM = """\
#!/bin/sh
echo "$0 $*"
echo "redis=${TUNEMQ_REDIS:-} odd=${ODD:-} mine=${MINE:-} tasks=${SLURM_NTASKS:-}"
echo "path=$PATH"
trap 'echo "got SIGTERM"; exit "${ENDS:-0}"' TERM
[ -z "${ENDS_AT_ONCE:-}" ] || exit "$ENDS_AT_ONCE"
echo waiting
while :; do sleep 60 & wait "$!"; done
"""


class World:
    """A cluster, and the folder of a worker."""

    def __init__(self, folder: Path, **how: object) -> None:
        self.home = folder / "home"
        self.home.mkdir()
        self.program = folder / "tunemq"
        self.program.write_text(_PROGRAM)
        self.program.chmod(0o755)
        self.config = self.home / "worker"
        self.config.mkdir(mode=0o700)
        self.write("TUNEMQ_REDIS=redis://head:6379/0")
        self.slurm = Slurm(folder / "slurm", self.home, **how)

    def write(self, *lines: str) -> None:
        """The settings."""
        text = "\n".join([f"TUNEMQ_PROGRAM={self.program}", *lines])
        (self.config / "environment").write_text(text)  # without a newline at the end

    def starts(self, *options: str, role: str = "worker", more: tuple[str, ...] = ()) -> Job:
        """A job that runs, and waits."""
        (job,) = self.slurm.sbatch(*options, _BATCH, role, self.config, *more)
        self.says(job, "waiting")
        return job

    def says(self, job: Job, text: str, times: int = 1) -> str:
        """Wait until the job has printed the text; return all its output."""
        eventually(
            lambda: self.slurm.said(job).count(text) >= times, message=lambda: str(self.slurm)
        )
        return self.slurm.said(job)

    def ends(self, job: Job, code: int, why: str) -> str:
        """Wait for the job's end; return its output."""
        eventually(lambda: job.codes, message=lambda: str(self.slurm))
        assert (job.codes[0], job.ends[0]) == (code, why), str(self.slurm)
        return self.slurm.said(job)

    def refuses(self, *arguments: object) -> str:
        """Submit a job that is rejected; return its output."""
        (job,) = self.slurm.sbatch(_BATCH, *arguments)
        return self.ends(job, 64, "FAILED")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.slurm.close()


@pytest.fixture(params=["/bin/sh", "/bin/bash --posix"])
def any_world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """With the shells of Debian and of Red Hat."""
    world = World(tmp_path, shell=request.param)
    yield world
    world.slurm.close()


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize("script", ["tunemq.sbatch", "workers.sh"])
def test_shells_can_parse_the_scripts(shell, script):
    subprocess.run([shell, "-n", str(_SCRIPTS / script)], check=True)


def test_script_and_its_directive_agree_on_the_notice():
    text = _BATCH.read_text()
    assert "#SBATCH --signal=B:USR1@120\n" in text
    assert "\nNOTICE=120\n" in text


# --- environment of a job -------------------------------------------------------------------------


def test_array_task_offers_the_resources_of_its_job(any_world):
    world = any_world
    world.write("# of the farm", "", "TUNEMQ_REDIS=redis://head:6379/0", "ODD=a b=$HOME `id` 'x'")
    first, second = world.slurm.sbatch(
        *("--array=4-5", "--cpus-per-task=6", "--mem=2048", "--gpus=a100:2"),
        *(_BATCH, "worker", world.config, "--lost-after", "3600"),
    )
    said = world.says(first, "waiting")
    name = f"slurm-{first.array_id}-4"
    assert f"worker --name {name} --workdir {world.slurm.folder}/scratch/" in said
    assert said.count(name) >= 2
    assert '--grace 100 --resources {"memory": 2147483648} --cpus 6 --lost-after 3600' in said
    assert "--gpus" not in said
    assert "redis=redis://head:6379/0 odd=a b=$HOME `id` 'x'" in said
    assert f"worker --name slurm-{first.array_id}-5 " in world.says(second, "waiting")


def test_job_without_gpus_offers_none_and_a_single_gpu_is_given_by_number(world):
    job = world.starts()
    said = world.slurm.said(job)
    assert f"worker --name slurm-{job.id} --workdir" in said
    assert "--gpus 0 --cpus 1" in said
    assert "memory" not in said


def test_environment_of_the_submitter_is_not_exported(world, monkeypatch):
    monkeypatch.setenv("MINE", "secret")
    world.slurm.environ.pop("MINE", None)
    assert "mine= tasks=\n" in world.slurm.said(world.starts())
    assert "#SBATCH --export=NONE\n" in _BATCH.read_text()


def test_trials_find_the_python_beside_tunemq_unless_the_settings_name_a_path(world, tmp_path):
    (tmp_path / "link").symlink_to(world.program)
    world.write(f"TUNEMQ_PROGRAM={tmp_path}/link")
    assert f"path={world.program.parent}:/" in world.slurm.said(world.starts())
    world.write("PATH=/mine:/usr/bin:/bin")
    assert "path=/mine:/usr/bin:/bin\n" in world.slurm.said(world.starts())


def test_scheduler_gets_its_options_and_none_of_a_worker(world):
    job = world.starts(role="scheduler", more=("--store", "/shared/a b"))
    assert f"{world.program} scheduler --store /shared/a b\n" in world.slurm.said(job)


def test_folder_of_a_worker_is_private_and_removed_with_it(world):
    job = world.starts()
    (workdir,) = (world.slurm.folder / "scratch" / job.shown).iterdir()
    assert workdir.name == f"tunemq-{os.getuid()}-slurm-{job.id}"
    assert workdir.stat().st_mode & 0o777 == 0o700
    world.slurm.command("scancel", job.shown)
    world.ends(job, 0, "CANCELLED")
    assert not workdir.exists()


# --- ends -----------------------------------------------------------------------------------------


def test_job_near_its_walltime_ends_and_is_requeued_under_its_name(any_world):
    world = any_world
    job = world.starts("--array=1-1", "--time=10:00")
    world.slurm.walltime_nears(job)
    said = world.says(job, "waiting", times=2)
    assert said.index("the walltime ends in 120 s") < said.index("got SIGTERM")
    assert said.count("got SIGTERM") == 1
    assert (job.codes, job.ends, job.starts) == ([0], ["REQUEUED"], 2)
    assert "start 2, on " in said
    assert said.count(f"worker --name slurm-{job.array_id}-1 ") == 2


def test_read_only_code_of_a_search_does_not_keep_a_job_from_being_requeued(tmp_path):
    """Folders of code are read-only, and only root can remove files from such a folder."""
    as_user = "/usr/bin/env -S setpriv --bounding-set=-dac_override,-fowner "
    world = World(tmp_path, shell=f"{as_user if os.getuid() == 0 else ''}/bin/sh")
    code = 'w=${*#*--workdir }; w=${w%% *}/code; mkdir "$w"; touch "$w/a"; chmod 500 "$w"; '
    world.program.write_text(_PROGRAM.replace("echo waiting", f"{code} echo waiting"))
    try:
        job = world.starts()
        (workdir,) = (world.slurm.folder / "scratch" / job.shown).iterdir()
        world.slurm.walltime_nears(job)
        said = world.says(job, "waiting", times=2)
        assert (job.codes, job.ends) == ([0], ["REQUEUED"])
        assert "cannot remove" not in said
        assert [path.name for path in workdir.iterdir()] == ["code"]  # of the second start
    finally:
        world.slurm.close()


def test_array_task_whose_walltime_ends_disturbs_no_other_task(world):
    jobs = world.slurm.sbatch("--array=1-2", _BATCH, "worker", world.config)
    first, second = jobs
    for job in jobs:
        world.says(job, "waiting")
    assert first.id == first.array_id  # as of one task in SLURM, too
    world.slurm.walltime_nears(first)
    world.says(first, "waiting", times=2)
    assert (first.starts, second.starts) == (2, 1)
    assert "got SIGTERM" not in world.slurm.said(second)


def test_scancel_ends_the_job_gracefully_and_for_good(any_world):
    world = any_world
    job = world.starts()
    world.slurm.command("scancel", job.shown)
    said = world.ends(job, 0, "CANCELLED")
    assert said.count("got SIGTERM") == 1
    assert (job.state, job.starts, job.was_killed) == ("CANCELLED", 1, False)


def test_preempted_job_ends_gracefully_and_is_requeued(world):
    job = world.starts()
    world.slurm.preempt(job, grace_s=30)
    world.says(job, "waiting", times=2)
    assert (job.codes, job.ends, job.starts) == ([0], ["PREEMPTED"], 2)
    assert "got SIGTERM" in world.slurm.said(job)


def test_job_that_is_told_to_end_is_not_requeued_for_its_walltime(world):
    held = world.home / "held"
    held.touch()
    lingers = f'while [ -e "{held}" ]; do sleep 0.05; done; exit'
    world.program.write_text(_PROGRAM.replace("exit", lingers, 1))
    job = world.starts()
    world.slurm.walltime_nears(job)
    world.says(job, "got SIGTERM")
    world.slurm.command("scancel", job.shown)
    world.says(job, "received SIGTERM or SIGINT")
    held.unlink()
    world.ends(job, 0, "CANCELLED")
    assert (job.state, job.starts, job.was_killed) == ("CANCELLED", 1, False)


def test_second_signal_does_not_reach_the_worker(any_world):
    world = any_world
    world.program.write_text(_PROGRAM.replace('exit "${ENDS:-0}"', ":"))
    job = world.starts()
    world.slurm.walltime_nears(job)
    world.says(job, "got SIGTERM")
    world.slurm.walltime_ends(job)
    world.says(job, "received SIGTERM or SIGINT")
    # The script would still handle a second signal meanwhile.
    job.kill_at = time.monotonic() + 1.0
    said = world.ends(job, 137, "TIMEOUT")  # that was this program's own fault
    assert "received SIGTERM or SIGINT" in said
    assert said.count("got SIGTERM") == 1


@pytest.mark.parametrize("code", [69, 76])
def test_exit_code_of_the_worker_is_that_of_the_job(world, code):
    world.write(f"ENDS_AT_ONCE={code}")
    (job,) = world.slurm.sbatch(_BATCH, "worker", world.config)
    world.ends(job, code, "FAILED")
    assert job.starts == 1


def test_job_that_may_not_be_requeued_reports_it(tmp_path):
    world = World(tmp_path, lets_requeue=False)
    try:
        job = world.starts()
        world.slurm.walltime_nears(job)
        assert "scontrol requeue failed; sites can forbid it" in world.ends(job, 0, "COMPLETED")
    finally:
        world.slurm.close()


def test_job_is_not_requeued_if_the_user_opts_out(world):
    world.write("TUNEMQ_REQUEUE=no")
    job = world.starts()
    world.slurm.walltime_nears(job)
    world.ends(job, 0, "COMPLETED")


# --- the page -------------------------------------------------------------------------------------


def commands_of_the_page(world: World) -> list[list[str]]:
    """The commands that users and cron run on the page, with the test's folders."""
    shutil.copy(_BATCH, world.slurm.folder)
    shutil.copy(_SCRIPTS / "workers.sh", world.home)
    shutil.copy(_BATCH, world.home)
    (world.home / "ada").mkdir(mode=0o700)
    (world.home / "scheduler").mkdir(mode=0o700)
    for name in ("ada", "scheduler"):
        shutil.copy(world.config / "environment", world.home / name)
    text = _PAGE.read_text().replace("/home/ada/tunemq", str(world.home))
    wanted = r"^(?:login\$ |\*/5 [* ]+)((?:sbatch|/\S*/workers.sh) .*)$"
    typed = re.findall(wanted, text, re.MULTILINE)
    fewer = [line.replace("1-16", "1-2").replace("a100 16", "a100 2") for line in typed]
    return [shlex.split(line.replace(" ...", "")) for line in fewer]


def test_commands_of_the_page_are_valid_for_slurm(world):
    lines = commands_of_the_page(world)
    assert len(lines) == 4
    workers, cron, head, dependent = lines
    first, second = world.slurm.sbatch(*workers[1:])
    assert first.options.megabytes == 64 * 1024
    assert '"memory": 68719476736' in world.says(first, "waiting")
    world.says(second, "waiting")

    (job,) = world.slurm.sbatch(*head[1:])
    assert job.options.limit_s == 7 * 24 * 3600
    assert "scheduler --store /shared/ada/farm" in world.says(job, "waiting")
    late, _ = world.slurm.sbatch(*[one.replace("JOB", str(job.id)) for one in dependent[1:]])
    assert "--lost-after 86400" in world.says(late, "waiting")

    code, said = keep(world, 2, "RUNNING", line=cron)
    assert code == 0, said
    assert "workers of a100: 0, submitting 2 more" in said


def test_page_keeps_results_of_the_head_where_all_nodes_see_them(world, monkeypatch):
    """The page sets no variable for the results, which the script drops: they go to the store."""
    monkeypatch.delenv("TUNEMQ_RESULTS", raising=False)
    *_, head, _ = commands_of_the_page(world)
    store = head[head.index("--store") + 1]
    assert farm_results_folder(None, store) == store
    text = _PAGE.read_text()
    assert "TUNEMQ_RESULTS" not in text
    (results,) = re.findall(r"`--results ([^`]*)`", text)
    assert farm_results_folder(results, "s3://bucket/farm") == results


def test_settings_of_the_page_are_valid(world):
    shown = re.search(r"^(TUNEMQ_PROGRAM=.*?)^```", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert shown is not None
    world.write(*shown[1].splitlines()[1:])
    said = world.slurm.said(world.starts())
    assert "redis=rediss://worker:PASSWORD@head.example.org:6379/0?ssl_ca_certs=/home/ada" in said


# --- rejected arguments ---------------------------------------------------------------------------


def test_wrong_command_line_prints_a_right_one(world):
    for arguments in ((), ("worker",), ("wrker", world.config)):
        said = world.refuses(*arguments)
        assert "usage: sbatch tunemq.sbatch worker|scheduler FOLDER" in said, said


def test_invalid_settings_are_named(any_world):
    world = any_world
    environment = world.config / "environment"
    for text, wanted in (
        ("TUNEMQ_REDIS redis://head", "a line has no =: write NAME=VALUE"),
        ("export A=1", "invalid name 'export A'"),
        ("A;id=1", "invalid name 'A;id'"),
        ("TUNEMQ_PROGRAM=/nowhere/tunemq", "/nowhere/tunemq not found: set TUNEMQ_PROGRAM"),
    ):
        environment.write_text(f"{text}\n")
        assert wanted in world.refuses("worker", world.config)
    environment.unlink()
    assert f"cannot read {environment}" in world.refuses("worker", world.config)


def test_folder_readable_by_others_is_rejected(world):
    world.config.chmod(0o750)
    assert f"chmod 700 '{world.config}'" in world.refuses("worker", world.config)


def test_working_folder_that_is_a_link_of_another_user_is_rejected(world):
    scratch = world.slurm.folder / "scratch" / "101"
    scratch.mkdir(parents=True)
    (scratch / f"tunemq-{os.getuid()}-slurm-101").symlink_to("/")
    assert "or another user owns it" in world.refuses("worker", world.config)


def test_script_without_slurm_explains_its_purpose(world):
    done = subprocess.run(
        ["sh", str(_BATCH), "worker", str(world.config)],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 64
    assert "submit this script with sbatch" in done.stderr


# --- as many as are wanted ------------------------------------------------------------------------


def keep(
    world: World,
    number: int,
    *states: str,
    trials: dict[str, int] | None = None,
    code: int = 0,
    line: list[str] | None = None,
) -> tuple[int, str]:
    """One call of workers.sh while there are searches in these states, each with these trials."""
    rows = [
        {"name": f"s{i}", "state": state, "reason": "", "trials": trials or {}}
        for i, state in enumerate(states)
    ]
    listing = world.home / "listing"
    listing.write_text(json.dumps({"experiments": rows}, separators=(",", ":")))
    ls = world.home / "ls"
    ls.write_text(f"#!/bin/sh\n[ '{code}' = 0 ] && cat '{listing}'\nexit {code}\n")
    ls.chmod(0o755)
    submitter = world.home / "ada"
    submitter.mkdir(exist_ok=True, mode=0o700)
    (submitter / "environment").write_text(f"TUNEMQ_PROGRAM={ls}\n")
    usual = [str(_SCRIPTS / "workers.sh"), "a100", str(number), str(submitter), "--gpus=a100:1"]
    done = subprocess.run(
        line or [*usual, str(_BATCH), "worker", str(world.config)],
        env=world.slurm.environ,
        cwd=world.slurm.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def running(world: World) -> int:
    return sum(job.state in {"PENDING", "RUNNING"} for job in world.slurm.jobs)


def test_workers_are_started_while_there_is_work_up_to_the_wanted_number(world):
    assert keep(world, 2) == (0, "")
    assert keep(world, 2, "PAUSED") == (0, "")
    assert running(world) == 0
    code, said = keep(world, 2, "RUNNING", "QUEUED")
    assert code == 0
    assert "searches: 2; workers of a100: 0, submitting 2 more" in said
    assert running(world) == 2
    assert keep(world, 2, "RUNNING") == (0, "")
    assert "submitting 1 more" in keep(world, 3, "RUNNING")[1]
    assert running(world) == 3
    for job in world.slurm.jobs:
        world.says(job, "waiting")
    assert keep(world, 3, "PAUSED", trials={"RUNNING": 2, "PENDING": 0}) == (0, "")
    assert running(world) == 3, "its trials still save"
    paused = keep(world, 3, "PAUSED", trials={"RUNNING": 0, "PAUSED": 2})
    assert "cancelling 3 workers of a100" in paused[1]
    eventually(lambda: all(job.codes for job in world.slurm.jobs))
    assert running(world) == 0
    assert {tuple(job.codes) for job in world.slurm.jobs} == {(0,)}


@pytest.mark.parametrize("code", [69, 75])
def test_workers_are_not_changed_while_the_amount_of_work_is_unknown(world, code):
    keep(world, 1, "RUNNING")
    assert keep(world, 1, code=code)[0] == code
    assert running(world) == 1


@pytest.mark.parametrize("states", [("RUNNING",), ()])
def test_workers_are_not_changed_while_slurm_does_not_list_jobs(world, states):
    keep(world, 1, "RUNNING")
    squeue = world.slurm.bin / "squeue"
    squeue.write_text("#!/bin/sh\necho 'Socket timed out on send/recv operation' >&2\nexit 7\n")
    assert keep(world, 2, *states) == (7, "Socket timed out on send/recv operation\n")
    assert len(world.slurm.jobs) == running(world) == 1


def test_wrong_call_prints_a_right_one(world):
    for arguments in ((), ("a b", "1", "x", "y"), ("a", "many", "x", "y"), ("a", "1", "x", "y")):
        done = subprocess.run(
            [str(_SCRIPTS / "workers.sh"), *arguments],
            env=world.slurm.environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 64
        assert done.stderr.startswith("workers.sh: ")


def test_stand_in_sends_the_signals_of_slurm(world):
    """The script receives SIGTERM; the processes that it has started do not."""
    world.program.write_text(_PROGRAM.replace('exit "${ENDS:-0}"', ":"))
    job = world.starts()
    assert job.options.number == signal.SIGUSR1
    assert job.options.requeues
    world.slurm.kill_wait_s = 0.5
    world.slurm.command("scancel", job.shown)
    world.ends(job, 137, "CANCELLED")
    assert job.was_killed
