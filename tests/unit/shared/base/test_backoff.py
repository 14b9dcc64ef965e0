"""Pauses between retries grow up to a limit."""

from __future__ import annotations

from tunemq_shared.base.backoff import backoff_s


def test_pauses_double_up_to_a_limit_however_often_a_retry_fails():
    assert [backoff_s(doublings, 0.5, 5.0) for doublings in range(5)] == [0.5, 1.0, 2.0, 4.0, 5.0]
    assert backoff_s(10**6, 0.001, 600.0) == 600.0
