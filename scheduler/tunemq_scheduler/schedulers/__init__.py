"""Trial schedulers: they decide which trial runs next and which trials stop early."""

from __future__ import annotations

from tunemq_scheduler.schedulers.create_scheduler import create_scheduler, make_scheduler
from tunemq_scheduler.schedulers.decisions import (
    Action,
    Exploit,
    Pause,
    Resume,
    SchedulerDecision,
    SetConfig,
    SetResources,
    Stop,
    read_answer,
)
from tunemq_scheduler.schedulers.fifo import FIFOScheduler
from tunemq_scheduler.schedulers.halving.asha import ASHAScheduler, AsyncHyperBandScheduler
from tunemq_scheduler.schedulers.halving.hyperband import HyperBandForBOHB, HyperBandScheduler
from tunemq_scheduler.schedulers.halving.multi_objective_asha import MultiObjectiveASHA
from tunemq_scheduler.schedulers.halving.non_dominated import MOPriority, NonDominatedPriority
from tunemq_scheduler.schedulers.halving.pasha import PASHA
from tunemq_scheduler.schedulers.median_stopping import MedianStoppingRule
from tunemq_scheduler.schedulers.population.pb2 import PB2
from tunemq_scheduler.schedulers.population.pbt import PopulationBasedTraining
from tunemq_scheduler.schedulers.population.pbt_replay import PopulationBasedTrainingReplay
from tunemq_scheduler.schedulers.resource_allocation import (
    DistributeResources,
    DistributeResourcesToTopJob,
)
from tunemq_scheduler.schedulers.resource_changing import ResourceChangingScheduler
from tunemq_scheduler.schedulers.trial_scheduler import TrialScheduler

__all__ = [
    "PASHA",
    "PB2",
    "ASHAScheduler",
    "Action",
    "AsyncHyperBandScheduler",
    "DistributeResources",
    "DistributeResourcesToTopJob",
    "Exploit",
    "FIFOScheduler",
    "HyperBandForBOHB",
    "HyperBandScheduler",
    "MOPriority",
    "MedianStoppingRule",
    "MultiObjectiveASHA",
    "NonDominatedPriority",
    "Pause",
    "PopulationBasedTraining",
    "PopulationBasedTrainingReplay",
    "ResourceChangingScheduler",
    "Resume",
    "SchedulerDecision",
    "SetConfig",
    "SetResources",
    "Stop",
    "TrialScheduler",
    "create_scheduler",
    "make_scheduler",
    "read_answer",
]
