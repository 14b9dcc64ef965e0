"""Ray Tune's ``tune.experiment``: trials as searchers, loggers and callbacks see them."""

from __future__ import annotations

from tunemq_scheduler.results.trial_view import TrialView as Trial

__all__ = ["Trial"]
