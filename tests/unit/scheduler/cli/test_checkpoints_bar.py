"""The bar of `tunemq checkpoints verify` and `get`."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from tunemq_scheduler.cli.checkpoints_command import _with_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_names_of_checkpoints_control_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    names = ["a\x1b]0;owned\x07", "b[/x]\x9b2J", "c\u202e"]
    chosen: list[Any] = [
        SimpleNamespace(key=name, committed=SimpleNamespace(size=1)) for name in names
    ]
    assert [one.key for one in _with_bar(chosen, "verifying")] == names
    shown = terminal.getvalue()
    assert "verifying c" in shown
    assert "]0;owned" not in shown.replace("\\x1b]0;owned", "")
    assert not {"\x07", "\x9b", "\u202e"} & set(shown)
