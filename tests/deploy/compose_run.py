"""Run docker-compose.yml on Docker itself and check all that docs/deploy/compose.md promises.

    python -m tests.deploy.compose_run [--keep] [--transcript FILE]

Run it from the root of a checkout, with the images built (`docker compose build`). It uses a new
project, free ports and a new folder, and removes them at the end. It prints commands and output.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import ssl
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from http.client import HTTPSConnection
from pathlib import Path
from typing import Final

from tests.deploy.compose_project import Failed, Run
from tunemq_scheduler.security.forged_signatures import forgeries

#: Trials, and steps of each, half a second each: enough to be killed in the middle, and few.
MANY: Final = 24, 60
FEW: Final = 4, 10
_SEARCH: Final = """\
import time

import tunemq as tune


def train(config):
    step, total = 0, 0.0
    checkpoint = tune.get_checkpoint()
    if checkpoint:
        state = checkpoint.to_dict()
        step, total = state["step"], state["total"]
    while step < STEPS:
        time.sleep(0.5)
        step, total = step + 1, total + config["x"]
        state = {"step": step, "total": total}
        tune.report({"total": total, "step": step}, checkpoint=tune.Checkpoint.from_dict(state))


tuner = tune.Tuner(
    train,
    param_space={"x": tune.grid_search([float(i) for i in range(TRIALS)])},
    tune_config=tune.TuneConfig(metric="total", mode="max"),
)
"""
#: A script that an outside user runs to read results.
RESULTS: Final = """\
import os

from few import STEPS, tuner

handle = tuner.fit(address=os.environ["TUNEMQ_REDIS"], detached=True)
handle.wait()
for result in handle.get_results():
    state = result.checkpoint.to_dict()
    assert state["step"] == STEPS, state
    assert state["total"] == STEPS * result.config["x"], state
print("all checkpoints were read from the store")
"""


def comes_up(run: Run) -> None:
    """Everything starts, in order, and is well."""
    run.title("Up")
    run.up(1)
    run.compose("ps", "--all", "--format", "table {{.Service}}\t{{.Status}}\t{{.Ports}}")
    run.copy("ada")
    run.typed("ls", "-l", str(run.folder / "tunemq-ada"))
    doctor = ("tunemq-entrypoint", "doctor", "--store", "s3://tunemq/farm")
    run.compose("exec", "-T", "scheduler", *doctor)
    if nameless := run.nameless_volumes():
        raise Failed(f"volumes without a name, which no command will remove: {nameless}")


def is_closed(run: Run) -> None:
    """Only necessary ports are open, to this machine only, and the output has no secret."""
    run.title("Open ports, and secrets in the output")
    for container in run.ids("ps"):
        ports = run.typed("docker", "port", container, is_shown=False).splitlines()
        run.say(f"  published: {ports}") if ports else None
        if any(not line.split(" -> ")[1].startswith("127.0.0.1:") for line in ports):
            raise Failed(f"published beyond the loopback: {ports}")
    keys = run.folder / "authority"
    run.compose("cp", "setup:/secrets/authority", str(keys), is_shown=False)
    told = run.typed("docker", "inspect", *run.ids("ps", "--all"), is_shown=False)
    told += run.compose("logs", is_shown=False)
    told += run.typed("ps", "-eww", "-o", "args", is_shown=False)
    files = [*keys.glob("passwords/*"), *keys.glob("store/*"), *keys.glob("keys/*")]
    values = [
        word.strip('"') for file in files for word in file.read_text().split() if len(word) > 30
    ]
    if len(values) < 10 or any(value in told for value in values):
        raise Failed("a secret is in docker inspect, in a log or in an argument")
    where = "docker inspect, in a log or in an argument of a process"
    run.say(f"  none of {len(values)} secrets is in {where}")
    run.typed("rm", "-rf", str(keys), is_shown=False)


def is_rejected(run: Run) -> None:
    """The proxy rejects forged uploads and requests to MinIO's user administration."""
    run.title("Forged uploads")
    context = ssl.create_default_context(cafile=str(run.folder / "tunemq-ada" / "ca.crt"))
    place = f"127.0.0.1:{run.variables['TUNEMQ_STORE_PORT']}"
    words = (run.folder / "tunemq-ada" / "credentials").read_text().split()
    access_key = words[words.index("aws_access_key_id") + 2]
    asked = [
        (f"{forgery.weakness}", "PUT", f"/tunemq/farm/blobs/forged?{forgery.query}", forgery)
        for forgery in forgeries("farm/blobs/", "forged", access_key, "us-east-1")
    ]
    asked.append(("the admin API", "GET", "/minio/admin/v3/list-users", None))
    for what, verb, target, forgery in asked:
        line = HTTPSConnection(place, context=context, timeout=30)
        headers, body = (forgery.headers, forgery.body) if forgery else ({}, b"")
        line.request(verb, target, body, headers)
        status = line.getresponse().status
        line.close()
        run.say(f"  {what}: {verb} {target.partition('?')[0]}: {status}")
        if status != 403:
            raise Failed(f"{what} was not refused: {status}")


