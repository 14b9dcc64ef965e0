"""Ray Tune's ``tune.search.bohb``; needs the extra ``optuna``."""

from __future__ import annotations

from tunemq_scheduler.search.optuna.tune_bohb import TuneBOHB

__all__ = ["TuneBOHB"]
