"""Forkservers of experiments: experiment processes are isolated, and none is lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pytest

from tests.integration.farm_support import is_alive
from tests.support.waiting import eventually
from tunemq_scheduler.farm.common.scheduler_exit_codes import (
    EXIT_AGAIN,
    EXIT_FAILED,
    EXIT_MUST_WAIT,
    EXIT_USE,
)
from tunemq_scheduler.farm.ipc import experiment_processes as process_module
from tunemq_scheduler.farm.ipc import ipc_messages as r
from tunemq_scheduler.farm.ipc.experiment_processes import ExperimentForkservers
from tunemq_scheduler.farm.ipc.nonblocking_frames import FrameSocket
from tunemq_shared.code.blob_store import open_blobs
from tunemq_shared.code.bundles import bundle
from tunemq_shared.protocol.farm_requests import ScriptCode

pytestmark = pytest.mark.integration

_BEGIN = """
import ctypes, gc, json, os, random, signal, sys, time
from pathlib import Path
HERE = Path({folder!r})

def tell(**what):
    (HERE / "new").write_text(json.dumps(what))
    (HERE / "new").replace(HERE / "told")

"""


class Experiment:
    """An experiment whose script has this body, and its outcome."""

    def __init__(
        self, forkservers: ExperimentForkservers, folder: Path, body: str, **options: Any
    ) -> None:
        self.folder = folder
        folder.mkdir()
        script = folder / "own.py"
        script.write_text(_BEGIN.replace("{folder!r}", repr(str(folder))) + body)
        with open_blobs(str(folder / "store")) as blobs:
            code = ScriptCode(bundle=bundle(script, blobs), script=script.name)
        ours, theirs = socket.socketpair()
        self.frames = FrameSocket(ours)
        self.process = forkservers.start(folder, theirs, **options)
        job = r.ExperimentJob(
            name=folder.name,
            results=str(folder),
            code=code,
            term=1,
            prefix="x",
            folder_for_code=str(folder / "bundles"),
        )
        self.frames.put(r.encode(job))
        self.frames.flush()

    def told(self) -> dict[str, Any]:
        path = self.folder / "told"

        def may_come() -> bool:
            assert self.process.returncode() is None or path.exists(), self.said()
            return path.exists()

        eventually(may_come, within=60, message=self.said)
        return json.loads(path.read_text())

    def ends(self) -> int:
        eventually(lambda: self.process.returncode() is not None, within=60, message=self.said)
        self.close()
        found = self.process.returncode()
        assert found is not None
        return found

    def said(self) -> str:
        return self.process.last_output()

    def close(self) -> None:
        if self.frames.fileno() != -1:
            self.process.kill()
            self.frames.close()
            self.process.close()


class Begin(Protocol):
    def __call__(
        self, forkservers: ExperimentForkservers, name: str, body: str, **options: Any
    ) -> Experiment: ...


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """A function that starts experiments, which end with the test."""
    with ExitStack() as begun:

        def begin(
            forkservers: ExperimentForkservers, name: str, body: str, **options: Any
        ) -> Experiment:
            experiment = Experiment(forkservers, tmp_path / name, body, **options)
            begun.callback(experiment.close)
            return experiment

        yield begin


@pytest.fixture(scope="module")
def usual() -> Iterator[ExperimentForkservers]:
    made = ExperimentForkservers("")
    made.prepare()
    yield made
    made.close()


@pytest.fixture
def forkservers() -> Iterator[ExperimentForkservers]:
    """Forkservers that a test may kill."""
    made = ExperimentForkservers("")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("body", "returncode"),
    [
        ("os._exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("ctypes.string_at(0)", -signal.SIGSEGV),
        ("raise RuntimeError('no such day')", EXIT_FAILED),
    ],
)
def test_experiment_process_end_is_reported_with_its_exit_code(begin, usual, body, returncode):
    experiment = begin(usual, "search", body)
    assert experiment.ends() == returncode
    assert experiment.process.pid is not None
    eventually(lambda: not Path("/proc", str(experiment.process.pid)).exists())  # it was reaped
    if "RuntimeError" in body or "string_at" in body:
        assert 'own.py", line' in experiment.said()


_LOOKS = """
def environ_of(pid):
    try:
        return Path("/proc", str(pid), "environ").read_text(errors="replace")
    except OSError:
        return "refused"

