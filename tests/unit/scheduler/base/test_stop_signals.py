from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from tunemq_scheduler.base.stop_signals import StopSignals


class Search:
    """Records what the signals request, in order."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.signals = StopSignals(self.asked.append, lambda: self.asked.append("now"))


@pytest.fixture
def search() -> Search:
    return Search()


@pytest.fixture
def caught() -> Iterator[list[int]]:
    """Install the user's own handlers for both signals."""
    caught: list[int] = []
    before = {
        number: signal.signal(number, lambda got, _frame: caught.append(got))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    yield caught
    for number, handler in before.items():
        signal.signal(number, handler)


def test_ctrl_c_stops_the_search_and_is_raised_after_it(search):
    def run() -> None:
        with search.signals:
            signal.raise_signal(signal.SIGINT)
            assert search.asked == ["SIGINT"]

    with pytest.raises(KeyboardInterrupt):
        run()
    assert search.asked == ["SIGINT"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sigterm_stops_the_search_and_then_calls_the_users_handler(search, caught):
    with search.signals:
        signal.raise_signal(signal.SIGTERM)
        assert (search.asked, caught) == (["SIGTERM"], [])

    assert caught == [signal.SIGTERM]


def test_second_ctrl_c_stops_at_once_and_third_interrupts_the_script(search):
    reached: list[int] = []

    def run() -> None:
        with search.signals:
            for number in (1, 2, 3):
                signal.raise_signal(signal.SIGINT)
                reached.append(number)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert search.asked == ["SIGINT", "now"]
    assert reached == [1, 2]


def test_error_after_an_interrupt_is_raised_as_the_interrupt(search):
    def run() -> None:
        with search.signals:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise ConnectionError("Redis is gone")

    with pytest.raises(KeyboardInterrupt):
        run()


def test_ctrl_c_after_sigterm_stops_at_once(search, caught):
    with search.signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert search.asked == ["SIGTERM", "now"]

    assert caught == [signal.SIGTERM]


def test_search_without_a_signal_restores_the_users_handlers(search, caught):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with search.signals:
        assert signal.getsignal(signal.SIGINT) is not before[0]

    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert (search.asked, caught) == ([], [])


def test_search_error_is_not_hidden_by_the_interrupt(search):
    def run() -> None:
        with search.signals:
            signal.raise_signal(signal.SIGINT)
            raise ValueError("the search failed")

    with pytest.raises(ValueError, match="the search failed"):
        run()


def test_signal_that_the_script_ignores_stays_ignored(search):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with search.signals:
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)

    assert search.asked == []


def test_search_in_another_thread_leaves_signal_handlers_alone(search):
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def run() -> None:
        with search.signals:
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert seen == [before]
