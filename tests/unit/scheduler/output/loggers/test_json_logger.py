"""`JsonLoggerCallback`: the files in a trial's folder."""

from __future__ import annotations

import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scheduler.fake_trials import FakeTrial
from tests.unit.shared.hostile_values import all_hostile
from tunemq_scheduler.output.loggers import JsonLoggerCallback, appended_files
from tunemq_scheduler.output.loggers.appended_files import AppendedFile, AppendedFiles
from tunemq_scheduler.results.json_encoding import result_to_json, to_json, to_plain
from tunemq_shared.base.errors import StoreError


@pytest.fixture
def trial(tmp_path: Path) -> FakeTrial:
    return FakeTrial(0, tmp_path)


def lines_of(trial: FakeTrial) -> list[dict]:
    content = Path(trial.local_path, "result.json").read_bytes()
    return [json.loads(line) for line in content.splitlines()]


@pytest.mark.parametrize("value", all_hostile(), ids=lambda one: type(one).__name__)
def test_json_logger_with_a_hostile_value_in_a_configuration_writes_the_result(
    trial: FakeTrial, value: Any
) -> None:
    trial.config = {"a": value, "inner": {"b": [value]}, "n": 1}
    logger = log(trial, {"loss": 0.5, "config": trial.config})
    logger.on_trial_start(0, [trial], trial)
    trial.config = {"a": value, "n": 2}
    logger.on_trial_start(0, [trial], trial)
    (line,) = lines_of(trial)
    assert (line["loss"], line["config"]["n"]) == (0.5, 1)
    assert json.loads(Path(trial.local_path, "params.json").read_text())["n"] == 2


def log(trial: FakeTrial, *results: dict) -> JsonLoggerCallback:
    logger = JsonLoggerCallback()
    logger.on_trial_start(0, [trial], trial)
    for result in results:
        logger.on_trial_result(0, [trial], trial, result)
    logger.on_trial_complete(0, [trial], trial)
    return logger


@pytest.mark.parity(174)
def test_json_logger_writes_each_result_as_one_complete_line(trial):
    results = [trial.result(1, loss=0.5, eval={"f1": 0.25}), trial.result(2, loss=0.25)]
    log(trial, *results)
    assert lines_of(trial) == results


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("nested", [False, True])
def test_json_logger_nan_and_infinities_are_read_back_unchanged(trial, value, nested):
    log(trial, trial.result(1, loss={"inner": [value]} if nested else value, name="null"))
    read = lines_of(trial)[0]["loss"]
    read = read["inner"][0] if nested else read
    assert math.isnan(read) if math.isnan(value) else read == value


def test_json_logger_none_stays_none_beside_a_nan(trial):
    log(trial, trial.result(1, loss=math.nan, note=None))
    assert lines_of(trial)[0]["note"] is None


@pytest.mark.parity(174)
def test_json_logger_writes_the_configuration_as_json_and_as_a_pickle(tmp_path):
    trial = FakeTrial(0, tmp_path, lr=0.1, layers=[1, 2], nan=math.nan, none=None)
    log(trial)
    text = Path(trial.local_path, "params.json").read_text()
    read = json.loads(text)
    assert math.isnan(read.pop("nan"))
    assert read == {"lr": 0.1, "layers": [1, 2], "none": None}
    pickled = pickle.loads(Path(trial.local_path, "params.pkl").read_bytes())
    assert pickled["layers"] == [1, 2]


def test_json_logger_writes_other_values_as_their_repr(tmp_path):
    trial = FakeTrial(0, tmp_path, act=math.sqrt, sizes={1}, pair={(1, 2): "x"}, np=np.float32(2))
    log(trial, trial.result(1, loss=1.0))
    read = json.loads(Path(trial.local_path, "params.json").read_text())
    assert read == {"act": repr(math.sqrt), "sizes": [1], "pair": {"(1, 2)": "x"}, "np": 2.0}
    assert lines_of(trial)[0]["config"] == read


def test_json_logger_with_an_unpicklable_configuration_leaves_out_the_pickle_only(tmp_path, caplog):
    trial = FakeTrial(0, tmp_path, stream=sys.stdout)
    log(trial, trial.result(1))
    assert not Path(trial.local_path, "params.pkl").exists()
    assert "params.pkl of trial ab12_00000 is not written" in caplog.text
    assert len(lines_of(trial)) == 1


