"""Retries: their duration, their number, and the errors that end them."""

from __future__ import annotations

import threading
import time

import pytest

from tests.support.refused_threads import threads_refused
from tunemq_shared.base import retrying
from tunemq_shared.base.errors import StoreError
from tunemq_shared.base.retrying import (
    CancelToken,
    StoreUnavailable,
    TransferCancelled,
    TransferTimedOut,
    in_parallel,
    retried,
)


class Pauses(CancelToken):
    """Records the pauses instead of sleeping."""

    def __init__(self, timeout_s: float = 1000.0) -> None:
        super().__init__(timeout_s)
        self.seconds: list[float] = []

    def pause(self, seconds: float) -> None:
        self.seconds.append(seconds)


def failing(times: int, error: Exception):
    left = iter([error] * times)

    def call() -> str:
        for problem in left:
            raise problem
        return "done"

    return call


@pytest.mark.parity(155)
def test_pauses_grow_up_to_a_limit_and_differ():
    told, cancel = [], Pauses()
    assert retried(failing(12, StoreUnavailable("away")), cancel, told.append) == "done"
    assert told == [*["away"] * 12, ""]  # and then the call succeeded
    for number, seconds in enumerate(cancel.seconds):
        longest = min(retrying.LONGEST_PAUSE_S, retrying.FIRST_PAUSE_S * 2**number)
        assert longest / 2 <= seconds <= longest
    assert len(set(cancel.seconds)) == 12


def test_permanent_error_is_not_retried():
    cancel = Pauses()
    with pytest.raises(StoreError, match="forbidden"):
        retried(failing(1, StoreError("forbidden")), cancel)
    assert cancel.seconds == []


def ends(cancel: CancelToken) -> None:
    """Let its time run out."""
    cancel._deadline = 0.0


def test_timeout_reports_the_last_error():
    cancel = CancelToken(60)
    with pytest.raises(TransferTimedOut, match=r"away\. Gave up after 60 s"):
        retried(failing(99, StoreUnavailable("away.")), cancel, lambda _trouble: ends(cancel))


def test_error_is_reported_if_the_timeout_comes_during_another_attempt(monkeypatch):
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.001)
    cancel, tries = CancelToken(60), 0

    def send() -> None:
        nonlocal tries
        tries += 1
        if tries > 1:
            ends(cancel)
            cancel.check()  # as request bodies do during the upload
        raise StoreUnavailable("The disk is full.")

    with pytest.raises(TransferTimedOut, match=r"The disk is full\. Gave up after 60 s") as caught:
        retried(send, cancel)
    assert isinstance(caught.value.__cause__, StoreUnavailable)


def test_attempt_that_reports_its_timeout_is_the_reported_error():
    def send() -> None:
        raise TransferTimedOut("The name server is slow.") from StoreUnavailable("no answer")

    with pytest.raises(TransferTimedOut, match=r"^The name server is slow\.$"):
        retried(send, CancelToken(60))


def test_cancelling_ends_a_pause_at_once(monkeypatch):
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 200.0)
    monkeypatch.setattr(retrying, "LONGEST_PAUSE_S", 200.0)
    cancel, begin = CancelToken(), time.monotonic()
    with pytest.raises(TransferCancelled):
        retried(failing(99, StoreUnavailable("away")), cancel, lambda _trouble: cancel.cancel())
    assert time.monotonic() - begin < 60


def test_child_may_have_less_time_than_its_parent_but_not_more():
    parent = CancelToken(60)
    with parent.child(30) as child:
        assert child.left <= 30
        ends(child)
        with pytest.raises(TransferTimedOut, match="within 30 s"):
            child.check()
        parent.check()
    with parent.child(90) as child:
        assert child.left <= 60
        assert child.timeout_s == 60


def test_child_ends_with_its_parent_and_not_the_other_way_round():
    parent = CancelToken(60)
    with parent.child() as child:
        child.cancel()
        with pytest.raises(TransferCancelled):
            child.check()
        parent.check()
    with parent.child() as child:
        before, left, after = parent.left, child.left, parent.left
        assert before >= left >= after
        parent.cancel()
        with pytest.raises(TransferCancelled):
            child.check()
    with parent.child() as child, pytest.raises(TransferCancelled):
        child.check()


def test_expired_time_stays_expired():
    with pytest.raises(TransferTimedOut, match="within 0 s"):
        CancelToken(0).check()


def test_parallel_results_keep_their_order():
    barrier = threading.Barrier(3)

    def work(number: int, _cancel: CancelToken) -> int:
        barrier.wait(60)
        return number * 10

    assert in_parallel(work, iter(range(3)), CancelToken(), at_once=3) == [0, 10, 20]


def test_first_failure_stops_the_others_and_is_raised():
    others_wait = threading.Barrier(3)

    def work(number: int, cancel: CancelToken) -> None:
        others_wait.wait(60)
        if number == 1:
            raise ValueError("the cause")
        cancel.pause(120)
        cancel.check()

    begin = time.monotonic()
    with pytest.raises(ValueError, match="the cause"):
        in_parallel(work, range(3), CancelToken(), at_once=3)
    assert time.monotonic() - begin < 60


def test_failure_among_the_items_stops_those_in_progress():
    def items():
        yield 1
        raise ValueError("the source")

    def work(_number: int, cancel: CancelToken) -> None:
        cancel.pause(30)
        cancel.check()

    with pytest.raises(ValueError, match="the source"):
        in_parallel(work, items(), CancelToken(), at_once=2)


def test_calling_thread_does_the_work_if_the_system_refuses_others():
    names = set()

    def work(item, _):
        names.add(threading.current_thread())
        return item + 1

    with threads_refused():
        assert in_parallel(work, range(5), CancelToken(), at_once=3) == [1, 2, 3, 4, 5]
        with pytest.raises(ZeroDivisionError):
            in_parallel(lambda item, _: 1 // item, range(5), CancelToken(), at_once=3)
    assert names == {threading.current_thread()}


def test_threads_that_run_do_the_work_of_those_that_the_system_refuses():
    refused, names = threads_refused(), set()

    def items():
        yield 1
        with refused:
            yield from range(2, 20)

    def work(item, _):
        names.add(threading.current_thread())
        return item

    assert in_parallel(work, items(), CancelToken(), at_once=8) == list(range(1, 20))
    assert threading.current_thread() not in names
