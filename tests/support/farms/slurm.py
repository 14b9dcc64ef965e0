"""A stand-in for SLURM that runs batch scripts as SLURM does: see `Slurm`.

Like SLURM it copies the script, reads its ``#SBATCH`` lines, and runs each task of an array as a
job with its variables and an otherwise empty environment (``--export=NONE``). A step daemon is the
parent of the script and reaps the processes that the script leaves. SIGTERM and SIGCONT reach that
daemon's children only, as with ``proctrack/cgroup``; SIGKILL reaches all processes of the job. The
warning of ``--signal=B:`` goes to the script alone. Not implemented: a queue with priorities,
control groups, accounting.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.support.waiting import descendants

_COMMANDS: Final = ("sbatch", "scancel", "scontrol", "squeue")
_CLIENT: Final = """\
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as line:
    line.connect(sys.argv[1])
    line.sendall(json.dumps([os.getcwd(), *sys.argv[2:]]).encode() + b"\\n")
    answer = json.loads(line.makefile().readline())
sys.stdout.write(answer["out"])
sys.stderr.write(answer["err"])
sys.exit(answer["code"])
"""
#: Of one job: runs the script, then kills whatever is left of it.
_STEP_DAEMON: Final = """\
import ctypes, os, signal, subprocess, sys

