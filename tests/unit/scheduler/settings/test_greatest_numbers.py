"""Settings that no journal or message could hold are rejected by name."""

from __future__ import annotations

from typing import Any

import pytest

import tunemq as tune
from tunemq_shared.base.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (tune.TuneConfig, "num_samples"),
        (tune.TuneConfig, "max_concurrent_trials"),
        (tune.FailureConfig, "max_failures"),
        (tune.FailureConfig, "max_node_losses"),
        (tune.FailureConfig, "max_storage_failures"),
        (tune.CheckpointConfig, "num_to_keep"),
        (tune.CheckpointConfig, "num_to_keep_in_experiment"),
        (tune.CheckpointConfig, "checkpoint_frequency"),
        (tune.CheckpointConfig, "max_bytes"),
        (tune.TrialLimits, "processes"),
        (tune.TrialLimits, "memory"),
    ],
)
@pytest.mark.parametrize("number", [2**63, pytest.param(10**5000, id="long")])
def test_number_of_more_than_63_bits_names_field_and_bound(
    config: Any, name: str, number: int
) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.* is invalid: the greatest number is 9223372"):
        config(**{name: number})
    config(**{name: 2**63 - 1})


def test_time_limit_that_no_float_holds_is_rejected() -> None:
    with pytest.raises(ConfigError, match="step_s"):
        tune.TrialLimits(step_s=10**400)


def test_seed_may_have_any_number_of_bits() -> None:
    assert tune.TuneConfig(seed=2**100).seed == 2**100
