"""Ray Tune's ``tune.search``: algorithms that suggest configurations."""

from __future__ import annotations

from tunemq_scheduler.search import (
    BasicVariantGenerator,
    ConcurrencyLimiter,
    Searcher,
    create_searcher,
)

#: Ray Tune's common base class of searchers and grid search; here it is `Searcher`.
SearchAlgorithm = Searcher

__all__ = [
    "BasicVariantGenerator",
    "ConcurrencyLimiter",
    "SearchAlgorithm",
    "Searcher",
    "create_searcher",
]
