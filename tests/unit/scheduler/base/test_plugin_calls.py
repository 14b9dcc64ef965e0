"""Plug-ins: a child that one forks does not continue the search."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest

from tunemq_scheduler.base.plugin_calls import call_plugin
from tunemq_shared.base.errors import SearchFailed


def leave_by_return(child: int) -> int:
    return child


def leave_by_raise(child: int) -> int:
    if child == 0:
        raise RuntimeError("in the child")
    return child


def leave_by_exit(child: int) -> int:
    if child == 0:
        sys.exit(3)
    return child


@pytest.mark.parametrize("leave", [leave_by_return, leave_by_raise, leave_by_exit])
def test_child_that_a_plugin_forks_ends_when_it_leaves_the_plugin(
    leave: Callable[[int], int], capfd: pytest.CaptureFixture[str]
) -> None:
    def fork() -> int:
        return leave(os.fork())

    child = call_plugin("the callback Mine", fork)

    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == os.EX_SOFTWARE
    assert "the callback Mine forked a process" in capfd.readouterr().err


def test_plugin_that_raises_fails_the_search_with_its_traceback() -> None:
    def fail() -> None:
        raise ValueError("no such metric")

    with pytest.raises(SearchFailed, match="the callback Mine raised ValueError: no such metric"):
        call_plugin("the callback Mine", fail)
