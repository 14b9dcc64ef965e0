"""Which Tuner a script submits to a farm."""

from __future__ import annotations

import sys

import pytest

from tunemq_scheduler.api.tuner import Tuner
from tunemq_scheduler.farm.process.script_tuner import load_tuner
from tunemq_shared.base.errors import ConfigError, TrainableError
from tunemq_shared.executables.executable import executable

TEXT = """
import helper_of_the_script
import sys
import tunemq as tune
def train(config):
    return {"loss": helper_of_the_script.LOSS}
tuner = tune.Tuner(train, run_config=tune.RunConfig(name="mine"))
second = tune.Tuner(train)
number = 3
argv = list(sys.argv)
if __name__ == "__main__":
    raise AssertionError("this part is not to run")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "search.py").write_text(TEXT)
    (tmp_path / "helper_of_the_script.py").write_text("LOSS = 1.0")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["tunemq"])
    yield tmp_path / "search.py"
    for name in ("helper_of_the_script", "__tunemq_script__"):
        sys.modules.pop(name, None)


def test_tuner_of_a_script_is_the_variable_tuner(script):
    tuner = load_tuner(script, "tuner")
    assert isinstance(tuner, Tuner)
    assert tuner.parts.run.name == "mine"
    assert sys.argv == [str(script)]


def test_another_variable_can_be_given(script):
    assert load_tuner(script, "second").parts.run.name is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing", "does not define missing .*write .*:second"),
        ("number", "number in .* is a int, not a Tuner"),
    ],
)
def test_invalid_variable_is_reported_with_the_valid_ones(script, name, said):
    with pytest.raises(ConfigError, match=said):
        load_tuner(script, name)


def test_script_without_a_tuner_is_rejected_with_the_fix(tmp_path, script):
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ConfigError, match=r"write `tuner = tune.Tuner\(...\)` in it"):
        load_tuner(tmp_path / "empty.py", "tuner")


@pytest.mark.parametrize("call", ["tuner.fit()", "tune.run(train, verbose=0)"])
def test_script_that_runs_its_search_when_it_is_loaded_is_refused(script, call):
    """It would run there as well as on the farm."""
    script.write_text(TEXT + call)
    with pytest.raises(ConfigError, match=r"calls fit\(\) or run\(\).*if __name__"):
        load_tuner(script, "tuner")
    assert Tuner.may_fit


def test_program_is_that_of_the_scripts_folder_whatever_the_current_one(script, monkeypatch):
    script.write_text(
        "import tunemq as tune\n"
        "tuner = tune.Tuner(tune.executable(['./train.sh']))\n"
        "other = tune.Tuner(tune.executable(['program-of-the-nodes']))\n"
    )
    monkeypatch.chdir("/")
    with pytest.raises(TrainableError, match=r"submit --folder \..*\.gitignore.*\.tunemqignore"):
        load_tuner(script, "tuner")
    program = script.with_name("train.sh")
    program.touch()
    with pytest.raises(TrainableError, match="chmod"):
        load_tuner(script, "tuner")
    program.chmod(0o755)
    load_tuner(script, "tuner")
    with pytest.raises(TrainableError, match="on the PATH"):
        executable(["program-of-the-nodes"])
