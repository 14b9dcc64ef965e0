"""Ray Tune's ``tune.search``: where configurations come from."""

from __future__ import annotations

from tunemq_scheduler.search import (
    BasicVariantGenerator,
    ConcurrencyLimiter,
    Searcher,
    create_searcher,
)

#: Ray Tune's base class of searchers and of grid search; here `Searcher` is both.
SearchAlgorithm = Searcher

__all__ = [
    "BasicVariantGenerator",
    "ConcurrencyLimiter",
    "SearchAlgorithm",
    "Searcher",
    "create_searcher",
]
