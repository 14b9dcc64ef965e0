"""Simulated searches, and a simulated farm with faults and a journal auditor.

`simulate` runs a search in virtual time over learning curves, in milliseconds. The other modules
simulate nodes, trial processes, a store and their faults at a scale that exceeds one machine, to
test TuneMQ itself. In both the core and the loop are the real ones.
"""

from __future__ import annotations

from tunemq.testing.check_scheduler import check_trial_scheduler
from tunemq.testing.curves.curve_table import CurveTable, recorded_curves
from tunemq.testing.curves.simulate import simulate
from tunemq.testing.curves.simulation import (
    BestPoint,
    SimulatedDecision,
    SimulatedResult,
    SimulatedTrial,
    Simulation,
)
from tunemq.testing.curves.synthetic_curves import SyntheticCurves

__all__ = [
    "BestPoint",
    "CurveTable",
    "SimulatedDecision",
    "SimulatedResult",
    "SimulatedTrial",
    "Simulation",
    "SyntheticCurves",
    "check_trial_scheduler",
    "recorded_curves",
    "simulate",
]