def files():
    for number in range(3, 256):
        try:
            yield os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            pass

tell(
    environ=dict(os.environ),
    forkserver=environ_of(os.getppid()),
    files=list(files()),
    input=os.readlink("/proc/self/fd/0"),
    parent=os.getppid(),
    is_leader=os.getsid(0) == os.getpid() == os.getpgrp(),
    cwd=os.getcwd(),
    main=[name for name in vars(sys.modules["__main__"]) if not name.startswith("__")],
    handlers=[signal.getsignal(n) is signal.SIG_DFL for n in (signal.SIGTERM, signal.SIGCHLD)],
    blocked=list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    dumpable=ctypes.CDLL(None).prctl(3, 0, 0, 0, 0),
    random=random.random(),
    name=Path("/proc/self/comm").read_text().strip(),
)
while not (HERE / "go").exists():
    time.sleep(0.01)
print("it went")
sys.exit(0)
"""


def test_experiment_sees_its_own_environment_and_no_other(begin, forkservers, monkeypatch):
    monkeypatch.setenv("TUNEMQ_REDIS", "redis://:secret@nowhere/0")
    experiments = [begin(forkservers, name, _LOOKS) for name in ("one", "two")]
    found = [experiment.told() for experiment in experiments]
    for experiment in experiments:
        (experiment.folder / "go").touch()
        assert experiment.ends() == EXIT_FAILED
        assert (experiment.folder / "experiment.out").read_text() == "it went\n"
        assert "ended its process" in (experiment.folder / "experiment.err").read_text()
    assert found[0]["parent"] == found[1]["parent"] != os.getpid()
    for name, one in zip(("one", "two"), found, strict=True):
        assert "secret" not in json.dumps(one)
        assert one["environ"] == {k: v for k, v in os.environ.items() if k != "TUNEMQ_REDIS"}
        kinds = sorted(file.partition(":")[0] for file in one["files"])
        assert kinds == ["pipe", "pipe", "socket"]  # it wakes itself by the pipe
        assert one["input"] == os.devnull
        assert one["is_leader"]
        assert one["cwd"] == str(Path.cwd())
        assert one["main"] == []
        assert one["handlers"] == [True, True]
        assert one["blocked"] == []
        assert one["dumpable"] == 1
        assert one["name"] == name
    assert found[0]["random"] != found[1]["random"]


def test_forkserver_memory_is_readable_by_no_other_process(begin, usual, tmp_path):
    experiment = begin(usual, "search", "tell(parent=os.getppid())\nos._exit(0)")
    parent = experiment.told()["parent"]
    experiment.ends()
    # The files of a process that is not dumpable belong to root, whichever user started it.
    assert Path("/proc", str(parent), "environ").stat().st_uid == 0
    reading = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    seen = subprocess.run(
        [*reading, "cat", f"/proc/{parent}/environ"], capture_output=True, check=False
    )
    assert seen.returncode != 0
    assert b"denied" in seen.stderr


def test_experiment_has_its_own_variables_and_interpreter(begin, usual, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nMADE_BY="the other" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    body = 'tell(environ=dict(os.environ), hash=hash("tunemq"), parent=os.getppid())\nos._exit(0)'
    variables = {"PYTHONHASHSEED": "7", "MINE": "yes"}
    other = begin(usual, "other", body, python=str(python), variables=variables)
    usual_one = begin(usual, "usual", body)
    found, usually = other.told(), usual_one.told()
    assert (other.ends(), usual_one.ends()) == (0, 0)
    expected = subprocess.run(
        [sys.executable, "-c", "print(hash('tunemq'))"],
        env={**os.environ, **variables},
        capture_output=True,
        check=True,
    )
    assert found["hash"] == int(expected.stdout)
    assert found["environ"]["MINE"] == "yes"
    assert found["environ"]["MADE_BY"] == "the other"
    assert not {"MINE", "MADE_BY"} & usually["environ"].keys()
    assert found["parent"] != usually["parent"]


def test_experiments_with_modules_of_the_same_name_use_their_own(begin, usual, tmp_path):
    body = (
        "sys.path.insert(0, str(HERE / 'code'))\nimport model\ntell(whose=model.WHOSE)\nos._exit(0)"
    )
    for whose in ("ann", "ben"):
        experiment = begin(
            usual,
            whose,
            f"(HERE / 'code').mkdir()\n"
            f"(HERE / 'code' / 'model.py').write_text('WHOSE = \"{whose}\"')\n{body}",
        )
        assert experiment.told() == {"whose": whose}
        assert experiment.ends() == 0


@pytest.mark.parametrize("code", [1, 0])
def test_interpreter_that_cannot_run_experiments_is_reported_with_its_output(
    begin, usual, tmp_path, code
):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "No module named tunemq_scheduler" >&2\nexit {code}\n')
    python.chmod(0o755)
    experiment = begin(usual, "search", "", python=str(python))
    assert experiment.ends() == EXIT_USE
    assert f"the interpreter {python} cannot run experiments" in experiment.said()
    assert "No module named tunemq_scheduler" in experiment.said()


def test_interpreter_with_another_tunemq_version_ends_with_a_separate_exit_code(
    begin, usual, tmp_path
):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$1" "$2" "$3" "$4" "$5" 0.0.9 "$7"\n')
    python.chmod(0o755)
    experiment = begin(usual, "search", "", python=str(python))
    assert experiment.ends() == EXIT_MUST_WAIT
    assert "and the scheduler 0.0.9" in experiment.said()
    assert "Install the scheduler's TuneMQ in it" in experiment.said()


def test_interpreter_killed_by_a_signal_is_reported_with_its_output(begin, usual, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no such instruction' >&2\nkill -SEGV $$\n")
    python.chmod(0o755)
    experiment = begin(usual, "search", "", python=str(python))
    assert experiment.ends() == -signal.SIGSEGV
    assert f"the interpreter {python} was killed by SIGSEGV" in experiment.said()
    assert "no such instruction" in experiment.said()


_BABBLER = """#!{python}
import socket, sys
control = socket.socket(fileno=int(sys.argv[sys.argv.index("-m") + 2]))
_, (channel, *_), _, _ = socket.recv_fds(control, 4096, 4)
socket.socket(fileno=channel).send({answer!r})
control.recv(1)
"""


@pytest.mark.parametrize(
    "answer", [b"hello", msgspec.msgpack.encode({"type": "forked", "pid": 2**40})]
)
def test_interpreter_with_malformed_output_harms_no_other_experiment(
    begin, usual, tmp_path, answer
):
    python = tmp_path / "python"
    python.write_text(_BABBLER.format(python=sys.executable, answer=answer))
    python.chmod(0o755)
    experiment = begin(usual, "search", "", python=str(python))
    assert experiment.ends() == EXIT_USE
    assert f"{python} is no interpreter with TuneMQ" in experiment.said()


def test_forkserver_without_descriptors_refuses_and_continues(begin, forkservers, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -n 20\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    options = {"python": str(python)}
    begun = [begin(forkservers, f"n{number}", _SLEEPS, **options) for number in range(30)]
    eventually(lambda: all(one.process.pid or one.process.returncode() for one in begun), within=60)
    rejected = [one for one in begun if one.process.returncode() is not None]
    assert 0 < len(rejected) < len(begun)
    assert {one.ends() for one in rejected} == {EXIT_AGAIN}
    assert all("descriptors" in one.said() for one in rejected), rejected[0].said()


_SHORT_LIVED = """#!{python}
import os, signal, sys
from tunemq_scheduler.farm.process import experiment_forkserver
sys.argv = sys.argv[sys.argv.index("-m") + 1:]
experiment_forkserver._leave_the_forkserver = lambda _pid: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(experiment_forkserver.main())
"""


def test_experiment_that_dies_before_it_leaves_the_forkserver_is_reported_and_reaped(
    begin, forkservers, tmp_path
):
    python = tmp_path / "python"
    python.write_text(_SHORT_LIVED.format(python=sys.executable))
    python.chmod(0o755)
    for name in ("one", "two"):
        experiment = begin(forkservers, name, _SLEEPS, python=str(python))
        assert experiment.ends() == EXIT_AGAIN
        assert experiment.said() == "its process cannot be started: it died at once"
    (server,) = forkservers._servers
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
    eventually(lambda: children.read_text() == "")


def test_forkserver_ignores_termination_signals_of_a_service_manager(begin, forkservers):
    one = begin(forkservers, "one", "tell(parent=os.getppid())\ntime.sleep(999)")
    parent = one.told()["parent"]
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        os.kill(parent, number)
    # The signals would have killed it before it forked another process.
    two = begin(forkservers, "two", "tell(parent=os.getppid())\nos.kill(os.getpid(), 15)")
    assert two.told()["parent"] == parent
    assert two.ends() == -signal.SIGTERM


_SLEEPS = "tell(pid=os.getpid(), parent=os.getppid())\ntime.sleep(999)"


def test_killed_forkserver_ends_its_experiments_and_is_replaced(begin, forkservers):
    experiments = [begin(forkservers, name, _SLEEPS) for name in ("one", "two")]
    parents = {experiment.told()["parent"] for experiment in experiments}
    (parent,) = parents
    os.kill(parent, signal.SIGKILL)
    for experiment in experiments:
        assert experiment.ends() == EXIT_AGAIN
        assert "it was forked from was killed by SIGKILL" in experiment.said()
    again = begin(forkservers, "again", "tell(parent=os.getppid())\nos._exit(0)")
    assert again.told()["parent"] != parent
    assert again.ends() == 0


def test_forkserver_that_does_not_answer_is_killed_and_replaced(begin, forkservers, monkeypatch):
    one = begin(forkservers, "one", _SLEEPS)
    parent = one.told()["parent"]
    os.kill(parent, signal.SIGSTOP)
    monkeypatch.setattr(process_module, "_ANSWER_S", 0.1)
    two = begin(forkservers, "two", "os._exit(0)")
    monkeypatch.undo()
    assert two.ends() == EXIT_AGAIN
    assert "did not answer" in two.said()
    assert one.ends() == EXIT_AGAIN
    assert begin(forkservers, "three", "os._exit(0)").ends() == 0


def test_experiment_killed_before_its_fork_does_not_run(begin, forkservers):
    one = begin(forkservers, "one", _SLEEPS)
    parent = one.told()["parent"]
    os.kill(parent, signal.SIGSTOP)
    two = begin(forkservers, "two", "time.sleep(999)")
    two.process.kill()
    assert two.ends() == -signal.SIGKILL
    os.kill(parent, signal.SIGCONT)
    three = begin(forkservers, "three", "os._exit(0)")
    assert three.ends() == 0  # it is forked after the other one
    children = Path(f"/proc/{parent}/task/{parent}/children")
    eventually(lambda: children.read_text().split() == [str(one.process.pid)])
    one.process.kill()
    assert one.ends() == -signal.SIGKILL


def test_unused_forkservers_end_except_the_default_one(begin, forkservers, monkeypatch):
    body = "tell(parent=os.getppid())\nos._exit(0)"
    rare = begin(forkservers, "rare", body, variables={"MINE": "yes"})
    usual_one = begin(forkservers, "usual", body)
    forkserver = rare.told()["parent"]
    monkeypatch.setattr(process_module, "_UNUSED_S", 0.0)
    forkservers.close_unused()
    assert is_alive(forkserver)  # it is used
    assert (rare.ends(), usual_one.ends()) == (0, 0)

    def is_gone() -> bool:
        forkservers.close_unused()
        return len(forkservers._servers) == 1

    eventually(is_gone)
    assert not is_alive(forkserver)
    assert is_alive(usual_one.told()["parent"])


_SUPERVISOR = """
import socket, sys, time
from pathlib import Path
from tests.integration.test_experiment_forkserver import _SLEEPS, Experiment
from tunemq_scheduler.farm.ipc.experiment_processes import ExperimentForkservers

experiment = Experiment(ExperimentForkservers(""), Path(sys.argv[1], "search"), _SLEEPS)
experiment.told()
print("it runs", flush=True)
time.sleep(999)
"""


def test_a_killed_supervisor_leaves_neither_the_forkserver_nor_an_experiment(tmp_path):
    root = Path(__file__).parents[2]
    line = [sys.executable, "-c", _SUPERVISOR, str(tmp_path)]
    with subprocess.Popen(line, cwd=root, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == b"it runs\n"
        told = json.loads((tmp_path / "search" / "told").read_text())
        assert is_alive(told["pid"])
        supervisor.kill()
    eventually(lambda: not is_alive(told["parent"]))
    eventually(lambda: not is_alive(told["pid"]))
