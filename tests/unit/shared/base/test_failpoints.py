"""Failpoints: off by default, and exact when enabled."""

from __future__ import annotations

import os
import subprocess
import sys
import timeit
from collections.abc import Callable, Iterator

import pytest

from tests.support.failpoints import FAILPOINTS
from tunemq_shared.base import failpoints
from tunemq_shared.base.failpoints import VARIABLE, failpoint

SCRIPT = """
from tunemq_shared.base.failpoints import failpoint
for n in range(5):
    print(n, flush=True)
    failpoint("cache.before_copy")
"""


@pytest.fixture
def arm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def arm(spec: str) -> None:
        monkeypatch.setenv(VARIABLE, spec)
        failpoints._disarm()  # the environment is read again, as after a fork

    yield arm
    monkeypatch.undo()
    failpoints._disarm()


def test_nothing_fails_by_default(arm: Callable[[str], None]) -> None:
    arm("")
    for name in FAILPOINTS:
        failpoint(name)


def test_disabled_failpoint_costs_next_to_nothing(arm: Callable[[str], None]) -> None:
    arm("")
    # Many short runs, because a busy machine interrupts most long ones.
    best = min(timeit.repeat(lambda: failpoint("cache.before_copy"), number=1_000, repeat=100))
    assert best / 1_000 < 1e-6


def test_error_is_raised_once_at_its_count(arm: Callable[[str], None]) -> None:
    arm("cache.before_copy=error@3,cache.after_copy=error")
    for _ in range(2):
        failpoint("cache.before_copy")
    with pytest.raises(OSError, match=r"failpoint cache\.before_copy"):
        failpoint("cache.before_copy")
    failpoint("cache.before_copy")
    with pytest.raises(OSError, match=r"failpoint cache\.after_copy"):
        failpoint("cache.after_copy")


def test_one_failpoint_may_have_several_actions(arm: Callable[[str], None]) -> None:
    arm("cache.before_copy=delay:0@1,cache.before_copy=error@2")
    failpoint("cache.before_copy")
    with pytest.raises(OSError, match=r"failpoint"):
        failpoint("cache.before_copy")


def test_kill_sends_sigkill_to_the_process_itself() -> None:
    environ = {**os.environ, VARIABLE: "cache.before_copy=kill@3"}
    shown = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=False
    )
    assert shown.returncode == -9
    assert shown.stdout.split() == ["0", "1", "2"]


def test_forked_process_has_separate_counts(arm: Callable[[str], None]) -> None:
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


@pytest.mark.parametrize("spec", ["cache.before_copy=die", "cache.before_copy=kill@soon"])
def test_invalid_value_is_an_error(spec: str, arm: Callable[[str], None]) -> None:
    arm(spec)
    with pytest.raises(ValueError, match=r"die|soon"):
        failpoint("cache.before_copy")
