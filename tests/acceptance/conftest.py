"""At the end of every test here the journals of its searches are checked."""

from __future__ import annotations

from tests.support.searches.journals import ended_searches

__all__ = ["ended_searches"]
