"""Ray Tune's ``tune.result_grid``."""

from __future__ import annotations

from tunemq_scheduler.results.result_grid import ResultGrid

__all__ = ["ResultGrid"]
