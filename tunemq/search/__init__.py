"""Ray Tune's ``tune.search``: where configurations come from."""

from __future__ import annotations

from tunemq_scheduler.search import (
    BasicVariantGenerator,
    ConcurrencyLimiter,
    SearchAlgorithm,
    Searcher,
    create_searcher,
)

__all__ = [
    "BasicVariantGenerator",
    "ConcurrencyLimiter",
    "SearchAlgorithm",
    "Searcher",
    "create_searcher",
]
