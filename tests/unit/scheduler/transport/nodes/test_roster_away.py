"""Nodes that are lost and come back, take their leave, or were there before this scheduler was."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.scheduler.transport.nodes.test_roster import (
    FINISHED,
    HELLO,
    JOINED,
    KEY,
    batch,
    introduce,
    joined_roster,
    mine,
    roster_of,
)
from tunemq_scheduler.transport.node_batches import events_of
from tunemq_scheduler.transport.nodes.node_registry import NodeRegistry
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import messages as m

LOST = m.NodeLost("inc1", "its lease was not renewed for 6 s")


def silent(roster: NodeRegistry, *leases: bytes | None, start: float = 1.0) -> float:
    """Look at unchanging leases until a node is lost; when that was."""
    now = start
    while not any(isinstance(fact, m.NodeLost) for fact in mine(roster).facts):
        roster.read_leases(now, list(leases))
        now += 1.0
        assert now < start + 60.0, "nobody is lost"
    return now


def away_roster() -> tuple[NodeRegistry, float]:
    roster = joined_roster()
    now = silent(roster, b"1:0:0")
    assert mine(roster).facts == [LOST]
    mine(roster).take()
    return roster, now


def settle(roster: NodeRegistry) -> None:
    mine(roster).settle(mine(roster).given)


def test_a_silent_node_is_lost_and_neither_fenced_nor_forgotten():
    roster = joined_roster()
    roster.commands.clear()
    silent(roster, b"1:0:0")
    silent_again = [roster.read_leases(60.0 + n, [b"1:0:0"]) for n in range(9)]

    assert silent_again
    assert mine(roster).facts == [LOST], "said once"
    assert roster.commands == [("DEL", redis_keys.queue("inc1"))], (
        "old orders would start what is gone"
    )
    assert not roster.nodes["inc1"].takes_orders


def test_a_lease_that_is_renewed_again_brings_a_node_back():
    roster, now = away_roster()
    roster.read_leases(now, [b"2:0:0"])

    assert mine(roster).facts == [m.NodeReturned("inc1")]
    assert "is back after" in roster.news[-1]
    mine(roster).take()
    assert silent(roster, b"2:0:0", start=now + 1) > now + redis_keys.LEASE_TTL_S, (
        "a full lease again"
    )


def test_events_that_nobody_has_read_bring_a_node_back_before_they_are_stated():
    roster, _ = away_roster()

    assert roster.read_batch(mine(roster), b"9-1", batch(FINISHED)) == ("inc1", 1)
    assert events_of(mine(roster).facts) == [
        m.NodeReturned("inc1"),
        m.BatchRead("inc1", 1, 1, "9-1"),
        FINISHED,
    ]


def test_events_that_are_journalled_already_bring_nobody_back():
    roster, _ = away_roster()
    mine(roster).stakes["inc1"].journalled = 4

    assert roster.read_batch(mine(roster), b"9-1", batch(FINISHED, first=4)) == ("inc1", 4)
    assert mine(roster).facts == []


def test_a_node_that_is_back_gets_no_orders_before_the_runner_has_said_what_they_are():
    roster, now = away_roster()
    node = roster.nodes["inc1"]
    version = node.mailbox.version
    roster.read_leases(now, [b"2:0:0"])
    settle(roster)
    assert not node.takes_orders, "the runner was not told yet"

    mine(roster).take()
    settle(roster)
    assert node.takes_orders
    assert node.mailbox.is_changed
    assert node.mailbox.next_assignment().version > version


def test_a_node_that_is_lost_again_while_it_waits_for_orders_is_lost():
    roster, now = away_roster()
    roster.read_leases(now, [b"2:0:0"])
    mine(roster).take()
    silent(roster, b"2:0:0", start=now + 1)

    assert mine(roster).facts == [LOST]
    assert not roster.nodes["inc1"].takes_orders


def test_a_new_incarnation_of_a_node_that_is_away_makes_the_old_one_dead():
    roster, _ = away_roster()
    assert introduce(roster, "inc2") == ["inc1"]
    roster.lose("inc1", redis_keys.STARTED_AGAIN, is_dead=True)

    assert mine(roster).facts == [m.NodeLost("inc1", redis_keys.STARTED_AGAIN, is_dead=True)]
    assert list(roster.nodes) == ["inc2"]


def test_an_old_introduction_that_is_read_late_takes_nobodys_place():
    roster = roster_of(2)
    roster.expect(mine(roster), msgspec.structs.replace(JOINED, incarnation="inc2"), 0)

    assert introduce(roster, "inc1") == []
    assert introduce(roster, "inc2") == ["inc1"]


def test_a_node_that_is_away_for_a_day_is_dead():
    roster, now = away_roster()
    roster.read_leases(now + 86_000.0, [b"1:0:0"])
    assert mine(roster).facts == []
    roster.read_leases(now + 86_500.0, [b"1:0:0"])

    (lost,) = mine(roster).facts
    assert isinstance(lost, m.NodeLost)
    assert lost.is_dead
    assert not roster.nodes


def test_a_node_that_never_lived_and_is_silent_joins_when_it_first_shows_life():
    roster = roster_of()
    introduce(roster)
    for now in range(10):
        roster.read_leases(float(now), [None])
    assert mine(roster).facts == []

    roster.read_leases(10.0, [b"1:0:0"])
    assert mine(roster).facts == [JOINED]


def test_a_goodbye_names_who_leaves_and_is_removed():
    roster = joined_roster()
    roster.commands.clear()

    assert roster.read_goodbye(b"7-0", b"inc1") == "inc1"
    assert roster.commands == [("XDEL", redis_keys.NODES, b"7-0")]


@pytest.mark.parametrize("sign_of_life", ["lease", "batch"])
def test_a_node_of_the_scheduler_before_goes_on_and_gets_orders_of_our_own_term(sign_of_life):
    roster = roster_of(5)
    roster.expect(mine(roster), JOINED, 3)
    settle(roster)
    assert roster.read_batch(mine(roster), b"1-1", batch(FINISHED, first=3)) == ("inc1", 3)
    assert not roster.nodes["inc1"].takes_orders, "what is journalled shows no life"
    roster.read_hello(b"1-0", m.encode(HELLO))
    if sign_of_life == "lease":
        roster.read_leases(0.0, [b"9:4:17"])
        assert mine(roster).facts == []
    else:
        roster.read_batch(mine(roster), b"1-2", batch(FINISHED, first=4))
        assert [type(fact) for fact in events_of(mine(roster).facts)] == [
            m.BatchRead,
            m.TrialFinished,
        ]

    assert roster.nodes["inc1"].takes_orders
    assignment = roster.nodes["inc1"].mailbox.next_assignment()
    assert (assignment.term, assignment.version) > (4, 17)


def test_a_node_of_the_scheduler_before_that_is_silent_is_lost():
    roster = roster_of(5)
    roster.expect(mine(roster), JOINED, 3)
    silent(roster, None)

    assert mine(roster).facts == [LOST]
    mine(roster).take()
    roster.read_leases(60.0, [b"1:0:0"])
    assert mine(roster).facts == [m.NodeReturned("inc1")]


def test_a_node_that_was_away_before_may_come_back_to_us():
    roster = roster_of(5)
    up_s = 1_000_000.0  # what the monotonic clock says on a machine that was not just started
    roster.expect(mine(roster), JOINED, 3, away_since=up_s)
    for passed in range(20):
        roster.read_leases(up_s + passed, [None])
    assert mine(roster).facts == [], "the runner knows that it is lost"

    roster.read_leases(up_s + 20.0, [b"1:0:0"])
    assert mine(roster).facts == [m.NodeReturned("inc1")]
    assert "is back after 20 s" in roster.news[-1]


def test_a_node_of_the_scheduler_before_is_told_what_that_journalled_and_may_not_have_said():
    roster = roster_of(5)
    roster.expect(mine(roster), JOINED, 3)
    roster.start_anew()
    released = ("HSET", redis_keys.reply("inc1"), redis_keys.journalled(KEY), "3")
    assert released not in roster.commands, "whoever keeps the journal says when"

    roster.journalled(mine(roster), {"inc1": 3})
    roster.journalled(mine(roster), {"inc1": 3})
    assert roster.commands.count(released) == 1
