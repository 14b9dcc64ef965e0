"""Trial schedulers: they decide which trial runs next and which trials stop early."""

from __future__ import annotations

from tunemq_scheduler.schedulers.asha import ASHAScheduler, AsyncHyperBandScheduler
from tunemq_scheduler.schedulers.create_scheduler import create_scheduler, make_scheduler
from tunemq_scheduler.schedulers.fifo import FIFOScheduler
from tunemq_scheduler.schedulers.trial_scheduler import (
    SchedulerDecision,
    TrialScheduler,
    read_verdict,
)

__all__ = [
    "ASHAScheduler",
    "AsyncHyperBandScheduler",
    "FIFOScheduler",
    "SchedulerDecision",
    "TrialScheduler",
    "create_scheduler",
    "make_scheduler",
    "read_verdict",
]