def survives_a_kill(run: Run) -> None:
    """A search from outside, on four workers, one of which is killed."""
    run.title("A search, four workers, one of them killed")
    _submit(run, "first", MANY)
    run.compose("up", "--detach", "--no-build", "--scale", "worker=4")
    run.eventually("four workers are healthy", lambda: run.are_well(4))
    run.tunemq("nodes")

    steps: dict[str, int] = {}

    def is_at_work() -> bool:
        _continues(run, "first")
        for one in run.shown("first")["trials"]:
            if one["status"] == "RUNNING" and 5 <= one["step"] < MANY[1] - 20:
                steps[one["node"]] = one["step"]
        return bool(steps)

    run.eventually("a worker is in the middle of a trial", is_at_work)
    run.tunemq("show", "first")
    victim = min(steps, key=lambda node: steps[node])
    run.typed("docker", "kill", "-s", "KILL", run.container_of(victim))
    run.eventually("the farm has lost it", lambda: victim not in run.nodes())
    finishes(run, "first", MANY)
    run.tunemq("show", "first")
    run.tunemq("nodes")
    run.up(4)
    if (folders := _folders(run)) != ["1", "2", "3", "4"]:
        raise Failed(f"workers have these folders: {folders}")


def _folders(run: Run) -> list[str]:
    listed = run.compose("exec", "-T", "worker", "ls", "/var/cache/tunemq", is_shown=False)
    return sorted(name for name in listed.split() if name.isdigit())


def _submit(run: Run, name: str, shape: tuple[int, int]) -> None:
    file = _write(run, shape)
    run.tunemq("submit", file, "--name", name, "--detach")


def _write(run: Run, shape: tuple[int, int]) -> str:
    """Make the script of a search; its name."""
    name, (trials, steps) = "few.py" if shape == FEW else "search.py", shape
    (run.folder / name).write_text(f"TRIALS, STEPS = {trials}, {steps}\n{_SEARCH}")
    return name


def _continues(run: Run, name: str) -> None:
    found = run.shown(name)["experiment"]
    if found["state"] == "FAILED":
        raise Failed(f"{name}: {found['reason']}")


def finishes(run: Run, name: str, shape: tuple[int, int]) -> None:
    """A search ends with every result of every trial, each once.

    Raises:
        Failed: it does not.
    """
    over = {"FINISHED", "STOPPED", "FAILED"}
    run.eventually(
        f"{name} has ended", lambda: run.shown(name)["experiment"]["state"] in over, within=900
    )
    found, (count, length) = run.shown(name), shape
    trials = found["trials"]
    steps = {one["step"] for one in trials}
    totals = sorted(one["metric"] for one in trials)
    if found["experiment"]["state"] != "FINISHED" or steps != {length} or len(trials) != count:
        raise Failed(f"{name}: {found['experiment']}, steps {steps}")
    if totals != [float(length) * x for x in range(count)]:
        raise Failed(f"{name}: results are wrong: {totals}")
    run.say(f"  {name}: FINISHED, {count} trials, {length} results each, all as they have to be")


def is_kept(run: Run) -> None:
    """`down` keeps all data, and the next `up` resumes."""
    run.title("Down, and up again")
    run.compose("down")
    if run.ids("ps", "--all"):
        raise Failed("there are containers left")
    run.up(2)
    run.tunemq("ls")
    finishes(run, "first", MANY)
    run.say("  the same copies of keys and addresses are good, and what was found is there")
    run.title("A search of a script outside, which reads its checkpoints")
    _write(run, FEW)
    (run.folder / "results.py").write_text(RESULTS)
    run.typed(str(run.folder / "tunemq-ada" / "with"), "python", "results.py", cwd=run.folder)
    run.compose("cp", "scheduler:/var/lib/tunemq/first", str(run.folder / "first"))
    if len(list((run.folder / "first").glob("*/result.json"))) != MANY[0]:
        raise Failed("results of trials are missing in the copy")


def is_restored(run: Run) -> None:
    """A backup restores the data that `down --volumes` removed."""
    run.title("A backup, everything lost, and restored")
    file = shlex.quote(str(run.folder / "farm.tar"))
    tar = "docker compose run --rm --no-deps -T --entrypoint tar setup -C /"
    run.compose("stop")
    run.typed("sh", "-c", f"{tar} -cf - secrets/authority data/results data/minio > {file}")
    run.compose("down", "--volumes")
    run.compose("create", "--no-build")
    run.typed("sh", "-c", f"{tar} -xf - < {file}")
    run.up(2)
    run.tunemq("ls")
    finishes(run, "second", FEW)
    run.tunemq("checkpoints", "list", "s3://tunemq/farm/second")


