"""Search spaces in files: their syntax, and the messages for errors in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tunemq as tune
from tunemq_scheduler.search.space_file import read_space_file
from tunemq_shared.base.errors import SearchSpaceError


def read(folder: Path, text: str, name: str = "space.yaml"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return read_space_file(str(path))


def test_space_file_with_domains_groups_and_constants_is_read(tmp_path):
    space = read(
        tmp_path,
        """
        lr: {loguniform: [1e-4, 1e-1]}
        layers: {choice: [1, 2, 3]}
        width: {qrandint: {lower: 8, upper: 64, q: 8}}
        noise: {randn: {}}
        optimizer:
          name: {grid_search: [adam, sgd]}
          momentum: {uniform: {lower: 0.5, upper: 0.99}}
        epochs: 20
        shape: [64, {randint: [1, 9]}]
        """,
    )

    assert space == {
        "lr": tune.loguniform(1e-4, 1e-1),
        "layers": tune.choice([1, 2, 3]),
        "width": tune.qrandint(8, 64, 8),
        "noise": tune.randn(),
        "optimizer": {
            "name": tune.grid_search(["adam", "sgd"]),
            "momentum": tune.uniform(0.5, 0.99),
        },
        "epochs": 20,
        "shape": [64, tune.randint(1, 9)],
    }


def test_space_file_choice_may_hold_domains(tmp_path):
    space = read(tmp_path, "opt: {choice: [{name: sgd, momentum: {uniform: [0, 1]}}, adam]}")

    assert space["opt"] == tune.choice([{"name": "sgd", "momentum": tune.uniform(0, 1)}, "adam"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.5E+3", 1500.0),
        (".5", 0.5),
        ("7", 7),
        ("0x10", 16),
        ("010", "010"),
        ("1_000", "1_000"),
        ("no", "no"),
        ("off", "off"),
        ("true", True),
        ("null", None),
        ("2026-01-31", "2026-01-31"),
        ("12:30", "12:30"),
    ],
)
def test_space_file_scalars_are_those_of_yaml_1_2(tmp_path, text, value):
    assert read(tmp_path, f"x: {text}") == {"x": value}


def test_space_file_in_json_is_read_as_json(tmp_path):
    text = json.dumps({"lr": {"uniform": [0, 1]}}, indent="\t")

    assert read(tmp_path, text, "space.json") == {"lr": tune.uniform(0, 1)}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\nlr: {loguniform: [0, 1]}", "line 2: lr/loguniform: .*lower must be above 0"),
        ("lr: {uniform: [1]}", r"line 1: lr/uniform: .*write uniform: \[lower, upper\]"),
        ("lr: {uniform: {low: 0, upper: 1}}", "lr/uniform: .*low"),
        ("lr: {uniform: 3}", "3 is not a list"),
        ("opt:\n  lr: {logunifrom: [0.1, 1]}", "line 2: opt/lr/logunifrom: .*mean loguniform"),
        ("lr: {uniform: [0, 1], q: 2}", "uniform stands beside other keys"),
        ("lr: {choice: 3}", r"write choice: \[1, 2, 3\]"),
        ("lr: {choice: []}", "no values to choose from"),
        ("lr: {sample_from: x}", "only Python scripts"),
        ("lr: 1\nb: 2\nlr: 3", "line 3: lr stands on line 1 already"),
        ("a:\n  lr: [1, 2", "line 2: this is not YAML"),
        ("1: 2", "the name 1 is not text"),
        ("lr: !!python/object:os.system x", "not YAML"),
        ("", "has no parameters"),
        ("- 1", "has no parameters"),
    ],
)
def test_space_file_error_names_the_place_and_the_fix(tmp_path, text, told):
    with pytest.raises(SearchSpaceError, match=told):
        read(tmp_path, text)


def test_space_file_with_invalid_json_is_rejected(tmp_path):
    with pytest.raises(SearchSpaceError, match="is not JSON"):
        read(tmp_path, "{", "space.json")


def test_missing_space_file_is_rejected(tmp_path):
    with pytest.raises(SearchSpaceError, match=r"nothere.yaml' cannot be read"):
        read_space_file(str(tmp_path / "nothere.yaml"))
