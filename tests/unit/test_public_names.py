"""`import tunemq as tune` offers Ray Tune's names; each works, and the import is cheap."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tunemq

HEAVY = ("celery", "kombu", "redis", "minio", "optuna", "numpy", "pandas", "sklearn", "rich")
SUBMODULES = sorted(tunemq._SUBMODULES)


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True
    )
    return done.stdout


@pytest.mark.parametrize("name", tunemq.__all__)
def test_every_public_name_exists(name):
    assert getattr(tunemq, name) is not None


@pytest.mark.parametrize("name", SUBMODULES)
def test_every_submodule_is_an_attribute_and_has_the_names_of_its_list(name):
    module = getattr(tunemq, name)

    assert module is importlib.import_module(f"tunemq.{name}")
    assert module.__all__
    assert all(getattr(module, exported) is not None for exported in module.__all__)


def test_names_for_type_checkers_are_the_existing_ones():
    tree = ast.parse(Path(tunemq.__file__).read_text())
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = {
        node.module: tuple(sorted(alias.name for alias in node.names))
        for node in block.body
        if isinstance(node, ast.ImportFrom)
    }

    assert seen == {module: tuple(sorted(names)) for module, names in tunemq._HOMES.items()}
    assert sorted(tunemq.__all__) == sorted(tunemq._HOME_OF)


def test_importing_tunemq_imports_nothing_heavy():
    loaded = python("import sys, tunemq; print(*sys.modules)").split()

    assert not {name.partition(".")[0] for name in loaded} & {
        *HEAVY,
        "tunemq_shared",
        "tunemq_scheduler",
        "tunemq_workers",
    }


def test_imports_of_a_trial_load_no_client_and_no_array_library():
    code = (
        "import sys, tunemq as tune\n"
        "tune.report, tune.get_context, tune.get_checkpoint, tune.Checkpoint, tune.Trainable\n"
        "tune.with_parameters, tune.with_resources, tune.TuneError\n"
        "print(*sys.modules)"
    )

    assert not {name.partition(".")[0] for name in python(code).split()} & {*HEAVY}


def test_no_submodule_imports_a_client_or_an_array_library():
    """The processes of a script's trials repeat its imports."""
    modules = [
        f"tunemq.{name}"
        for name in (*SUBMODULES, "search.basic_variant", "search.optuna", "search.bohb")
    ]
    loaded = python(f"import sys, {', '.join(modules)}; print(*sys.modules)").split()

    assert not {name.partition(".")[0] for name in loaded} & {*HEAVY}


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'tuner_of_pianos'"):
        tunemq.tuner_of_pianos  # noqa: B018  tests the access itself


def test_completion_shows_names_and_submodules():
    assert {"Tuner", "schedulers", "__version__"} <= set(dir(tunemq))


def test_command_prints_its_version():
    done = subprocess.run(
        [sys.executable, "-m", "tunemq", "--version"], check=True, capture_output=True, text=True
    )

    assert done.stdout == f"tunemq {tunemq.__version__}\n"


def test_names_used_in_documents_exist():
    root = Path(tunemq.__file__).parents[1]
    known = {*tunemq.__all__, *SUBMODULES}
    documents = [root / "README.md", *(root / "docs").rglob("*.md")]
    unknown = {
        f"{path.relative_to(root)}: {found[0]}"
        for path in documents
        if "decisions" not in path.parts
        for found in re.finditer(r"\btune\.([A-Za-z_]\w*)", path.read_text())
        if found[1] not in known
    }
    assert not unknown
