"""Failpoints: off unless asked for, exact when asked for, and no name without a place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tunemq_shared import failpoints
from tunemq_shared.errors import BugError, ConfigError
from tunemq_shared.failpoints import FAILPOINTS, VARIABLE, check_spec, failpoint

ROOT = Path(__file__).parents[3]
USED = re.compile(r"\bfailpoint\(\s*\"([^\"]+)\"")

SCRIPT = """
import sys
from tunemq_shared.failpoints import failpoint
for n in range(5):
    print(n, flush=True)
    failpoint("cache.before_copy")
"""


def reread() -> None:
    """Have the environment looked at again, as after a fork."""
    failpoints._disarm()


@pytest.fixture
def arm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def arm(spec: str) -> None:
        monkeypatch.setenv(VARIABLE, spec)
        reread()

    yield arm
    monkeypatch.undo()
    reread()


def test_nothing_fails_unless_asked(arm: Callable[[str], None]) -> None:
    arm("")
    for name in FAILPOINTS:
        failpoint(name)


def test_one_that_is_off_costs_next_to_nothing(arm: Callable[[str], None]) -> None:
    arm("")
    # In many short times: on a busy machine others run in most of the long ones.
    best = min(timeit.repeat(lambda: failpoint("cache.before_copy"), number=1_000, repeat=100))
    assert best / 1_000 < 1e-6


def test_an_error_comes_once_at_its_time(arm: Callable[[str], None]) -> None:
    arm("cache.before_copy=error@3, cache.after_copy=error")
    for _ in range(2):
        failpoint("cache.before_copy")
    with pytest.raises(OSError, match=r"failpoint cache\.before_copy"):
        failpoint("cache.before_copy")
    failpoint("cache.before_copy")
    with pytest.raises(OSError, match=r"failpoint cache\.after_copy"):
        failpoint("cache.after_copy")


def test_one_place_may_do_several_things(arm: Callable[[str], None]) -> None:
    arm("cache.before_copy=delay:0@1,cache.before_copy=error@2")
    failpoint("cache.before_copy")
    with pytest.raises(OSError, match=r"failpoint"):
        failpoint("cache.before_copy")


def test_kill_is_a_sigkill_to_oneself() -> None:
    environ = {**os.environ, VARIABLE: "cache.before_copy=kill@3"}
    shown = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=False
    )
    assert shown.returncode == -9
    assert shown.stdout.split() == ["0", "1", "2"]


def test_a_forked_process_counts_for_itself(arm: Callable[[str], None]) -> None:
    arm("cache.before_copy=error@2")
    failpoint("cache.before_copy")
    if not (pid := os.fork()):
        try:
            failpoint("cache.before_copy")
            failpoint("cache.before_copy")
        except OSError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cache.before_copy", r"'cache.before_copy': it must be name=action"),
        ("nowhere=kill", r"no failpoint 'nowhere'; there are cache\.before_copy, "),
        ("cache.before_copy=die", r"kill, error or delay:SECONDS"),
        ("cache.before_copy=kill:1", r"kill, error or delay:SECONDS"),
        ("cache.before_copy=delay", r"kill, error or delay:SECONDS"),
        ("cache.before_copy=delay:soon", r"a number of seconds"),
        ("cache.before_copy=delay:-1", r"a number of seconds"),
        ("cache.before_copy=delay:nan", r"a number of seconds"),
        ("cache.before_copy=kill@0", r"from 1"),
        ("cache.before_copy=kill@x", r"from 1"),
        ("cache.before_copy=kill@", r"from 1"),
        ("cache.after_copy=kill,cache.before_copy=error@-1", r"cache.before_copy=error@-1"),
    ],
)
def test_what_cannot_be_read_is_named(spec: str, message: str, arm: Callable[[str], None]) -> None:
    with pytest.raises(ConfigError, match=rf"{VARIABLE} has .*{message}"):
        check_spec(spec)
    arm(spec)
    with pytest.raises(ConfigError, match=message):
        failpoint("cache.before_copy")


@pytest.mark.parametrize(
    "spec", ["", " , ", "upload.before_manifest=delay:0.5@2, journal.after_append=kill"]
)
def test_what_can_be_read_is_accepted(spec: str) -> None:
    check_spec(spec)


def test_a_place_that_nobody_listed_is_our_mistake(arm: Callable[[str], None]) -> None:
    arm("cache.before_copy=kill")
    with pytest.raises(BugError, match="'nowhere' is no failpoint"):
        failpoint("nowhere")


def test_each_failpoint_stands_somewhere_in_the_code() -> None:
    used: set[str] = set()
    for package in ("shared", "scheduler", "workers"):
        for file in (ROOT / package).rglob("*.py"):
            used.update(USED.findall(file.read_text(encoding="utf-8")))
    assert used == set(FAILPOINTS)
