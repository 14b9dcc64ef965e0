"""All rejected messages are counted; few of them are logged."""

from __future__ import annotations

from tunemq_shared.protocol.rejection_counter import TOLD_EVERY_S, RejectionCount, RejectionCounter


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_each_kind_and_reason_is_counted_separately():
    rejections = RejectionCounter()
    assert rejections.counts() == ()
    assert rejections.notices() == []
    for kind, reason in [
        ("command", "altered"),
        ("registration", "unsigned"),
        ("command", "altered"),
    ]:
        rejections.add(kind, reason, "It was refused.")
    rejections.add("events", "repeated")
    assert rejections.counts() == (
        RejectionCount("command", "altered", 2),
        RejectionCount("events", "repeated", 1),
        RejectionCount("registration", "unsigned", 1),
    )


def test_ten_thousand_rejections_of_one_kind_are_two_lines_in_a_minute():
    clock = Clock()
    rejections, lines = RejectionCounter(clock), []
    for _ in range(10_000):
        rejections.add("command", "altered", "A command was altered.")
        lines += rejections.notices()
    assert lines == ["A command was altered."]
    clock.now += TOLD_EVERY_S
    assert rejections.notices() == ["A command was altered. (9999 times)"]
    clock.now += TOLD_EVERY_S
    assert rejections.notices() == []


def test_different_rejections_are_logged_within_a_limit():
    clock = Clock()
    rejections = RejectionCounter(clock)
    for number in range(100):
        rejections.add("registration", "version", f"Node {number} is refused.")
    assert rejections.notices() == [f"Node {number} is refused." for number in range(5)]
    rejections.add("registration", "unsigned", "It is not signed.")
    rejections.add("registration", "version", "Node 7 is refused.")
    assert rejections.notices() == ["It is not signed."]
    clock.now += TOLD_EVERY_S
    assert rejections.notices() == ["Node 7 is refused."]
    assert [one.times for one in rejections.counts()] == [1, 101]


def test_rejections_that_are_only_counted_are_never_logged():
    rejections = RejectionCounter()
    rejections.add("command", "repeated")
    assert rejections.notices() == []
