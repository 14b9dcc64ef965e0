"""Environments in which no process can start are rejected at submission."""

from __future__ import annotations

import pytest

from tunemq_scheduler.farm.service.requested_environment import check_settings
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.farm_requests import ExperimentEnvironment


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (ExperimentEnvironment(variables={"": "1"}), r"settings\.variables: '' is not the name"),
        (
            ExperimentEnvironment(variables={"A=B": "1"}),
            r"settings\.variables: 'A=B' is not the name",
        ),
        (
            ExperimentEnvironment(variables={"A\0": "1"}),
            r"settings\.variables: 'A\\x00' is not the name",
        ),
        (
            ExperimentEnvironment(variables={"A": "\0"}),
            r"settings\.variables: 'A' is '\\x00'; remove the NUL",
        ),
        (
            ExperimentEnvironment(python="/opt/py\0"),
            r"settings\.python: '/opt/py\\x00' is invalid",
        ),
        (
            ExperimentEnvironment(python="venv/bin/python"),
            r"settings\.python: .* write an absolute path",
        ),
        (
            ExperimentEnvironment(preload=("numpy", "a-b")),
            r"settings\.preload: 'a-b' is not the name of a module",
        ),
        (
            ExperimentEnvironment(preload=("a..b",)),
            r"settings\.preload: 'a\.\.b' is not the name of a module",
        ),
        (ExperimentEnvironment(python="./" + "x" * 10_000), r"x\.\.\.' is invalid"),
    ],
)
def test_invalid_environment_is_named_with_the_valid_ones(settings, told):
    with pytest.raises(ConfigError, match=told):
        check_settings(settings)


@pytest.mark.parametrize("python", ["", "python3", "/opt/venv/bin/python"])
def test_valid_environment_is_accepted(python):
    check_settings(
        ExperimentEnvironment(
            python=python, variables={"A": "b=c", "B": ""}, preload=("numpy", "os.path")
        )
    )
