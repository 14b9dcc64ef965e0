"""Ray Tune's ``tune.result_grid``: the results of a search."""

from __future__ import annotations

from tunemq_scheduler.core.trial_decisions import TrialDecision
from tunemq_scheduler.results.result_grid import ResultGrid

__all__ = ["ResultGrid", "TrialDecision"]
