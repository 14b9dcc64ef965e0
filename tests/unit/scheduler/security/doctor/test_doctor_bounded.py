"""`tunemq doctor` waits only a limited time for a check that hangs."""

from __future__ import annotations

import threading

import pytest

from tunemq_scheduler.security.doctor.time_limit import within


def test_within_returns_and_raises_what_the_call_does():
    assert within(60.0, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(60.0, lambda: 1 / 0)


def test_within_a_call_without_an_end_raises_timeout_error():
    ended = threading.Event()
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        within(0.01, ended.wait)
    ended.set()
    for thread in threading.enumerate():
        if thread.name == "bounded check":
            thread.join()
