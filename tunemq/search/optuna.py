"""Ray Tune's ``tune.search.optuna``; needs the extra ``optuna``."""

from __future__ import annotations

from tunemq_scheduler.search.optuna.optuna_search import OptunaSearch

__all__ = ["OptunaSearch"]
