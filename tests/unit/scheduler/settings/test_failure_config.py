"""`FailureConfig`: rejected values, and the two ways to pass it to ``tune.run``."""

from __future__ import annotations

import pytest

from tunemq_scheduler.api.run import _failure_config
from tunemq_scheduler.settings.config import FailureConfig
from tunemq_shared.base.errors import ConfigError


@pytest.mark.parametrize("name", ["max_failures", "max_storage_failures", "max_node_losses"])
@pytest.mark.parametrize("given", [-2, 1.5, True, "3", None])
def test_failure_budget_is_an_integer_from_minus_one(name, given):
    with pytest.raises(ConfigError, match=rf"FailureConfig\({name}={given!r}\) is invalid"):
        FailureConfig(**{name: given})
    assert getattr(FailureConfig(**{name: -1}), name) == -1


def test_failure_config_flag_is_true_or_false():
    with pytest.raises(ConfigError, match=r"FailureConfig\(retry_cuda_memory=1\) is invalid"):
        FailureConfig(retry_cuda_memory=1)  # type: ignore[arg-type]


def test_fail_fast_leaves_budgets_for_checkpoint_and_node_failures():
    config = FailureConfig()
    assert (config.max_failures, config.max_storage_failures, config.max_node_losses) == (0, 3, 2)
    assert not config.retry_cuda_memory
    # fail_fast ends the search at a trial's first error; other failures keep their budgets.
    assert FailureConfig(fail_fast=True, max_storage_failures=5).max_storage_failures == 5


def test_tune_run_takes_a_failure_config_or_its_two_oldest_fields_but_not_both():
    given = FailureConfig(max_node_losses=7)
    assert _failure_config(given, max_failures=0, fail_fast=False) is given
    assert _failure_config(None, max_failures=2, fail_fast=False) == FailureConfig(max_failures=2)
    with pytest.raises(ConfigError, match="failure_config and max_failures=2"):
        _failure_config(given, max_failures=2, fail_fast=False)
