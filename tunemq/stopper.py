"""Ray Tune's ``tune.stopper``: when a trial or the whole search stops."""

from __future__ import annotations

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
    "FunctionStopper",
    "MaximumIterationStopper",
    "NoopStopper",
    "Stopper",
    "TimeoutStopper",
]
