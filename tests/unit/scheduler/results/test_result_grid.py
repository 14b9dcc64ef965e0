"""`Result` and `ResultGrid`."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.scheduler.fake_trials import FakeTrial
from tunemq_scheduler.output.loggers import JsonLoggerCallback
from tunemq_scheduler.results.lazy_results import MadeWhenAsked
from tunemq_scheduler.results.result import Result
from tunemq_scheduler.results.result_grid import ResultGrid
from tunemq_shared.base.errors import ConfigError, MetricError, TrialError, TuneError
from tunemq_shared.checkpoints.checkpoint import Checkpoint


def finished(folder: Path, number: int, *values: float, status: str = "TERMINATED") -> Result:
    """Return a trial that reported these losses."""
    trial = FakeTrial(number, folder, lr=0.1 * number)
    logger = JsonLoggerCallback()
    logger.log_trial_start(trial)
    for step, value in enumerate(values, 1):
        logger.log_trial_result(0, trial, trial.result(step, loss=value, eval={"f1": -value}))
    logger.on_experiment_end([])
    return Result(
        metrics=trial.last_result, path=trial.local_path, trial_id=trial.trial_id, status=status
    )


def grid(*results: Result, metric: str | None = "loss", mode: str | None = "min") -> ResultGrid:
    return ResultGrid(results, experiment_path="/results/run", metric=metric, mode=mode)


def best(results: ResultGrid, **how: Any) -> int:
    return list(results).index(results.get_best_result(**how))


def test_result_grid_is_a_sequence_of_results(tmp_path):
    one, two = finished(tmp_path, 1, 1.0), finished(tmp_path, 2, 2.0)
    results = grid(one, two)
    assert (len(results), results[1], list(results)) == (2, two, [one, two])
    assert "2 TERMINATED" in repr(results)


def test_best_result_uses_the_metric_of_the_search_by_default(tmp_path):
    results = grid(
        finished(tmp_path, 0, 3.0), finished(tmp_path, 1, 1.0), finished(tmp_path, 2, 2.0)
    )
    assert best(results) == 1
    assert best(results, mode="max") == 0
    assert best(results, metric="eval/f1", mode="min") == 0


def test_best_result_scopes_use_different_parts_of_the_history(tmp_path):
    steady = finished(tmp_path, 0, *[5.0] * 20)
    dipped = finished(tmp_path, 1, 0.0, *[9.0] * 19)
    late = finished(tmp_path, 2, *[100.0] * 15, *[4.5] * 5)
    ended = finished(tmp_path, 3, *[50.0] * 19, 4.0)
    results = grid(steady, dipped, late, ended)
    assert best(results, scope="last") == 3
    assert best(results, scope="avg") == 0
    assert best(results, scope="last-5-avg") == 2
    assert best(results, scope="last-10-avg") == 0
    assert best(results, scope="all") == 1


@pytest.mark.parametrize("scope", ["last", "avg", "last-5-avg", "all"])
def test_nan_is_never_the_best_result(tmp_path, scope):
    results = grid(finished(tmp_path, 0, math.nan), finished(tmp_path, 1, 7.0))
    for filtered in (True, False):
        assert best(results, scope=scope, filter_nan_and_inf=filtered) == 1
        assert best(results, scope=scope, mode="max", filter_nan_and_inf=filtered) == 1


def test_infinity_is_the_best_result_only_in_the_right_mode(tmp_path):
    results = grid(finished(tmp_path, 0, 1.0, -math.inf), finished(tmp_path, 1, 7.0))
    assert best(results) == 1
    assert best(results, filter_nan_and_inf=False) == 0
    assert best(results, scope="all") == 0


def test_last_result_without_the_metric_does_not_hide_an_earlier_one(tmp_path):
    one = finished(tmp_path, 0, 1.0)
    one.metrics = {"training_iteration": 2}
    assert best(grid(finished(tmp_path, 1, 2.0), one)) == 1


def test_best_result_without_a_metric_or_with_a_wrong_scope_names_the_fix(tmp_path):
    results = grid(finished(tmp_path, 0, 1.0), metric=None, mode=None)
    with pytest.raises(ConfigError, match="give both here or in TuneConfig"):
        results.get_best_result("loss")
    with pytest.raises(ConfigError, match="last-5-avg"):
        grid().get_best_result(scope="best")
    with pytest.raises(ConfigError, match="'min' or 'max', not 'up'"):
        grid().get_best_result(mode="up")


def test_unknown_metric_is_rejected_with_the_known_ones(tmp_path):
    with pytest.raises(MetricError, match=r"'accuracy'; there are: .*eval/f1.*loss"):
        grid(finished(tmp_path, 0, 1.0)).get_best_result("accuracy", "max")


def test_best_result_of_only_nan_values_is_explained(tmp_path):
    with pytest.raises(MetricError, match="all values of 'loss' are NaN or infinite"):
        grid(finished(tmp_path, 0, math.nan)).get_best_result()


def test_best_result_where_all_trials_failed_shows_their_error(tmp_path):
    failed = finished(tmp_path, 0, status="ERROR")
    failed.error = TrialError("trial train_0 failed on node-a: ValueError: too small")
    results = grid(failed)
    with pytest.raises(TrialError, match=r"the first of 1 failed trials: .*too small"):
        results.get_best_result()
    assert (results.num_errors, results.num_terminated) == (1, 0)
    assert results.errors == [failed.error]


@pytest.mark.parity(116)
def test_metric_analysis_covers_the_history_and_counts_iterations_from_one(tmp_path):
    result = finished(tmp_path, 0, 1.0, 4.0, math.nan)
    analysis = result.metric_analysis
    assert (analysis["loss"]["min"], analysis["loss"]["max"]) == (1.0, 4.0)
    assert math.isnan(analysis["loss"]["avg"])
    assert analysis["eval/f1"]["last"] is not None
    assert analysis["training_iteration"] == {"max": 3, "min": 1, "avg": 2.0, "last": 3}
    assert "trial_id" not in analysis


def test_result_tables_have_flat_columns(tmp_path):
    results = grid(finished(tmp_path, 0, 3.0, 1.0, 2.0), finished(tmp_path, 1, 5.0))
    history = results[0].metrics_dataframe
    assert list(history["loss"]) == [3.0, 1.0, 2.0]
    assert list(history["eval/f1"]) == [-3.0, -1.0, -2.0]
    table = results.get_dataframe()
    assert list(table["loss"]) == [2.0, 5.0]
    assert list(table["logdir"]) == [result.path for result in results]
    assert list(table["config/lr"]) == [0.0, 0.1]
    assert list(results.get_dataframe("loss", "min")["loss"]) == [1.0, 5.0]
    with pytest.raises(ConfigError, match="filter_metric"):
        results.get_dataframe(filter_mode="min")


def test_missing_pandas_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    result = finished(tmp_path, 0, 1.0)
    with pytest.raises(TuneError, match=r"pip install 'pandas>=2.2'"):
        _ = result.metrics_dataframe
    with pytest.raises(TuneError, match=r"get_dataframe needs pandas"):
        grid(result).get_dataframe()


def test_torn_line_at_the_end_of_a_history_is_ignored(tmp_path):
    result = finished(tmp_path, 0, 1.0)
    with Path(result.path, "result.json").open("a") as file:
        file.write('{"loss": 2')
    assert result.values("loss") == [1.0]


def test_trial_folder_alone_gives_its_result(tmp_path):
    result = Result.from_path(finished(tmp_path, 1, 3.0, 2.0).path)
    assert (result.metrics["loss"], result.config, result.trial_id) == (
        2.0,
        {"lr": 0.1},
        "ab12_00001",
    )
    with pytest.raises(ConfigError, match=r"is not a trial's folder: params\.json cannot be read"):
        Result.from_path(tmp_path)


@pytest.mark.parity(110)
def test_best_checkpoint_is_the_one_with_the_best_result(tmp_path):
    made = [Checkpoint.from_dict({"step": step}) for step in range(3)]
    scores = (2.0, 3.0, math.nan)
    kept = [(one, {"eval": {"acc": score}}) for one, score in zip(made, scores, strict=True)]
    result = Result(metrics={}, path=str(tmp_path), best_checkpoints=kept)
    assert result.get_best_checkpoint("eval/acc", "max") is made[1]
    assert result.get_best_checkpoint("eval/acc", "min") is made[0]
    with pytest.raises(MetricError, match=r"'loss'; there are: eval/acc"):
        result.get_best_checkpoint("loss", "min")
    assert Result(metrics={}, path="").get_best_checkpoint("loss", "min") is None


def test_best_checkpoints_that_are_made_when_asked_print_like_a_list():
    assert repr(MadeWhenAsked([1, 2], str)) == "['1', '2']"
