"""The saved states of a search's algorithms go to the same kinds of algorithms only."""

from __future__ import annotations

from typing import Any

import pytest

from tunemq_scheduler.experiment.algorithm_driver import AlgorithmDriver
from tunemq_scheduler.schedulers import ASHAScheduler, FIFOScheduler
from tunemq_scheduler.search import BasicVariantGenerator
from tunemq_scheduler.search.search_generator import SearchGenerator
from tunemq_scheduler.stopping.budget import CostStopper, MaximumTrialsStopper
from tunemq_scheduler.stopping.stopper import CombinedStopper
from tunemq_shared.base.errors import ConfigError


def driver(**algorithms: Any) -> AlgorithmDriver:
    search = SearchGenerator(BasicVariantGenerator(), {}, 1)
    return AlgorithmDriver(**{"search": search, "scheduler": FIFOScheduler(), **algorithms})


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        ({"stopper": CostStopper(9, "cost")}, {}, "stopper of this experiment was CostStopper"),
        ({}, {"stopper": CostStopper(9, "cost")}, "was none, and it is resumed with CostStopper;"),
        (
            {"stopper": CostStopper(9, "cost")},
            {"stopper": MaximumTrialsStopper(9)},
            "was CostStopper, and it is resumed with MaximumTrialsStopper; resume it with",
        ),
        (
            {"stopper": CombinedStopper(CostStopper(9, "cost"), MaximumTrialsStopper(9))},
            {"stopper": CombinedStopper(CostStopper(9, "cost"), CostStopper(9, "cost"))},
            r"was CombinedStopper\(CostStopper, MaximumTrialsStopper\), and",
        ),
        ({}, {"scheduler": ASHAScheduler(max_t=9)}, "trial scheduler .* was FIFOScheduler, and"),
    ],
)
def test_state_of_another_algorithm_is_refused_with_both_names(
    before: dict[str, Any], now: dict[str, Any], named: str
) -> None:
    states = driver(**before).get_state()
    assert states is not None
    driver(**before).set_state(states)
    with pytest.raises(ConfigError, match=named):
        driver(**now).set_state(states)
