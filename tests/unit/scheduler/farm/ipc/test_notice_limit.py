"""Lines of a search that writes many do not fill the scheduler's log."""

from __future__ import annotations

from tunemq_scheduler.farm.ipc.notice_limit import MOST_A_MINUTE, NoticeLimit


def test_few_lines_are_shown_at_once() -> None:
    limit = NoticeLimit()
    assert limit.take([], 1.0) == []
    assert limit.take(["a", "b"], 1.0) == ["a", "b"]
    assert limit.take(["c"], 2.0) == ["c"]


def test_s15_of_many_lines_the_rest_is_counted_a_minute_later() -> None:
    limit = NoticeLimit()
    lines = [f"line {number}" for number in range(150)]
    assert limit.take(lines, 10.0) == lines[:MOST_A_MINUTE]
    for second in range(11, 70):
        assert limit.take(lines, float(second)) == []
    hidden = 60 * 150 - MOST_A_MINUTE
    assert limit.take([], 70.0) == [f"{hidden} more lines are in its own log: tunemq logs"]
    assert limit.take(["a"], 71.0) == ["a"]
    assert limit.take([], 200.0) == []
