"""However a script ends, its farm is gone soon after, with all files and processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil
import pytest

from tests.support.waiting import eventually

pytestmark = [pytest.mark.faults, pytest.mark.integration]

#: Everything that a script starts inherits this variable, wherever it goes.
MARK = "FARM_TEST_MARK"
#: Two seconds on an idle machine; a busy machine takes ten times as long.
GONE_WITHIN_S = 30.0

SCRIPT = """
import os, signal, subprocess, sys, threading, time
from tunemq_scheduler.embedded import warm_farms as warm
from tunemq_scheduler.embedded.embedded_farm import EmbeddedFarm

# Like a node: trial processes in separate sessions, some stubborn, some orphans.
NODE = "trap '' TERM HUP INT; setsid sleep 600 & (setsid setsid sleep 600 &); wait"
warm.EmbeddedFarm = lambda cpus, **_: EmbeddedFarm(
    1, make_node_command=lambda *_: ["/bin/sh", "-c", NODE]
)
def search():
    with warm.embedded_farm(1) as farm:
        farm.wait_until_ready()
        while "node" not in farm.pids:
            farm.trouble()
        print(farm.folder, farm.watchdog_pid, flush=True)
        ending()
"""

ENDINGS = {
    "returns": "def ending(): pass\nsearch()",
    "raises": "def ending(): raise ValueError('the script fails')\nsearch()",
    "calls sys.exit": "def ending(): sys.exit(3)\nsearch()",
    "calls os._exit": "def ending(): os._exit(0)\nsearch()",
    "aborts": "def ending(): os.abort()\nsearch()",
    "becomes another program": "def ending(): os.execv('/bin/sleep', ['sleep', '60'])\nsearch()",
    "ends while a thread searches": (
        "def ending(): time.sleep(0.2)\nthread = threading.Thread(target=search)\nthread.start()"
    ),
    "exits while a daemon thread searches": (
        "started = threading.Event()\n"
        "def ending(): started.set(); time.sleep(600)\n"
        "threading.Thread(target=search, daemon=True).start()\nstarted.wait()"
    ),
}
WAITS = "def ending(): time.sleep(600)\n"


@dataclass
class Script:
    """A running script."""

    process: subprocess.Popen[str]
    mark: str
    folder: str
    watchdog: int
    #: Pids that may outlive the script, because they do not belong to the farm.
    spared: set[int] = field(default_factory=set)

    def left(self) -> list[str]:
        """Return what remains of the farm: processes with the script's mark, and the folder."""
        found = [] if not os.path.exists(self.folder) else [self.folder]
        for process in psutil.process_iter():
            if process.pid in self.spared or process.pid == os.getpid():
                continue
            try:
                if process.environ().get(MARK) == self.mark:
                    found.append(f"{process.pid}: {process.cmdline()}")
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found


@pytest.fixture
def scripts() -> Iterator[list[Script]]:
    scripts: list[Script] = []
    yield scripts
    for script in scripts:
        script.process.kill()
        script.process.wait()
        if script.process.stdout is not None:
            script.process.stdout.close()
        for pid in script.spared:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)


def run(scripts: list[Script], ending: str, **options: object) -> Script:
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT + ending],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, MARK: mark},
        **options,
    )
    folder, watchdog = process.stdout.readline().split()[:2]
    script = Script(process, mark, folder, int(watchdog))
    scripts.append(script)
    return script


def status_of(pid: int) -> str | None:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return None


def assert_gone(script: Script) -> None:
    eventually(
        lambda: not script.left(), within=GONE_WITHIN_S, message=lambda: f"left: {script.left()}"
    )
    # The process that inherited the watchdog reaps it, so a zombie counts as ended.
    eventually(lambda: status_of(script.watchdog) in {None, psutil.STATUS_ZOMBIE})


@pytest.mark.parametrize("how", ENDINGS)
def test_embedded_farm_leaves_nothing_when_the_script_ends(how, scripts):
    script = run(scripts, ENDINGS[how])
    if how == "becomes another program":
        script.spared = {script.process.pid}
    else:
        script.process.wait(timeout=60)

    assert_gone(script)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGHUP])
def test_embedded_farm_leaves_nothing_when_the_script_dies_by_a_signal(number, scripts):
    script = run(scripts, WAITS + "search()")
    script.process.send_signal(number)

    assert_gone(script)


def test_embedded_farm_leaves_nothing_when_the_script_is_killed_before_redis_answers(scripts):
    for delay_ms in (0, 5, 10, 15, 20, 30, 50):
        mark = uuid.uuid4().hex
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                SCRIPT + "farm = warm.EmbeddedFarm(1)\nprint(farm.folder, flush=True)\n"
                f"time.sleep({delay_ms} / 1000)\nos.kill(os.getpid(), 9)",
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, MARK: mark},
        )
        folder = process.stdout.readline().strip()
        script = Script(process, mark, folder, 0)
        scripts.append(script)
        process.wait(timeout=60)
        eventually(
            lambda script=script: not script.left(),
            within=GONE_WITHIN_S,
            message=lambda script=script: f"left: {script.left()}",
        )


def test_children_of_the_script_that_hold_its_pipes_do_not_keep_the_farm_alive(scripts):
    script = _run_with_children(scripts)
    script.process.kill()

    assert_gone(script)
    assert all(psutil.pid_exists(pid) for pid in script.spared), "they are the script's own affair"


def _run_with_children(scripts: list[Script]) -> Script:
    script = run(
        scripts,
        "early = os.fork()\n"
        "if not early: time.sleep(600); os._exit(0)\n"
        "def ending():\n"
        "    late = os.fork()\n"
        "    if not late: time.sleep(600); os._exit(0)\n"
        "    print(early, late, flush=True)\n"
        "    time.sleep(600)\n"
        "search()",
    )
    script.spared = {int(pid) for pid in script.process.stdout.readline().split()}
    return script


def test_pipe_after_the_script_closes_when_the_script_is_killed(scripts):
    script = run(scripts, WAITS + "search()")
    script.process.kill()
    started = time.monotonic()

    assert script.process.stdout.read() == ""
    assert time.monotonic() - started < GONE_WITHIN_S
    assert_gone(script)


def test_ctrl_c_at_the_terminal_reaches_only_the_script(scripts):
    script = run(scripts, WAITS + "search()", start_new_session=True)
    groups = {os.getpgid(script.watchdog), os.getsid(script.watchdog)}
    for process in psutil.Process(script.watchdog).children(recursive=True):
        with contextlib.suppress(ProcessLookupError):  # one of the node's shell ends at once
            groups |= {os.getpgid(process.pid), os.getsid(process.pid)}
    assert script.process.pid not in groups
    os.killpg(script.process.pid, signal.SIGINT)
    assert script.process.wait(timeout=60) != 0
    assert_gone(script)


def test_script_that_its_parent_does_not_reap_counts_as_dead(scripts):
    script = run(scripts, WAITS + "search()")
    script.process.kill()  # the script never waits for it, so it stays a zombie

    assert_gone(script)
    assert status_of(script.process.pid) == psutil.STATUS_ZOMBIE
