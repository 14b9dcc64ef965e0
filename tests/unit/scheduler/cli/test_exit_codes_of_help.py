"""The exit codes that the help of the services names."""

from __future__ import annotations

import pytest

from tunemq.__main__ import main


@pytest.mark.parametrize(
    ("command", "invalid"),
    [(["worker"], ["--cpus", "two"]), (["scheduler"], ["--metrics"]), (["store", "serve"], [])],
)
def test_help_names_both_exit_codes_of_invalid_arguments(command, invalid, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*command, *invalid])
    capsys.readouterr()
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--help"])
    assert "2 and 64 invalid arguments" in " ".join(capsys.readouterr().out.split())
