"""The complete result, and the automatic keys in it."""

from __future__ import annotations

import logging

import pytest

from tunemq_shared.base.errors import MetricError
from tunemq_shared.protocol.messages import ResultReported, TrialStarted
from tunemq_shared.trial.progress import TrialProgress
from tunemq_shared.trial.results import ResultTemplate, full_result, measured

STARTED = TrialStarted("t1", 1, 4321, "box", "10.0.0.7", 0.0)


def event(metrics: dict, **changes) -> ResultReported:
    fields = {
        "trial": "t1",
        "attempt": 1,
        "step": 3,
        "metrics": metrics,
        "timestamp": 1000.75,
        "time_this_iter_s": 0.5,
        "time_total_s": 1.5,
        "time_since_restore": 1.0,
        "iterations_since_restore": 2,
    }
    return ResultReported(**(fields | changes))


@pytest.mark.parity(89, 115, 170, 183)
def test_complete_result_has_every_automatic_key():
    frame = ResultTemplate(STARTED, {"lr": 0.1}, experiment_id="e1", experiment_tag="0_lr=0.1")

    result = full_result(event({"mean_loss": 2.0}), frame)

    date = result.pop("date")
    assert len(date) == len("2026-01-31_12-00-00")
    assert result == {
        "mean_loss": 2.0,
        "neg_mean_loss": -2.0,
        "done": False,
        "training_iteration": 3,
        "time_this_iter_s": 0.5,
        "time_total_s": 1.5,
        "time_since_restore": 1.0,
        "iterations_since_restore": 2,
        "timesteps_total": None,
        "timesteps_since_restore": 0,
        "episodes_total": None,
        "timestamp": 1000,
        "trial_id": "t1",
        "experiment_id": "e1",
        "experiment_tag": "0_lr=0.1",
        "pid": 4321,
        "hostname": "box",
        "node_ip": "10.0.0.7",
        "config": {"lr": 0.1},
        "lineage": 0,
    }


def test_automatic_keys_override_metrics_of_the_same_name():
    frame = ResultTemplate(STARTED, {})

    result = full_result(event({"pid": "mine", "training_iteration": 77, "x": 1}), frame)

    assert (result["pid"], result["training_iteration"], result["x"]) == (4321, 3, 1)


def test_date_follows_the_second():
    frame = ResultTemplate(STARTED, {})
    dates = [
        full_result(event({}, timestamp=second), frame)["date"]
        for second in (1000.1, 1000.9, 1001.0)
    ]

    assert dates[0] == dates[1] < dates[2]


def test_reported_neg_mean_loss_is_kept():
    assert measured(event({"mean_loss": 2.0, "neg_mean_loss": 5}))["neg_mean_loss"] == 5
    assert "neg_mean_loss" not in measured(event({"mean_loss": None}))
    assert measured(event({"mean_loss": 2.0, "neg_mean_loss": None}))["neg_mean_loss"] == -2


def test_timesteps_and_episodes_add_up():
    progress = TrialProgress()
    progress.advance("t1", 1, {"timesteps_this_iter": 100, "episodes_this_iter": 2}, 0.1)

    second = progress.advance("t1", 1, {"timesteps_this_iter": 50.0, "episodes_this_iter": 1}, 0.1)

    assert (second.timesteps_total, second.episodes_total) == (150, 3)
    assert second.timesteps_since_restore == 150


def test_reported_totals_are_kept():
    progress = TrialProgress()

    said = progress.advance("t1", 1, {"timesteps_total": 1000, "episodes_total": 10}, 0.1)

    assert (said.timesteps_total, said.episodes_total) == (1000, 10)
    assert progress.state()["timesteps_total"] == 1000


@pytest.mark.parity(14)
def test_reported_iteration_time_counts():
    said = TrialProgress().advance("t1", 1, {"time_this_iter_s": 9}, 0.1)

    assert (said.time_this_iter_s, said.time_total_s, said.time_since_restore) == (9.0, 9.0, 9.0)


def test_done_is_taken_from_the_metrics():
    assert TrialProgress().advance("t1", 1, {"done": True}, 0.1).done is True
    assert TrialProgress().advance("t1", 1, {"done": False}, 0.1).done is False


@pytest.mark.parametrize(
    "metrics",
    [
        {"time_this_iter_s": -1},
        {"time_this_iter_s": float("nan")},
        {"timesteps_this_iter": 0.5},
        {"episodes_total": "3"},
        {"timesteps_total": float("inf")},
        {"done": "yes"},
    ],
)
def test_invalid_automatic_key_is_rejected_and_not_counted(metrics):
    progress = TrialProgress()

    with pytest.raises(MetricError, match=r"at step 1, but this key is automatic"):
        progress.advance("t1", 1, {"timesteps_this_iter": 5} | metrics, 0.1)

    assert progress.state() == TrialProgress().state()


def test_another_training_iteration_causes_one_warning(caplog):
    progress = TrialProgress()
    with caplog.at_level(logging.WARNING):
        steps = [
            progress.advance("t1", 1, {"training_iteration": n}, 0.1).step for n in (1, 70, 80)
        ]

    assert steps == [1, 2, 3]
    (record,) = caplog.records
    assert "training_iteration was reported as 70" in record.getMessage()


@pytest.mark.parity(171)
def test_restore_keeps_totals_and_counts_the_rest_from_zero():
    before = TrialProgress()
    before.advance("t1", 1, {"timesteps_this_iter": 10}, 2.0)
    after = TrialProgress()
    after.restore(before.state())

    said = after.advance("t1", 2, {"timesteps_this_iter": 10}, 1.0)

    assert (said.step, said.time_total_s, said.timesteps_total) == (2, 3.0, 20)
    assert said.iterations_since_restore == 1
    assert (said.time_since_restore, said.timesteps_since_restore) == (1.0, 10)
