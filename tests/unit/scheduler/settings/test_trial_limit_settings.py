"""`TrialLimitSpec` as users write it."""

from __future__ import annotations

import datetime as dt
import math

import pytest

import tunemq as tune
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol import trial_limits


def test_trial_limits_are_off_by_default():
    assert tune.RunConfig().trial_limits.for_trials() == trial_limits.TrialLimitSpec()
    assert tune.RunConfig(trial_limits=None).trial_limits == tune.TrialLimits()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"step_s": 2}, {"step_s": 2.0}),
        ({"trial_s": dt.timedelta(minutes=1)}, {"trial_s": 60.0}),
        ({"stall_s": 0.5}, {"stall_s": 0.5}),
        ({"memory": 1000}, {"memory": 1000}),
        ({"memory": "2GiB"}, {"memory": 2 * 2**30}),
        ({"processes": 100, "open_files": 4096}, {"processes": 100, "open_files": 4096}),
        ({"core_bytes": "1GiB"}, {"core_bytes": 2**30}),
    ],
)
def test_trial_limits_reach_the_nodes_as_seconds_and_bytes(given, told):
    assert tune.TrialLimits(**given).for_trials() == trial_limits.TrialLimitSpec(**told)


@pytest.mark.parametrize("field", ["step_s", "trial_s", "stall_s"])
@pytest.mark.parametrize(
    "value", [0, -1, math.nan, math.inf, "10", True, dt.timedelta(0), [], dt.timedelta(-1)]
)
def test_invalid_time_limit_is_rejected_with_its_name(field, value):
    with pytest.raises(ConfigError) as caught:
        tune.TrialLimits(**{field: value})
    assert f"TrialLimits({field}={value!r}) is invalid: give seconds" in str(caught.value)


@pytest.mark.parametrize("field", ["memory", "core_bytes"])
@pytest.mark.parametrize("value", [0, -5, "much", "", 1.5, True, "0GiB"])
def test_invalid_size_limit_is_rejected_with_its_name(field, value):
    with pytest.raises(ConfigError, match="is invalid: give bytes above 0 or a text") as caught:
        tune.TrialLimits(**{field: value})
    assert f"TrialLimits({field}={value!r})" in str(caught.value)


@pytest.mark.parametrize(("field", "least"), [("processes", 1), ("open_files", 64)])
@pytest.mark.parametrize("value", [0, -5, "100", 1.5, True])
def test_invalid_number_is_rejected_with_its_name_and_the_least_value(field, least, value):
    with pytest.raises(ConfigError) as caught:
        tune.TrialLimits(**{field: value})
    said = f"TrialLimits({field}={value!r}) is invalid: give a number from {least} on, or None"
    assert said in str(caught.value)


def test_trial_limits_of_another_type_are_rejected():
    with pytest.raises(ConfigError, match="give a TrialLimits"):
        tune.RunConfig(trial_limits={"step_s": 1})
