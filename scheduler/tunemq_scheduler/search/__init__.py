"""Search spaces, and the algorithms that choose configurations from them.

`OptunaSearch` and `TuneBOHB` are loaded on first use, so that importing this package imports no
module that uses Optuna.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunemq_scheduler.search.basic_variant import BasicVariantGenerator
from tunemq_scheduler.search.concurrency import ConcurrencyLimiter
from tunemq_scheduler.search.create_searcher import create_searcher, make_searcher
from tunemq_scheduler.search.domains import (
    choice,
    grid_search,
    lograndint,
    loguniform,
    qlograndint,
    qloguniform,
    qrandint,
    qrandn,
    quniform,
    randint,
    randn,
    sample_from,
    uniform,
)
from tunemq_scheduler.search.search_generator import SearchGenerator, Suggestion
from tunemq_scheduler.search.searcher import Searcher

if TYPE_CHECKING:
    from tunemq_scheduler.search.optuna.optuna_search import OptunaSearch
    from tunemq_scheduler.search.optuna.tune_bohb import TuneBOHB

__all__ = [
    "BasicVariantGenerator",
    "ConcurrencyLimiter",
    "OptunaSearch",
    "SearchGenerator",
    "Searcher",
    "Suggestion",
    "TuneBOHB",
    "choice",
    "create_searcher",
    "grid_search",
    "lograndint",
    "loguniform",
    "make_searcher",
    "qlograndint",
    "qloguniform",
    "qrandint",
    "qrandn",
    "quniform",
    "randint",
    "randn",
    "sample_from",
    "uniform",
]


def __getattr__(name: str) -> Any:
    if name == "OptunaSearch":
        from tunemq_scheduler.search.optuna.optuna_search import OptunaSearch

        return OptunaSearch
    if name == "TuneBOHB":
        from tunemq_scheduler.search.optuna.tune_bohb import TuneBOHB

        return TuneBOHB
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
