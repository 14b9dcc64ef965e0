"""Refused messages are all counted, and told without a flood."""

from __future__ import annotations

from tunemq_shared.protocol.rejections import TOLD_EVERY_S, RejectionCount, RejectionCounter


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_each_kind_and_reason_is_counted_by_itself():
    refusals = RejectionCounter()
    assert refusals.counts() == ()
    assert refusals.news() == []
    for kind, reason in [("mail", "altered"), ("hello", "unsigned"), ("mail", "altered")]:
        refusals.add(kind, reason, "It was refused.")
    refusals.add("events", "repeated")
    assert refusals.counts() == (
        RejectionCount("events", "repeated", 1),
        RejectionCount("hello", "unsigned", 1),
        RejectionCount("mail", "altered", 2),
    )


def test_ten_thousand_refusals_of_one_kind_are_two_lines_in_a_minute():
    clock = Clock()
    refusals, lines = RejectionCounter(clock), []
    for _ in range(10_000):
        refusals.add("mail", "altered", "A mail was altered.")
        lines += refusals.news()
    assert lines == ["A mail was altered."]
    clock.now += TOLD_EVERY_S
    assert refusals.news() == ["A mail was altered. (9999 times)"]
    clock.now += TOLD_EVERY_S
    assert refusals.news() == []


def test_different_things_are_told_beside_each_other_but_not_without_end():
    clock = Clock()
    refusals = RejectionCounter(clock)
    for number in range(100):
        refusals.add("hello", "version", f"Node {number} is refused.")
    assert refusals.news() == [f"Node {number} is refused." for number in range(5)]
    refusals.add("hello", "unsigned", "It is not signed.")
    refusals.add("hello", "version", "Node 7 is refused.")
    assert refusals.news() == ["It is not signed."]
    clock.now += TOLD_EVERY_S
    assert refusals.news() == ["Node 7 is refused."]
    assert [one.times for one in refusals.counts()] == [1, 101]


def test_what_is_only_counted_is_never_told():
    refusals = RejectionCounter()
    refusals.add("mail", "repeated")
    assert refusals.news() == []
