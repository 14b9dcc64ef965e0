"""Which code around a script is uploaded to a farm."""

from __future__ import annotations

import pytest

from tunemq_scheduler.api.script_files import code_place, script_name
from tunemq_shared.base.errors import ConfigError


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "project" / "train.py"
    path.parent.mkdir()
    path.write_text("import os, numpy\n")
    return path


def test_script_without_local_imports_is_uploaded_alone(script):
    (script.parent / "other.py").write_text("")
    assert code_place(script) == (script, "train.py")


@pytest.mark.parametrize("line", ["import data", "from data import x", "import data.y as z"])
@pytest.mark.parametrize("beside", ["data.py", "data/__init__.py", "data/y.py"])
def test_script_with_local_imports_is_uploaded_with_its_folder(script, line, beside):
    (script.parent / beside).parent.mkdir(exist_ok=True)
    (script.parent / beside).write_text("")
    script.write_text(f"def f():\n    {line}\n")
    assert code_place(script) == (script.parent, "train.py")


def test_code_folder_that_does_not_hold_the_script_is_rejected(script, tmp_path):
    assert code_place(script, str(tmp_path)) == (tmp_path, "project/train.py")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ConfigError, match="is not in"):
        code_place(script, str(tmp_path / "elsewhere"))
    with pytest.raises(ConfigError, match="is not a folder"):
        code_place(script, str(tmp_path / "nowhere"))


def test_script_name_with_a_tuner_is_split_at_the_colon(script, monkeypatch):
    monkeypatch.chdir(script.parent)
    assert script_name("train.py") == (script, "tuner")
    assert script_name("train.py:other") == (script, "other")
    with pytest.raises(ConfigError, match="the script missing"):
        script_name("missing.py")
    with pytest.raises(ConfigError, match="SCRIPT:NAME"):
        script_name("train.py:not a name")


def test_script_that_is_not_python_is_rejected(script):
    (script.parent / "train.sh").write_text("echo")
    with pytest.raises(ConfigError, match="its name must end in"):
        script_name(str(script.parent / "train.sh"))
    script.write_text("def f(:\n")
    with pytest.raises(ConfigError, match="cannot be read as Python"):
        code_place(script)
