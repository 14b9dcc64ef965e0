"""`tunemq scheduler` as a process: what it refuses, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.farm_processes import Command

pytestmark = pytest.mark.integration

NOWHERE = "redis://:secret@127.0.0.1:1/0"


@pytest.fixture
def refused(tmp_path: Path):
    def refused(script: str, *arguments: str) -> tuple[int, str]:
        (tmp_path / "search.py").write_text(script)
        line = ["scheduler", "--results", str(tmp_path / "results"), *arguments]
        command = Command(*line, str(tmp_path / "search.py"), log=tmp_path / "log")
        return command.ends(), command.said

    return refused


SEARCH = """
import tunemq as tune
def train(config):
    return {"loss": 1.0}
tuner = tune.Tuner(train, run_config=tune.RunConfig(name=NAME))
"""


def test_a_scheduler_without_an_address_says_how_to_give_it(refused):
    code, said = refused("")
    assert code == 64
    assert "--redis redis://host:6379/0" in said


def test_an_experiment_without_a_name_is_refused_with_the_reason(refused):
    code, said = refused(SEARCH.replace("NAME", "None"), "--redis", NOWHERE)
    assert code == 64
    assert "--name, or RunConfig(name=...)" in said


def test_a_redis_that_cannot_be_reached_is_named_without_its_password(refused, tmp_path):
    code, said = refused(SEARCH.replace("NAME", "'mine'"), "--redis", NOWHERE)
    assert code == 69
    assert "127.0.0.1:1" in said
    assert "secret" not in said
    assert "sees the password in --redis; give the address in $TUNEMQ_REDIS instead" in said
    assert not (tmp_path / "results" / "mine" / "journal").exists()


def test_a_script_that_raises_shows_where(refused):
    code, said = refused("raise RuntimeError('in the script')", "--redis", NOWHERE)
    assert code == 1
    assert "search.py" in said
    assert "RuntimeError: in the script" in said


def test_s14_no_other_process_reads_the_keys_beside_a_script(refused):
    script = (
        "from tunemq_shared.prctl import is_memory_private\nraise RuntimeError(is_memory_private())"
    )
    _, said = refused(script, "--redis", NOWHERE)
    assert "RuntimeError: True" in said


def test_a_folder_is_refused_as_the_place_of_a_copy_and_an_address_as_that_of_results(refused):
    script = SEARCH.replace("NAME", "'mine'")
    code, said = refused(script, "--redis", NOWHERE, "--take-over", "/somewhere")
    assert code == 64
    assert "s3://bucket/prefix/name" in said
    code, said = refused(script, "--redis", NOWHERE, "--results", "s3://bucket/prefix")
    assert code == 64
    assert "RunConfig(storage_path=...)" in said
