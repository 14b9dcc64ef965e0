"""Stoppers, and all values that RunConfig(stop=...) accepts."""

from __future__ import annotations

import datetime as dt
import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunemq_scheduler.stopping import stopper as module
from tunemq_scheduler.stopping.plateau import (
    ExperimentPlateauStopper,
    TrialPlateauStopper,
    deviation,
)
from tunemq_scheduler.stopping.stopper import (
    CombinedStopper,
    FunctionStopper,
    MaximumIterationStopper,
    NoopStopper,
    Stopper,
    TimeoutStopper,
    make_stopping,
)
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.result_conditions import Condition


class Every(Stopper):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        self.seen.append(trial_id)
        return False

    def stop_all(self) -> bool:
        return False


def test_stop_setting_of_none_stops_no_trial() -> None:
    assert make_stopping(None) == make_stopping({}) == make_stopping([]) == ((), None)


@pytest.mark.parity(98, 100)
def test_stop_dict_becomes_conditions_that_the_trial_process_checks() -> None:
    conditions, stopper = make_stopping({"training_iteration": 10, "info/acc": 0.9})
    assert conditions == (Condition("training_iteration", 10), Condition("info/acc", 0.9))
    assert stopper is None
    assert conditions[1].holds({"info": {"acc": 0.95}})


def test_numpy_numbers_and_true_are_valid_stop_bounds() -> None:
    conditions, _ = make_stopping({"loss": np.float32(2), "converged": True})
    assert conditions == (Condition("loss", 2.0), Condition("converged", 1.0))


def test_stop_function_is_asked_about_every_result() -> None:
    conditions, stopper = make_stopping(lambda trial_id, result: result["x"] > 3)
    assert conditions == ()
    assert isinstance(stopper, FunctionStopper)
    assert stopper("t", {"x": 4}) is True
    assert stopper("t", {"x": 3}) is False
    assert stopper.horizon("t") is None


def test_stop_list_may_mix_criteria_functions_and_stoppers() -> None:
    one, two = Every(), Every()
    conditions, stopper = make_stopping([{"x": 1}, one, lambda t, r: True, two])
    assert conditions == (Condition("x", 1),)
    assert isinstance(stopper, CombinedStopper)
    assert stopper("t", {}) is True
    assert (one.seen, two.seen) == (["t"], ["t"])  # both see a result at which one stops


def test_maximum_of_iterations_is_checked_by_the_trial_process() -> None:
    assert make_stopping(MaximumIterationStopper(5)) == (
        (Condition("training_iteration", 5),),
        None,
    )
    stopper = MaximumIterationStopper(5)
    assert [stopper("t", {"training_iteration": i}) for i in (4, 5)] == [False, True]


def test_subclass_of_a_known_stopper_is_asked_about_every_result() -> None:
    class Mine(MaximumIterationStopper):
        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
            return True

    conditions, stopper = make_stopping(Mine(5))
    assert conditions == ()
    assert isinstance(stopper, Mine)
    assert stopper.horizon("t") is None


def test_combined_stopper_is_asked_as_soon_as_one_member_must_be() -> None:
    five, never = MaximumIterationStopper(5), NoopStopper()
    assert CombinedStopper(five, never).horizon("t") == (Condition("training_iteration", 5),)
    assert CombinedStopper(never, never).horizon("t") == ()
    assert CombinedStopper(five, Every()).horizon("t") is None


def test_combined_stopper_ends_the_experiment_when_one_member_does() -> None:
    assert not CombinedStopper(NoopStopper(), NoopStopper()).stop_all()

    class Enough(NoopStopper):
        def stop_all(self) -> bool:
            return True

    assert CombinedStopper(NoopStopper(), Enough()).stop_all()


