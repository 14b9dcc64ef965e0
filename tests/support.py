"""What tests of several tiers use: waiting with a deadline, and services that may be missing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest


def eventually(
    condition: Callable[[], object],
    *,
    within: float = 20.0,
    every: float = 0.005,
    message: str | Callable[[], str] = "the condition did not come true",
) -> None:
    """Return as soon as ``condition()`` is true; fail the test after ``within`` seconds.

    They are many, for a machine that does three other things; nobody waits longer than he must.
    ``every`` is for looks that cost a process each.
    """
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            text = message if isinstance(message, str) else message()
            pytest.fail(f"{text} (within {within:g} s)")
        time.sleep(every)  # between two looks


def need(service: str, present: object) -> None:
    """Skip the test where a service is missing; fail it in CI, where it must be there."""
    if present:
        return
    if os.environ.get("CI"):
        pytest.fail(f"{service} is missing, and CI runs every test")
    pytest.skip(f"{service} is missing")
