"""`tunemq scheduler` as a process: the options that it rejects, and its error messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.farms.farm_processes import Command

pytestmark = pytest.mark.integration

NOWHERE = "redis://:secret@127.0.0.1:1/0"


@pytest.fixture
def rejected(tmp_path: Path):
    def rejected(*arguments: str) -> tuple[int, str]:
        line = ["scheduler", "--results", str(tmp_path / "results"), *arguments]
        command = Command(*line, log=tmp_path / "log")
        return command.ends(), command.said

    return rejected


def test_a_scheduler_without_an_address_says_how_to_give_it(rejected):
    code, said = rejected()
    assert code == 64
    assert "--redis redis://host:6379/0" in said


@pytest.mark.parametrize(
    "unknown", [["--jornal-release", "store"], ["--journal", "store"], ["search.py"]]
)
def test_unknown_and_abbreviated_arguments_are_named(rejected, unknown):
    code, said = rejected(*unknown)
    assert code == 2
    assert f"unrecognized arguments: {' '.join(unknown)}" in said


def test_a_redis_that_cannot_be_reached_is_named_without_its_password(rejected):
    code, said = rejected("--redis", NOWHERE)
    assert code == 69
    assert "127.0.0.1:1" in said
    assert "secret" not in said
    assert "see the password in --redis; set $TUNEMQ_REDIS instead" in said
