"""The node's selector loop."""

from __future__ import annotations

import math
import os
import time

import pytest

from tunemq_workers.runtime import reactor as module
from tunemq_workers.runtime.reactor import Reactor


def test_timers_and_posted_calls_do_not_wait_for_the_end_of_a_long_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_LONG_ROUND_S", 0.0)
    reactor, done = Reactor(), []
    pipes = [os.pipe() for _ in range(2)]

    def serve(source: int) -> None:
        os.read(source, 1)
        done.append("served")
        if done.count("served") == 2:
            reactor.stop()
            return
        reactor.post(lambda: done.append("posted"))
        reactor.after(0.0, lambda: done.append("timer"))
        time.sleep(0.001)

    for source, sink in pipes:
        reactor.watch(source, lambda _events, source=source: serve(source))
        os.write(sink, b"x")
    reactor.run(lambda: done.append("round"))
    for descriptor in (one for pipe in pipes for one in pipe):
        os.close(descriptor)

    between = done[: done.index("served", 1)]
    assert between == ["served", "posted", "timer", "round"]


@pytest.mark.parametrize("delay_s", [math.nan, math.inf, -1.0, 1e300])
def test_timer_with_an_impossible_time_stops_no_other(delay_s: float) -> None:
    reactor, done = Reactor(), []
    for delay in (delay_s, 0.01, delay_s, 0.02):
        reactor.after(delay, lambda delay=delay: done.append(delay))
    reactor.after(0.05, reactor.stop)
    reactor.run(lambda: None)
    assert [one for one in done if one in (0.01, 0.02)] == [0.01, 0.02]


def test_reactor_waits_for_timers_far_away() -> None:
    reactor = Reactor()
    reactor.after(1e300, pytest.fail)
    reactor.post(lambda: reactor.post(reactor.stop))
    reactor.run(lambda: None)
