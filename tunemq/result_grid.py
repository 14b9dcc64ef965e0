"""Ray Tune's ``tune.result_grid``."""

from __future__ import annotations

from tunemq_scheduler.result_grid import ResultGrid

__all__ = ["ResultGrid"]
