"""What nodes receive about an experiment's code, locally and on a farm."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import tunemq as tune
from tests.support.searches.plans import PLAN
from tunemq_scheduler.core.commands import StartTrial
from tunemq_scheduler.experiment.code_package import (
    CodePackage,
    environment_of,
    package_code,
    search_path,
)
from tunemq_scheduler.experiment.start_checks import PreparedSearch, prepare
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.code.blob_folder import BlobFolder
from tunemq_shared.protocol.messages import BlobRef
from tunemq_shared.protocol.result_conditions import TO_THE_END
from tunemq_shared.trainable.trainable_blobs import load

BUNDLE = BlobRef("b" * 64, 1, "", "s3://farm")


def train(config, data=None):
    return data


def prepared(trainable=train, **run) -> PreparedSearch:
    return prepare(trainable, {}, tune.TuneConfig(metric="m", mode="min"), tune.RunConfig(**run))


def start_of(plan):
    """Return the start order that a node receives for a trial of this plan."""
    order = StartTrial("t1", 1, "n", 0, b"", {"cpu": 1.0}, TO_THE_END, 0, ())
    return plan.trial_spec(order)


def test_local_trial_processes_have_this_interpreter_its_path_and_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEMQ_REDIS", "redis://secret")
    monkeypatch.setenv("MINE", "1")
    plan = package_code(PLAN, prepared(), CodePackage(blobs=BlobFolder(tmp_path)))
    environment = plan.environment
    assert environment.python == sys.executable
    assert environment.sys_path == tuple(entry or os.getcwd() for entry in sys.path)
    assert environment.variables["MINE"] == "1"
    assert "TUNEMQ_REDIS" not in environment.variables
    assert not environment.inherits
    assert load(plan.code).__name__ == "train"
    assert (plan.bundle, plan.blobs, plan.is_apart) == (None, (), False)


def test_env_vars_and_preload_of_the_run_config_reach_trial_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("MINE", "1")
    of = environment_of(prepared(env_vars={"MINE": "2", "NEW": "3"}, preload=["json"]))
    assert (of.variables["MINE"], of.variables["NEW"]) == ("2", "3")
    assert of.preload == ("json",)


def test_other_interpreter_gets_the_script_path_without_these_site_packages(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/project", *sys.path])
    of = environment_of(prepared(python="/envs/mine/bin/python"))
    assert of.python == "/envs/mine/bin/python"
    assert of.sys_path[0] == "/project"
    assert not [entry for entry in of.sys_path if "site-packages" in entry]
    assert os.path.dirname(os.__file__) not in of.sys_path


def test_code_bundle_sends_no_interpreter_or_variables_of_this_machine(tmp_path):
    code_package = CodePackage(blobs=BlobFolder(tmp_path), bundle=BUNDLE, script="scripts/train.py")
    of = environment_of(prepared(env_vars={"A": "1"}), code_package=code_package)
    assert (of.python, of.variables, of.inherits) == ("", {"A": "1"}, True)
    assert of.sys_path == ("scripts", "")


def test_code_of_a_notebook_sends_no_interpreter_or_variables_of_this_machine(tmp_path):
    code_package = CodePackage(blobs=BlobFolder(tmp_path), store="s3://bucket/farm")
    of = environment_of(prepared(env_vars={"A": "1"}), code_package=code_package)
    assert (of.python, of.variables, of.inherits, of.sys_path) == ("", {"A": "1"}, True, ())
    assert code_package.is_apart


@pytest.mark.parametrize(
    ("script", "path"),
    [("train.py", ("",)), ("a/b/train.py", ("a/b", "")), (".hidden/x.py", (".hidden", ""))],
)
def test_search_path_of_a_script_has_its_folder_and_the_bundle(script, path):
    assert search_path(script) == path


def test_code_is_uploaded_to_a_shared_store(tmp_path):
    code_package = CodePackage(blobs=BlobFolder(tmp_path / "here"), store=str(tmp_path / "shared"))
    plan = package_code(PLAN, prepared(), code_package)
    assert plan.code.path == str(tmp_path / "shared/blobs" / plan.code.sha256)
    assert not plan.is_apart
    assert start_of(plan).folder == "/nowhere/train_t1"


def test_same_code_gives_the_same_blob_in_any_folder(tmp_path):
    bound = tune.with_parameters(train, data=[1, 2, 3])
    plans = [
        package_code(PLAN, prepared(bound), CodePackage(blobs=BlobFolder(tmp_path / name)))
        for name in ("a", "b")
    ]
    assert plans[0].code.sha256 == plans[1].code.sha256
    for plan in plans:
        assert load(plan.code)({}) == [1, 2, 3]
        assert Path(plan.code.path).parent == Path(plan.blobs[0].path or plan.code.path).parent


@pytest.mark.parametrize(
    ("run", "named"),
    [
        ({"python": "python3"}, r"RunConfig\(python='python3'\).*absolute path"),
        ({"python": 3}, r"RunConfig\(python=3\)"),
        ({"env_vars": ["A=1"]}, r"RunConfig\(env_vars=\['A=1'\]\).*dict of names"),
        ({"env_vars": {"A=B": "1"}}, r"RunConfig\(env_vars=.*dict of names"),
        ({"env_vars": {"A": 1}}, r"RunConfig\(env_vars\['A'\]=1\).*give a text"),
    ],
)
def test_run_config_with_an_invalid_environment_is_rejected(run, named):
    with pytest.raises(ConfigError, match=named):
        tune.RunConfig(**run)