def test_json_logger_writes_a_changed_configuration_anew(trial):
    logger = JsonLoggerCallback()
    logger.on_trial_start(0, [trial], trial)
    trial.config = {"lr": 0.2}
    logger.on_trial_start(1, [trial], trial)
    logger.on_trial_result(1, [trial], trial, trial.result(1))
    logger.on_experiment_end([trial])
    assert json.loads(Path(trial.local_path, "params.json").read_text()) == {"lr": 0.2}
    assert lines_of(trial)[0]["config"] == {"lr": 0.2}


@pytest.mark.parity(132)
def test_json_logger_buffers_results_until_the_turn_ends(trial):
    logger = JsonLoggerCallback()
    logger.on_trial_result(0, [trial], trial, trial.result(1))
    assert not Path(trial.local_path, "result.json").exists()
    logger.on_step_end(0, [trial])
    assert len(lines_of(trial)) == 1
    logger.on_experiment_end([trial])


def test_json_logger_with_many_results_in_a_turn_bounds_its_buffer(trial):
    logger = JsonLoggerCallback()
    for step in range(500):
        logger.on_trial_result(0, [trial], trial, trial.result(step, text="x" * 1000))
    assert Path(trial.local_path, "result.json").stat().st_size > 400_000
    logger.on_experiment_end([trial])
    assert len(lines_of(trial)) == 500


@pytest.mark.parity(91)
def test_json_logger_of_a_restarted_trial_cuts_a_torn_line_and_appends(trial):
    log(trial, trial.result(1))
    with Path(trial.local_path, "result.json").open("ab") as file:
        file.write(b'{"training_iteration": 2, "lo')
    log(trial, trial.result(2))
    assert [line["training_iteration"] for line in lines_of(trial)] == [1, 2]


def test_json_logger_empties_a_file_of_one_torn_line(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 3_000_000)
    files = AppendedFiles()
    files.append(AppendedFile(str(path)), b"whole")
    files.close_all()
    assert path.read_bytes() == b"whole\n"


@pytest.mark.parity(91)
def test_json_logger_keeps_few_files_open_with_many_trials(tmp_path, monkeypatch):
    monkeypatch.setattr(appended_files, "OPEN_FILES", 3)
    files = AppendedFiles()
    many = [AppendedFile(str(tmp_path / f"{n}")) for n in range(10)]
    for turn in range(2):
        for file in many:
            files.append(file, b"%d" % turn)
        files.flush()
        assert len(files._open) == 3
    files.close_all()
    assert not files._open
    assert {(tmp_path / f"{n}").read_bytes() for n in range(10)} == {b"0\n1\n"}


def test_json_logger_names_an_unwritable_file_and_keeps_its_lines(tmp_path):
    folder = tmp_path / ("long" * 100)
    file = AppendedFile(str(folder / "result.json"))
    files = AppendedFiles()
    files.append(file, b"one")
    with pytest.raises(StoreError, match=r"result\.json cannot be written: File name too long"):
        files.flush()
    file.path = str(tmp_path / "gone" / "result.json")
    files.flush()
    files.close_all()
    assert (tmp_path / "gone" / "result.json").read_bytes() == b"one\n"


def test_json_logger_on_a_full_disk_loses_and_repeats_no_line(tmp_path):
    file = AppendedFile(str(tmp_path / "result.json"))
    files = AppendedFiles()
    files._open[file.path] = os.open("/dev/full", os.O_RDWR)
    files.append(file, b"one")
    files.flush()  # while the search runs, the logger waits for space
    files.close(file)
    assert bytes(file.held) == b"one\n"
    with pytest.raises(StoreError, match="No space left on device; 4 bytes wait"):
        files.close_all()
    assert bytes(file.held) == b"one\n"
    files.release(file)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


@given(st.dictionaries(st.text(), values), values)
def test_json_logger_any_result_is_read_back_unchanged(metrics, config):
    import msgspec

    result = {**metrics, "config": config}
    encoded = to_json(config)
    line = result_to_json(result, msgspec.Raw(encoded), encoded.count(b"null"))
    assert b"\n" not in line
    assert repr(json.loads(line)) == repr(to_plain(result))


def test_loggers_results_and_callbacks_import_no_large_package():
    code = (
        "import sys, tunemq_scheduler.results.callback, tunemq_scheduler.output.loggers, "
        "tunemq_scheduler.results.result_grid, tunemq_scheduler.output.terminal.reporter; "
        "print({'pandas', 'numpy', 'rich', 'cloudpickle', 'celery', 'redis'} & set(sys.modules))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    )
    assert shown.stdout.strip() == "set()"