def joins_from_outside(run: Run) -> None:
    """A worker runs outside Docker with the files that `setup` made for it."""
    run.title("A worker elsewhere")
    line = [str(run.copy("worker") / "with"), "tunemq", "worker", "--name", "elsewhere"]
    path = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
    workdir = str(run.folder / "workdir")
    environ = {**os.environ, "PATH": path}
    with (run.folder / "worker.log").open("wb") as log:
        worker = subprocess.Popen(
            [*line, "--workdir", workdir], env=environ, stdout=log, stderr=log
        )
        try:
            run.say(f"$ {shlex.join(line)} &")
            run.eventually("it is there", lambda: "elsewhere" in run.nodes())
            run.compose("stop", "worker")
            _submit(run, "elsewhere", FEW)
            finishes(run, "elsewhere", FEW)
        finally:
            worker.terminate()
            worker.wait(60)
    run.compose("start", "worker")


def is_looked_after(run: Run) -> None:
    """Submitters, keys, passwords and certificates change while the farm runs."""
    run.title("Another submitter")
    run.variables["TUNEMQ_SUBMITTERS"] = "ada ben"
    run.up(2)
    run.copy("ben")
    run.eventually("the scheduler knows ben", lambda: _can(run, "ben", "ls"))
    run.tunemq("ls", who="ben")
    run.title("Other keys")
    for step in ("rotate", "promote", "drop"):
        before = _times_keys_were_read(run)
        run.compose("run", "--rm", "setup", "keys", step)
        run.eventually(
            "the scheduler and both workers have read them",
            lambda before=before: _times_keys_were_read(run) >= before + 3,
        )
        run.tunemq("ls")  # with the folder that ada copied after the step before
        run.copy("ada")
        run.tunemq("ls")
        if step != "rotate":
            run.tunemq("ls", who="ben", fails=True)  # his folder is from before that
    run.title("Other passwords and certificates")
    run.compose("run", "--rm", "setup", "new-passwords")
    run.compose("run", "--rm", "setup", "new-certificates")
    run.compose("down")
    run.up(2)
    run.tunemq("ls", fails=True)
    run.copy("ada")
    run.tunemq("ls")
    doctor = ("tunemq-entrypoint", "doctor", "--store", "s3://tunemq/farm")
    run.compose("exec", "-T", "scheduler", *doctor)
    run.title("A submitter less")
    run.variables["TUNEMQ_SUBMITTERS"] = "ada"
    run.up(2)
    run.tunemq("ls", who="ben", fails=True)


def is_used_without_python(run: Run) -> None:
    """Users with Docker but without the farm's Python version submit with the image."""
    run.title("A submitter with nothing but Docker")
    who = f"{os.getuid()}:{os.getgid()}"
    mounts = (
        "-v",
        f"{run.folder}/tunemq-ada:/etc/tunemq:ro",
        "-v",
        f"{run.folder}:/search",
        "-w",
        "/search",
    )
    line = ("docker", "run", "--rm", "--network", "host", "--user", who, *mounts)
    program = ("--entrypoint", "tunemq-entrypoint", "tunemq/scheduler")
    run.typed(*line, *program, "submit", _write(run, FEW), "--name", "second", "--detach")
    finishes(run, "second", FEW)


def _can(run: Run, who: str, *line: str) -> bool:
    with contextlib.suppress(Failed):
        run.tunemq(*line, who=who, is_shown=False)
        return True
    return False


def _times_keys_were_read(run: Run) -> int:
    said = run.compose("logs", "scheduler", "worker", is_shown=False)
    return said.count("was read again")


@contextlib.contextmanager
def _project(run: Run, *, keeps: bool) -> Iterator[None]:
    try:
        yield
    except (Failed, subprocess.TimeoutExpired):
        run.say("\n## What it looked like\n")
        run.compose("ps", "--all")
        run.say(run.compose("logs", "--tail", "40", is_shown=False))
        raise
    finally:
        left: list[str] = []
        if not keeps:
            run.title("Away with it")
            run.compose("down", "--volumes", "--timeout", "20")
            left = run.ids("ps", "--all") + run.ids("volume", "ls")
            run.say(f"  left of it: {left or 'nothing'}")
    if left:
        raise Failed(f"`down --volumes` has left {left}")


PARTS: Final = (
    *(comes_up, is_closed, is_rejected, survives_a_kill, is_kept, is_looked_after),
    *(is_used_without_python, joins_from_outside, is_restored),
)


def run_all(
    folder: Path,
    *,
    keeps: bool = False,
    transcript: Path | None = None,
    parts: Sequence[str] = (),
) -> None:
    """Do all of it, or some parts by their names.

    Raises:
        Failed: something that is promised does not hold.
    """
    run = Run(folder, transcript)
    with _project(run, keeps=keeps):
        for part in PARTS:
            if not parts or part.__name__ in parts:
                part(run)
        run.say("\nAll of it holds.")


def main() -> int:
    """See the top."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="leave the farm running")
    parser.add_argument("--transcript", type=Path, help="write it all there, too")
    names = [part.__name__ for part in PARTS]
    parser.add_argument("--parts", nargs="+", choices=names, default=[], help="do only these")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tunemq-compose-"))
    try:
        run_all(folder, keeps=options.keep, transcript=options.transcript, parts=options.parts)
    except Failed as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
