"""Ray Tune's ``tune.callback``: the base class of callbacks."""

from __future__ import annotations

from tunemq_scheduler.results.callback import Callback

__all__ = ["Callback"]