@pytest.mark.parametrize("timeout", [10, dt.timedelta(seconds=10)])
def test_timeout_stopper_counts_from_the_first_call(
    timeout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    # The module's clock, not the process's, which other threads read, too.
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    stopper = TimeoutStopper(timeout)
    now[0] = 200.0
    assert not stopper.stop_all()
    now[0] = 209.9
    assert not stopper.stop_all()
    now[0] = 210.0
    assert stopper.stop_all()
    assert not stopper("t", {})
    assert stopper.horizon("t") == ()


def test_plateau_stopper_stops_a_trial_whose_metric_has_not_moved() -> None:
    stopper = TrialPlateauStopper("loss", std=0.01, num_results=3, grace_period=5)
    flat = [stopper("a", {"loss": 1.0}) for _ in range(5)]
    assert flat == [False] * 4 + [True]
    assert not any(stopper("b", {"loss": float(i)}) for i in range(20))
    assert not stopper.stop_all()


def test_plateau_counts_only_when_it_is_good_enough() -> None:
    stopper = TrialPlateauStopper("loss", num_results=2, metric_threshold=0.0, mode="min")
    assert not any(stopper("a", {"loss": 1.0}) for _ in range(10))
    assert [stopper("b", {"loss": -1.0}) for _ in range(4)] == [False, False, False, True]


def test_nan_and_missing_metrics_are_no_plateau() -> None:
    stopper = TrialPlateauStopper("loss")
    assert not any(stopper("a", {"loss": math.nan}) for _ in range(10))
    assert not any(stopper("b", {}) for _ in range(10))


@pytest.mark.parametrize("mode", ["min", "max"])
def test_experiment_plateau_stops_when_the_best_values_are_the_same(mode: str) -> None:
    stopper = ExperimentPlateauStopper("loss", std=0.01, top=3, mode=mode, patience=2)
    sign = 1 if mode == "min" else -1
    for value in (9, 5, math.nan, 1, 1):
        assert not stopper("t", {"loss": sign * value})
    assert not stopper("t", {"loss": sign * 1.0})  # three equal values: the plateau begins
    assert stopper("t", {"loss": sign * 7.0})
    assert stopper.stop_all()


def test_trial_plateau_forgets_what_a_trial_reported_before_it_restarted() -> None:
    stopper = TrialPlateauStopper("loss", num_results=2, grace_period=3)
    assert not any(stopper(trial, {"loss": 1.0}) for trial in "aabb")
    CombinedStopper(NoopStopper(), stopper).on_trial_restart("a")
    stopper.on_trial_restart("c")  # it reported nothing
    assert stopper("b", {"loss": 1.0})
    assert [stopper("a", {"loss": 1.0}) for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_experiment_plateau_forgets_what_a_trial_reported_before_it_restarted(mode: str) -> None:
    stopper = ExperimentPlateauStopper("loss", std=0.01, top=3, mode=mode)
    assert [stopper(trial, {"loss": 0.0}) for trial in "aab"] == [False, False, True]
    again = ExperimentPlateauStopper("loss", std=0.01, top=3, mode=mode)
    again.set_state(json.loads(json.dumps(stopper.get_state())))
    for one in (stopper, again):
        one.on_trial_restart("c")
        assert one.stop_all(), "it reported nothing"
        one.on_trial_restart("a")
        assert not one.stop_all()
        assert [one(trial, {"loss": 0.0}) for trial in "ab"] == [False, True]
    assert stopper.get_state() == again.get_state()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_deviation_equals_numpys(values: list[float]) -> None:
    assert deviation(values) == pytest.approx(float(np.std(values)), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("value", [1e200, 1.7e308, float("inf"), float("nan")])
def test_values_without_a_finite_deviation_are_no_plateau(value: float) -> None:
    assert math.isnan(deviation([1.0, value, value]))


@pytest.mark.parity(100)
@pytest.mark.parametrize(
    ("stop", "words"),
    [
        ({"info": {"acc": 0.9}}, r"\{'info/acc': \.\.\.\}"),
        ({"acc": "0.9"}, r"stop\['acc'\] is '0.9'"),
        ({"acc": None}, "must be a number"),
        ({"acc": math.nan}, "nan"),
        ({"acc": False}, "False"),
        ({3: 1}, "key 3"),
        (5, "stop is 5"),
        ("training_iteration", "stop is 'training_iteration'"),
        (lambda result: True, r"called with \(trial_id, result\)"),
        (NoopStopper, r"make one: NoopStopper"),
        ([{"a": 1}, 7], "stop is 7"),
    ],
)
def test_invalid_stop_setting_is_rejected_with_its_name(stop: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_stopping(stop)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MaximumIterationStopper(0), r"max_iter=0\) is invalid"),
        (lambda: TimeoutStopper(0), r"timeout\) is 0"),
        (lambda: TimeoutStopper("1m"), "'1m'"),
        (lambda: FunctionStopper(lambda: True), "called with"),
        (lambda: FunctionStopper(3), "stop is 3"),
        (lambda: CombinedStopper({"a": 1}), "a Stopper is needed"),
        (lambda: TrialPlateauStopper("l", std=-1), "std"),
        (lambda: TrialPlateauStopper("l", metric_threshold=0), "mode=None"),
        (lambda: ExperimentPlateauStopper("l", top=1), "top"),
        (lambda: ExperimentPlateauStopper("l", mode="best"), "mode='best'"),
    ],
)
def test_invalid_stopper_option_is_rejected_with_its_name(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()
