"""Whole numbers beyond their bounds are argument errors that name option, value and bounds."""

from __future__ import annotations

import pytest

from tunemq.__main__ import main
from tunemq_scheduler.api.submit import SubmitOptions
from tunemq_shared.base.errors import ConfigError

HUGE = "9" * 20


@pytest.mark.parametrize(
    ("arguments", "option", "bounds"),
    [
        (["submit", "search.py", "--priority", HUGE], "--priority", "from -1000000 to 1000000"),
        (["submit", "search.py", "--priority", "-1000001"], "--priority", "from -1000000"),
        (["submit", "search.py", "--priority", "1.5"], "--priority", "from -1000000"),
        (["show", "name", "--trials", HUGE], "--trials", "from 0 to 9223372036854775807"),
        (["show", "name", "--trials", "-1"], "--trials", "from 0 to"),
        (["logs", "name", "--tail", HUGE], "--tail", "from 0 to 9223372036854775807"),
        (["journal", "show", "folder", "--tail", HUGE], "--tail", "from 0 to"),
    ],
)
def test_whole_number_beyond_its_bounds_names_option_value_and_bounds(
    arguments: list[str], option: str, bounds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    said = capsys.readouterr().err
    assert f"argument {option}: '{arguments[-1]}' is invalid" in said
    assert f"use a whole number {bounds}" in said


def test_number_of_thousands_of_digits_is_shown_in_part(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["show", "name", "--trials", "9" * 5000])
    assert "[... 5000 characters ...]" in capsys.readouterr().err


@pytest.mark.parametrize("priority", [10**20, -1_000_001, 1.5, "high", True])
def test_priority_of_a_submission_is_a_bounded_whole_number(priority: object) -> None:
    with pytest.raises(ConfigError, match="whole number from -1000000 to 1000000"):
        SubmitOptions(priority=priority)  # type: ignore[arg-type]
