"""Ray Tune's ``tune.error``: exceptions."""

from __future__ import annotations

from tunemq_shared.base.errors import TuneError

__all__ = ["TuneError"]