def children(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            found = [int(one) for one in file.read().split()]
    except OSError:
        return []
    return [one for child in found for one in (child, *children(child))]

PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
process = subprocess.Popen(sys.argv[1:], start_new_session=True)
code = process.wait()
while left := children(os.getpid()):
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        pass
sys.exit(code if code >= 0 else 128 - code)
"""
_ROOT: Final = Path(__file__).parents[3]
_POLL_INTERVAL_S: Final = 0.02


@dataclass
class Options:
    """The options of sbatch that the stand-in supports."""

    job_name: str = "sbatch"
    array: list[int] = field(default_factory=list)
    at_once: int = 1000
    limit_s: float = 3600.0
    number: signal.Signals | None = None
    notice_s: float = 60.0
    requeues: bool = False
    cpus: int = 1
    megabytes: int = 0
    gpus: int = 0
    begins_after: int = 0


@dataclass
class Job:
    """One job, or one task of an array."""

    id: int
    array_id: int
    task: int | None
    script: Path
    arguments: list[str]
    options: Options
    state: str = "PENDING"
    starts: int = 0
    #: When its walltime ends.
    deadline: float = 0.0
    was_warned: bool = False
    #: Why it is being ended, since when it is to be killed.
    ending: str = ""
    kill_at: float = 0.0
    was_killed: bool = False
    comes_again: bool = False
    daemon: subprocess.Popen[bytes] | None = None
    #: Exit codes of the script, one per start.
    codes: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    #: How much of its walltime was left then.
    left_s: list[float] = field(default_factory=list)

    @property
    def shown(self) -> str:
        """As squeue shows it."""
        return str(self.id) if self.task is None else f"{self.array_id}_{self.task}"


class Slurm:
    """A cluster of one machine.

    Args:
        folder: for all files; its ``bin`` has the commands.
        home: of the user; ``variables`` are in the environment of the user's login.
        kill_wait_s: seconds between SIGTERM and SIGKILL.
        lets_requeue: whether ``scontrol requeue`` is allowed.
        shell: ``/bin/sh`` of the nodes.
    """

    def __init__(
        self,
        folder: Path,
        home: Path,
        variables: Mapping[str, str] | None = None,
        *,
        kill_wait_s: float = 30.0,
        lets_requeue: bool = True,
        shell: str = "/bin/sh",
    ) -> None:
        self.shell = shell
        self.folder, self.kill_wait_s, self.lets_requeue = folder, kill_wait_s, lets_requeue
        self.jobs: list[Job] = []
        folder.mkdir()
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in _COMMANDS:
            (self.bin / name).write_text(
                f"#!/bin/sh\nexec '{sys.executable}' -I -S '{folder}/client.py' '{folder}/socket'"
                f' {name} "$@"\n'
            )
            (self.bin / name).chmod(0o755)
        (folder / "client.py").write_text(_CLIENT)
        self.environ = {
            "HOME": str(home),
            "USER": "ada",
            "PATH": f"{self.bin}:/usr/bin:/bin",
            **(variables or {}),
        }
        self._lock = threading.RLock()
        self._is_over = False
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(f"{folder}/socket")
        self._listening.listen()
        self._listening.settimeout(_POLL_INTERVAL_S)
        self._thread = threading.Thread(target=self._run, name="slurmctld", daemon=True)
        self._thread.start()

    # --- for tests --------------------------------------------------------------------------------

    def sbatch(self, *arguments: object) -> list[Job]:
        """Hand in a job; its tasks."""
        done = self.command("sbatch", *arguments)
        assert done.returncode == 0, done
        number = int(done.stdout.split()[-1])
        return [job for job in self.jobs if job.array_id == number]

    def command(self, name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        """A command as the user types it."""
        return subprocess.run(
            [str(self.bin / name), *map(str, arguments)],
            env=self.environ,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )

    def walltime_nears(self, job: Job) -> None:
        """Reduce the remaining time to that of the warning."""
        with self._lock:
            job.deadline = time.monotonic() + job.options.notice_s

    def walltime_ends(self, job: Job) -> None:
        """It ends now; without a warning, if there was none."""
        with self._lock:
            job.deadline, job.was_warned = time.monotonic(), True

    def preempt(self, job: Job, grace_s: float, *, requeues: bool = True) -> None:
        """Take its machine away for another job."""
        with self._lock:
            job.comes_again = requeues and job.options.requeues
            self._end(job, "PREEMPTED", grace_s)

    def crash(self, job: Job) -> None:
        """Its machine dies."""
        with self._lock:
            assert job.daemon is not None
            job.comes_again = job.options.requeues
            job.ending = "NODE_FAIL"
            _send(job.daemon.pid, signal.SIGSTOP)
            for _ in range(5):  # one that was forked meanwhile, too
                for pid in descendants(job.daemon.pid):
                    _send(pid, signal.SIGKILL)
            _send(job.daemon.pid, signal.SIGKILL)

    def said(self, job: Job) -> str:
        """The output of the job."""
        path = self.folder / f"slurm-{job.shown}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        """Kill all jobs."""
        self._is_over = True
        self._thread.join()
        self._listening.close()
        for job in self.jobs:
            if job.daemon is not None:
                daemon = job.daemon
                self.crash(job)
                daemon.wait()

    def __str__(self) -> str:
        return "\n" + "\n".join(f"--- {job}\n{self.said(job)[-3000:]}" for job in self.jobs)

    # --- the controller ---------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_over:
            try:
                line, _ = self._listening.accept()
            except TimeoutError:
                pass
            else:
                with line, line.makefile("rw") as both:
                    both.write(json.dumps(self._answer(json.loads(both.readline()))) + "\n")
            with self._lock:
                for job in self.jobs:
                    self._look_at(job)

    def _look_at(self, job: Job) -> None:
        now = time.monotonic()
        if job.daemon is None:
            if job.state == "PENDING" and self._may_start(job):
                self._start(job)
            return
        if (code := job.daemon.poll()) is not None:
            self._ended(job, code)
            return
        batch = next(iter(_children(job.daemon.pid)), 0)
        options = job.options
        is_due = bool(batch and options.number and not job.was_warned)
        if options.number and is_due and now >= job.deadline - options.notice_s:
            job.was_warned = True
            _send(batch, options.number)
        if not job.ending and now >= job.deadline:
            self._end(job, "TIMEOUT", self.kill_wait_s)
        if job.ending and job.ending != "NODE_FAIL" and now >= job.kill_at and not job.was_killed:
            job.was_killed = True
            for pid in descendants(job.daemon.pid):
                _send(pid, signal.SIGKILL)

    def _end(self, job: Job, why: str, within_s: float) -> None:
        """As slurmctld has a job end: SIGCONT and SIGTERM now, SIGKILL later."""
        if job.daemon is None:
            job.state = why
            return
        if job.ending:
            return
        job.ending, job.kill_at = why, time.monotonic() + within_s
        for pid in _children(job.daemon.pid):
            _send(pid, signal.SIGCONT)
            _send(pid, signal.SIGTERM)

    def _may_start(self, job: Job) -> bool:
        running = [one for one in self.jobs if one.array_id == job.array_id and one.daemon]
        after = [one for one in self.jobs if one.array_id == job.options.begins_after]
        return len(running) < job.options.at_once and all(one.starts for one in after)

    def _start(self, job: Job) -> None:
        options = job.options
        scratch = self.folder / "scratch" / job.shown
        scratch.mkdir(parents=True, exist_ok=True)
        environ = {
            **self.environ,
            "PYTHONPATH": str(_ROOT),
            "SLURM_JOB_ID": str(job.id),
            "SLURM_JOB_NAME": options.job_name,
            "SLURM_NTASKS": "1",
            "SLURM_CPUS_ON_NODE": str(options.cpus),
            "SLURM_TMPDIR": str(scratch),
        }
        if job.task is not None:
            environ |= {
                "SLURM_ARRAY_JOB_ID": str(job.array_id),
                "SLURM_ARRAY_TASK_ID": str(job.task),
            }
        if job.starts:
            environ["SLURM_RESTART_COUNT"] = str(job.starts)
        if options.megabytes:
            environ["SLURM_MEM_PER_NODE"] = str(options.megabytes)
        if options.gpus:
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(options.gpus)))
        job.state, job.was_warned, job.was_killed, job.ending = "RUNNING", False, False, ""
        job.starts += 1
        job.deadline = time.monotonic() + options.limit_s
        with (self.folder / f"slurm-{job.shown}.out").open("ab") as output:
            job.daemon = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _STEP_DAEMON, str(job.script), *job.arguments],
                env=environ,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _ended(self, job: Job, code: int) -> None:
        job.daemon = None
        job.left_s.append(job.deadline - time.monotonic())
        job.ends.append(job.ending or ("COMPLETED" if code == 0 else "FAILED"))
        job.state = "PENDING" if job.comes_again else job.ends[-1]
        job.comes_again = False
        job.codes.append(code)  # set last: a thread that waits for it finds everything else done

    # --- its commands -----------------------------------------------------------------------------

    def _answer(self, request: list[str]) -> dict[str, Any]:
        folder, command, *arguments = request
        try:
            with self._lock:
                said = (
                    self._sbatch(Path(folder), arguments)
                    if command == "sbatch"
                    else getattr(self, f"_{command}")(arguments)
                )
        except (ValueError, OSError) as problem:
            return {"code": 1, "err": f"{command}: error: {problem}\n", "out": ""}
        return {"code": 0, "err": "", "out": said}

    def _sbatch(self, folder: Path, arguments: list[str]) -> str:
        given = [one for one in arguments if one.startswith("-")]
        given = arguments[: next((i for i, one in enumerate(arguments) if one not in given), 0)]
        script, *rest = arguments[len(given) :]
        text = (folder / script).read_text()
        directives = re.findall(r"^#SBATCH +(.*)$", text, re.MULTILINE)
        options = Options()
        for one in [*directives, *given]:
            _read_option(options, one.strip())
        number = max((job.id for job in self.jobs), default=100) + 1
        copy = self.folder / f"script-{number}"
        text = text.replace("#!/bin/sh", f"#!{self.shell}", 1)
        copy.write_text(text)  # as in the spool of slurmd: its neighbours are not there
        copy.chmod(0o700)
        for at, task in enumerate(options.array or [None]):
            self.jobs.append(Job(number + at, number, task, copy, rest, options))
        return f"Submitted batch job {number}\n"

    def _scancel(self, arguments: list[str]) -> str:
        for job in self._chosen(arguments):
            job.comes_again = False
            self._end(job, "CANCELLED", self.kill_wait_s)
        return ""

    def _scontrol(self, arguments: list[str]) -> str:
        what, *rest = arguments
        if what != "requeue" or not self.lets_requeue:
            raise PermissionError("Requeue disabled")
        for job in self._chosen(rest):
            job.comes_again = True
            self._end(job, "REQUEUED", self.kill_wait_s)
        return ""

    def _squeue(self, arguments: list[str]) -> str:
        return "".join(f"{job.shown}\n" for job in self._chosen(arguments))

    def _chosen(self, arguments: Sequence[str]) -> list[Job]:
        found = [job for job in self.jobs if job.daemon is not None or job.state == "PENDING"]
        for one in arguments:
            option, _, value = one.partition("=")
            if option == "--name":
                found = [job for job in found if job.options.job_name == value]
            elif not one.startswith("-"):
                found = [j for j in found if one in {j.shown, str(j.id), str(j.array_id)}]
        return found


def _read_option(options: Options, text: str) -> None:
    name, _, value = text.removeprefix("--").partition("=")
    match name:
        case "job-name":
            options.job_name = value
        case "array":
            tasks, _, at_once = value.partition("%")
            first, _, last = tasks.partition("-")
            options.array = list(range(int(first), int(last or first) + 1))
            options.at_once = int(at_once or 1000)
        case "time":
            days, dash, rest = value.rpartition("-")
            parts = [int(part) for part in rest.split(":")]
            if dash:  # days-hours[:minutes[:seconds]]
                parts = [*parts, 0, 0][:3]
            else:  # minutes, minutes:seconds, hours:minutes:seconds
                parts = [0, *parts, 0] if len(parts) == 1 else [0, 0, *parts][-3:]
            hours = parts[0] + 24 * int(days or 0)
            options.limit_s = hours * 3600 + parts[1] * 60 + parts[2]
        case "signal":
            number, _, notice = value.removeprefix("B:").partition("@")
            options.number = signal.Signals[f"SIG{number}"]
            options.notice_s = float(notice or 60)
        case "requeue":
            options.requeues = True
        case "cpus-per-task":
            options.cpus = int(value)
        case "mem":
            options.megabytes = int(value.rstrip("MG")) * (1024 if value.endswith("G") else 1)
        case "gpus":
            options.gpus = int(value.rpartition(":")[2])
        case "dependency":
            options.begins_after = int(value.removeprefix("after:"))
        case "nodes" | "ntasks" | "open-mode" | "export" | "partition" | "nodelist":
            pass
        case _:
            raise ValueError(f"unrecognized option '{text}'")


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _send(pid: int, number: signal.Signals) -> None:
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
