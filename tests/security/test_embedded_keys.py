"""A search of a script without a farm has no keys, even if the environment names a farm's."""

from __future__ import annotations

import pytest

import tunemq as tune
from tunemq_shared.signing.key_files import KEYS_VARIABLE

pytestmark = [pytest.mark.security, pytest.mark.integration]


def train(config):
    tune.report({"score": config["x"]})


def test_a_search_of_a_script_needs_no_key_file(monkeypatch, tmp_path):
    monkeypatch.setenv(KEYS_VARIABLE, str(tmp_path / "no such file.toml"))
    grid = tune.Tuner(train, param_space={"x": tune.grid_search([1, 2])}).fit()
    assert sorted(result.metrics["score"] for result in grid) == [1, 2]
