"""Ray Tune's ``tune.search.basic_variant``: grid and random search."""

from __future__ import annotations

from tunemq_scheduler.search.basic_variant import BasicVariantGenerator

__all__ = ["BasicVariantGenerator"]
