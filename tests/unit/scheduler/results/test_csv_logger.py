"""`CSVLoggerCallback`: ``progress.csv``."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scheduler.fake_trials import FakeTrial
from tests.unit.shared.hostile_values import all_hostile
from tunemq_scheduler.output.loggers import CSVLoggerCallback
from tunemq_scheduler.results.csv_cells import cells_of, flatten


@pytest.fixture
def trial(tmp_path: Path) -> FakeTrial:
    return FakeTrial(0, tmp_path)


def rows_of(trial: FakeTrial) -> list[dict[str, str]]:
    with Path(trial.local_path, "progress.csv").open(newline="") as file:
        return list(csv.DictReader(file, strict=True))


def log(trial: FakeTrial, *results: dict) -> None:
    logger = CSVLoggerCallback()
    for result in results:
        logger.on_trial_result(0, [trial], trial, result)
    logger.on_trial_complete(0, [trial], trial)


def test_csv_logger_writes_each_result_as_a_row_with_nested_keys_joined(trial):
    log(trial, trial.result(1, loss=0.5, eval={"f1": 0.25}, ok=True, note=None))
    (row,) = rows_of(trial)
    assert float(row["loss"]) == 0.5
    assert (row["eval/f1"], row["ok"], row["note"]) == ("0.25", "True", "")
    assert (row["config/lr"], row["config/act"]) == ("0.1", "relu")


@pytest.mark.parametrize("value", all_hostile(), ids=lambda one: type(one).__name__)
def test_csv_logger_with_a_hostile_value_in_a_configuration_writes_the_row(trial, value):
    trial.config = {"a": value, "inner": {"b": [value]}}
    log(trial, trial.result(1, loss=0.5), trial.result(2, loss=0.25))
    assert [row["loss"] for row in rows_of(trial)] == ["0.5", "0.25"]
    assert all(row["config/a"] for row in rows_of(trial))


@pytest.mark.parity(174)
def test_csv_logger_adds_a_column_for_a_later_key_and_loses_no_row(trial):
    results = [trial.result(1, loss=3.0), trial.result(2, loss=2.0, accuracy=0.5), trial.result(3)]
    log(trial, *results)
    rows = rows_of(trial)
    assert [row["accuracy"] for row in rows] == ["", "0.5", ""]
    assert [row["loss"] for row in rows] == ["3.0", "2.0", ""]
    assert [row["training_iteration"] for row in rows] == ["1", "2", "3"]
    assert not list(Path(trial.local_path).glob("*.new"))


@pytest.mark.parity(91)
def test_csv_logger_of_a_restored_trial_reads_its_header_and_continues(trial):
    log(trial, trial.result(1, loss=3.0))
    log(trial, trial.result(2, loss=2.0), trial.result(3, extra=1, loss=1.0))
    rows = rows_of(trial)
    assert [row["loss"] for row in rows] == ["3.0", "2.0", "1.0"]
    assert [row["extra"] for row in rows] == ["", "", "1"]


@pytest.mark.parametrize(
    "names",
    [[f"layer_{number:05d}/{'w' * 60}" for number in range(20_000)], ['"' + "m" * 200_000, "b,"]],
    ids=["many columns", "a long name"],
)
def test_csv_logger_of_a_restored_trial_reads_a_long_header(trial, names):
    log(trial, dict.fromkeys(names, 1.5))
    log(trial, {**dict.fromkeys(names, 2.5), "late": 3})
    header, *rows = Path(trial.local_path, "progress.csv").read_text().splitlines()
    assert cells_of(header) == [*names, "late"]
    assert rows == ["1.5," * len(names), "2.5," * len(names) + "3"]


def test_csv_logger_accepts_keys_in_any_order(trial):
    log(trial, {"a": 1, "b": 2.5}, {"b": 3.5, "a": 2}, {"b": "x"}, {"b": 4.5, "a": None})
    assert [(row["a"], row["b"]) for row in rows_of(trial)] == [
        ("1", "2.5"),
        ("2", "3.5"),
        ("", "x"),
        ("", "4.5"),
    ]


def test_csv_logger_accepts_values_that_change_their_type(trial):
    log(trial, {"a": 1}, {"a": 1.5}, {"a": {"b": 2}}, {"a": [1, 2]}, {"a": "text"}, {"a": True})
    assert [row["a"] for row in rows_of(trial)] == ["1", "1.5", "", "[1, 2]", "text", "True"]
    assert rows_of(trial)[2]["a/b"] == "2"


def test_csv_logger_writes_nan_and_infinities_so_that_float_reads_them(trial):
    log(trial, {"a": math.nan}, {"a": math.inf}, {"a": -math.inf})
    read = [float(row["a"]) for row in rows_of(trial)]
    assert math.isnan(read[0])
    assert read[1:] == [math.inf, -math.inf]


def test_csv_logger_quotes_text_and_keeps_it_in_one_line(trial):
    log(trial, {"a": 'one, "two"', "b": "line\r\nend", "null": "null", "empty": ""})
    (row,) = rows_of(trial)
    assert row == {"a": 'one, "two"', "b": "line\\r\\nend", "null": "null", "empty": ""}


def test_csv_logger_writes_a_changed_configuration_from_then_on(trial):
    first = trial.result(1)
    trial.config = {"lr": 0.2, "extra": "x"}
    log(trial, first, trial.result(2))
    assert [row["config/lr"] for row in rows_of(trial)] == ["0.1", "0.2"]
    assert [row["config/extra"] for row in rows_of(trial)] == ["", "x"]


def test_csv_logger_cuts_a_row_torn_by_a_crash(trial):
    log(trial, {"a": 1, "b": 2})
    with Path(trial.local_path, "progress.csv").open("ab") as file:
        file.write(b"3,")
    log(trial, {"a": 4, "b": 5})
    assert [row["a"] for row in rows_of(trial)] == ["1", "4"]


def test_csv_logger_adds_columns_while_rows_are_buffered(trial):
    logger = CSVLoggerCallback()
    logger.on_trial_result(0, [trial], trial, {"a": 1})
    logger.on_trial_result(0, [trial], trial, {"a": 2, "b": 3})
    logger.on_step_end(0, [trial])
    assert [row["b"] for row in rows_of(trial)] == ["", "3"]
    logger.on_experiment_end([trial])


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text("ab,\"';= \u00e4\u2028")
)
results = st.dictionaries(
    st.sampled_from("abcdef"), scalars | st.fixed_dictionaries({"x": scalars}), min_size=1
)


def as_reported(text: str) -> str:
    """Return the text without the apostrophe that keeps a spreadsheet from executing it."""
    return text[1:] if text[:1] == "'" and text.lstrip("'")[:1] == "=" else text


@given(st.lists(results, min_size=1, max_size=8))
def test_csv_logger_any_result_is_read_back_unchanged(tmp_path_factory, reported):
    trial = FakeTrial(0, tmp_path_factory.mktemp("trial"))
    log(trial, *reported)
    rows = rows_of(trial)
    assert len(rows) == len(reported)
    for row, result in zip(rows, map(flatten, reported), strict=True):
        for key, text in row.items():
            value = result.get(key)
            if isinstance(value, float):
                assert float(text) == value
            else:
                assert as_reported(text) == ("" if value is None else str(value))
