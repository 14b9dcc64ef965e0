"""Ray Tune's ``tune.stopper``: when a trial or the whole search stops."""

from __future__ import annotations

from tunemq_scheduler.stopping.budget import (
    CostStopper,
    GPUHoursStopper,
    MaximumTrialsStopper,
    TargetStopper,
)
from tunemq_scheduler.stopping.plateau import ExperimentPlateauStopper, TrialPlateauStopper
from tunemq_scheduler.stopping.stopper import (
    CombinedStopper,
    FunctionStopper,
    MaximumIterationStopper,
    NoopStopper,
    Stopper,
    TimeoutStopper,
)

__all__ = [
    "CombinedStopper",
    "CostStopper",
    "ExperimentPlateauStopper",
    "FunctionStopper",
    "GPUHoursStopper",
    "MaximumIterationStopper",
    "MaximumTrialsStopper",
    "NoopStopper",
    "Stopper",
    "TargetStopper",
    "TimeoutStopper",
    "TrialPlateauStopper",
]
