"""Commands warn about misspelt variables when they start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import run_tunemq


@pytest.mark.parametrize("command", ["scheduler", "worker"])
def test_command_with_a_misspelt_variable_names_the_one_that_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
):
    monkeypatch.delenv("TUNEMQ_REDIS", raising=False)
    monkeypatch.setenv("TUNEMQ_KEY", "keys.toml")
    said = run_tunemq(tmp_path, command, code=64).stderr
    assert "the variable TUNEMQ_KEY; did you mean TUNEMQ_KEYS?" in said
    assert f"tunemq {command}: no part of TuneMQ" in said
