"""The real command, with an output that is closed or whose reader has ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tunemq as tune
from tests.support.searches.searches import fit

pytestmark = pytest.mark.integration

MANY = 200


def saver(config):
    for step in range(1, MANY):
        tune.report({"step": step}, checkpoint=tune.Checkpoint.from_dict({"step": step}))


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> str:
    results = tmp_path_factory.mktemp("results")
    return fit(saver, name="e", storage_path=str(results)).experiment_path


def run(arguments: list[str], closed: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tunemq", *arguments]
    if closed:
        command = ["sh", "-c", f'exec "$@" {closed}', "sh", *command]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    finally:
        os.close(writer)


@pytest.mark.parametrize("closed", ["", ">&-"])
@pytest.mark.parametrize(
    "arguments", [["checkpoints", "list"], ["checkpoints", "verify"], ["journal", "show"]]
)
def test_commands_whose_output_is_read_no_further_say_nothing(
    experiment: str, arguments: list[str], closed: str
) -> None:
    done = run([*arguments, experiment], closed)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", ["", ">&-"])
@pytest.mark.parametrize("arguments", [["--help"], ["show", "--help"], ["health", "--help"]])
def test_help_that_is_read_no_further_says_nothing(arguments: list[str], closed: str) -> None:
    done = run(arguments, closed)
    assert (done.returncode, done.stderr) == (0, "")


def test_missing_journal_is_reported_without_an_output(tmp_path: Path) -> None:
    done = run(["journal", "show", str(tmp_path)], ">&-")
    assert done.returncode == 64
    assert "there is no journal" in done.stderr
