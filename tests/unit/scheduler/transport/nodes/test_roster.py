from __future__ import annotations

import sys

import cloudpickle
import msgspec
import pytest

from tunemq_scheduler.transport.experiment_channel import ExperimentChannel
from tunemq_scheduler.transport.node_batches import events_of
from tunemq_scheduler.transport.nodes.node_registry import NodeRegistry
from tunemq_scheduler.transport.nodes.registration_checks import read_hello
from tunemq_shared.base.errors import TransportError
from tunemq_shared.broker import redis_keys
from tunemq_shared.health.node_metrics import NodeMetrics
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.registration import BatchHeader, NodeRegistration
from tunemq_shared.protocol.rejections import RejectionCounter

PYTHON = ".".join(map(str, sys.version_info[:3]))
HELLO = NodeRegistration(
    m.PROTOCOL_VERSION,
    "n",
    "inc1",
    "host",
    "127.0.0.1",
    1,
    {"cpu": 2.0},
    PYTHON,
    cloudpickle.__version__,
)
JOINED = m.NodeJoined("inc1", "n", "host", "127.0.0.1", {"cpu": 2.0})
FINISHED = m.TrialFinished("t1", 1)


def introduce(roster: NodeRegistry, incarnation: str = "inc1", **fields: object) -> list[str]:
    hello = msgspec.structs.replace(HELLO, incarnation=incarnation, **fields)
    return roster.read_hello(f"{incarnation[-1]}-0".encode(), m.encode(hello))


def batch(*events: m.NodeEvent, first: int = 1, incarnation: str = "inc1") -> dict[bytes, bytes]:
    header = BatchHeader(m.PROTOCOL_VERSION, incarnation, first, (0, 0))
    return {redis_keys.HEADER: m.encode(header), redis_keys.EVENTS: m.encode(list(events))}


KEY = "tunemq:events:mine"


def roster_of(term: int = 1, *keys: str) -> NodeRegistry:
    roster = NodeRegistry(term, refusals=RejectionCounter())
    for key in keys or (KEY,):
        roster.tenants[key] = ExperimentChannel(key)
    return roster


def refused(roster: NodeRegistry) -> dict[tuple[str, str], int]:
    return {(kind, reason): times for kind, reason, times in roster.refusals.counts()}


def mine(roster: NodeRegistry) -> ExperimentChannel:
    return roster.tenants[KEY]


def joined_roster() -> NodeRegistry:
    roster = roster_of()
    introduce(roster)
    roster.read_leases(0.0, [b"1:0:0"])
    mine(roster).take()
    return roster


def test_a_node_joins_when_its_lease_shows_that_it_lives():
    roster = roster_of()
    introduce(roster)
    roster.read_leases(0.0, [None])
    assert mine(roster).facts == []

    roster.read_leases(1.0, [b"1:0:0"])
    roster.read_leases(2.0, [b"2:0:0"])
    assert mine(roster).facts == [JOINED]


def test_s03_events_of_an_unknown_node_before_its_first_lease_are_asked_for_again():
    roster = roster_of()
    introduce(roster)

    assert roster.read_batch(mine(roster), b"5-1", batch(FINISHED)) == ("", 0)
    assert mine(roster).facts == []
    assert not roster.nodes["inc1"].is_joined
    roster.read_leases(0.0, [b"1:0:0"])
    assert mine(roster).take() == [JOINED]
    assert roster.gaps == [KEY]
    roster.begin_anew()
    assert roster.read_batch(mine(roster), b"6-1", batch(FINISHED)) == ("inc1", 1)
    assert events_of(mine(roster).facts) == [m.BatchRead("inc1", 1, 1, "6-1"), FINISHED]


def test_s03_a_batch_of_a_node_that_nobody_was_told_of_begins_with_its_first_event():
    roster = roster_of()
    introduce(roster)

    assert roster.read_batch(mine(roster), b"5-1", batch(FINISHED, first=200)) == ("", 0)
    assert mine(roster).facts == []
    assert not roster.nodes["inc1"].is_joined
    assert refused(roster) == {("events", "repeated"): 1}
    assert not roster.gaps, "nobody has heard it"


def test_the_first_events_of_a_node_that_lives_are_asked_for_again():
    roster = roster_of()
    introduce(roster)
    roster.read_batch(mine(roster), b"5-1", batch(FINISHED, first=2))
    roster.read_leases(0.0, [b"1:0:0"])

    assert mine(roster).facts == [JOINED]
    assert roster.gaps == [KEY]
    roster.begin_anew()
    assert roster.read_batch(mine(roster), b"6-1", batch(FINISHED, FINISHED)) == ("inc1", 2)
    assert not roster.gaps


def test_a_node_that_introduces_itself_again_joins_once():
    roster = joined_roster()

    assert introduce(roster) == []
    assert mine(roster).facts == []


def test_a_new_incarnation_takes_the_place_of_the_old_one():
    roster = joined_roster()

    assert introduce(roster, "inc2") == ["inc1"]
    assert introduce(roster, "inc3", node="another") == []


def test_a_dead_node_is_told_once_fenced_and_cleaned_up_after():
    roster = joined_roster()
    roster.lose("inc1", "gone", is_dead=True)
    roster.lose("inc1", "gone", is_dead=True)

    assert mine(roster).facts == [m.NodeLost("inc1", "gone", is_dead=True)]
    names = [command[:2] for command in roster.commands]
    assert ("HSET", redis_keys.reply("inc1")) in names
    assert ("EXPIRE", redis_keys.reply("inc1")) in names
    assert ("DEL", redis_keys.queue("inc1")) in names


@pytest.mark.parametrize("sign_of_life", ["hello", "batch"])
def test_a_dead_node_that_comes_back_is_fenced_again_and_states_nothing(sign_of_life):
    roster = joined_roster()
    roster.lose("inc1", "gone", is_dead=True)
    mine(roster).take()
    roster.commands.clear()
    if sign_of_life == "hello":
        assert introduce(roster) == []
    else:
        assert roster.read_batch(mine(roster), b"9-0", batch(FINISHED)) == ("", 0)

    assert mine(roster).facts == []
    assert ("HSET", redis_keys.reply("inc1"), "f") in [command[:3] for command in roster.commands]


def test_a_node_that_obeyed_an_earlier_scheduler_is_told_that_nothing_is_wanted_of_it():
    roster = roster_of(5)
    introduce(roster)
    roster.read_leases(0.0, [b"9:4:17"])

    mailbox = roster.nodes["inc1"].mailbox
    assert mailbox.is_changed
    assert mailbox.next_assignment() == m.Assignment(m.PROTOCOL_VERSION, "inc1", 5, 18, ())


def test_a_node_that_obeyed_an_earlier_scheduler_after_it_joined_is_told_so_too():
    roster = roster_of(2)
    introduce(roster)
    roster.read_leases(0.0, [b"1:0:0"])
    assert not roster.nodes["inc1"].mailbox.is_changed

    roster.read_leases(1.0, [b"2:1:7"])
    assert roster.nodes["inc1"].mailbox.is_changed
    roster.nodes["inc1"].mailbox.next_assignment()
    roster.read_leases(2.0, [b"3:2:1"])
    assert not roster.nodes["inc1"].mailbox.is_changed


def test_unreadable_batches_are_noted_and_do_not_stop_the_others():
    roster = joined_roster()

    assert roster.read_batch(mine(roster), b"1-1", {}) == ("", 0)
    assert roster.read_batch(mine(roster), b"1-2", {redis_keys.HEADER: b"\xff"}) == ("", 0)
    no_utf8 = {redis_keys.HEADER: b"\x92\x01\xa1\xff"}
    assert roster.read_batch(mine(roster), b"1-2", no_utf8) == ("", 0)
    assert roster.read_batch(mine(roster), b"1-3", batch(FINISHED)) == ("inc1", 1)
    assert refused(roster) == {("events", "unreadable"): 3}
    assert len(roster.refusals.news()) == 3


UNREADABLE = (
    m.encode([FINISHED]).replace(b"t1", b"t\xff"),
    m.encode([FINISHED])[:-1],
    m.encode([["finished", "t1", "one"]]),
    m.encode([["tick", 1.0]]),
    b"\x92" + m.encode(FINISHED),
    b"\x91" * 100_000,
    b"\xdd\xff\xff\xff\xff",
    b"\xdd\xff",
    b"\xc1",
    b"",
)


@pytest.mark.parametrize("events", UNREADABLE)
def test_unreadable_events_cost_their_experiment_and_not_their_node(events):
    roster = joined_roster()
    roster.tenants["other"] = ExperimentChannel("other")
    roster.announce(roster.tenants["other"])
    incarnation, last = roster.read_batch(
        mine(roster), b"1-1", {**batch(FINISHED), redis_keys.EVENTS: events}
    )
    assert (incarnation, last >= 1) == ("inc1", True)
    assert roster.nodes["inc1"].takes_orders
    assert roster.tenants["other"].facts == [JOINED]
    with pytest.raises(TransportError, match=r"Events 1 to \d+ of node inc1 "):
        events_of(mine(roster).take())


@pytest.mark.parametrize(
    ("field", "theirs", "ours"),
    [
        ("protocol", 99, str(m.PROTOCOL_VERSION)),
        ("python", "2.7.18", f"{sys.version_info.major}.{sys.version_info.minor}"),
        ("cloudpickle", "0.1", cloudpickle.__version__),
    ],
)
def test_f24_a_node_of_another_version_is_refused_and_both_versions_are_named(field, theirs, ours):
    roster = roster_of()
    introduce(roster, **{field: theirs})

    (note,) = roster.refusals.news()
    assert refused(roster) == {("hello", "version"): 1}
    assert "Node n is refused" in note
    assert str(theirs)[:3] in note
    assert ours in note
    assert roster.nodes == {}


def test_f24_a_newer_protocol_is_named_even_if_its_hello_has_other_fields():
    with pytest.raises(
        TransportError, match=r"Node n is refused: it has version 7 of TuneMQ's protocol"
    ):
        read_hello(msgspec.msgpack.encode(["NodeRegistration", 7, "n", {"new": "field"}]))


def test_an_introduction_that_is_none_is_ignored_with_a_note():
    with pytest.raises(TransportError, match="cannot be read"):
        read_hello(b"")


def test_nodes_are_told_how_far_their_events_in_our_stream_are_journalled():
    roster = joined_roster()
    told = ("HSET", redis_keys.reply("inc1"), "j:tunemq:events:mine")

    roster.journalled(mine(roster), {"inc1": 5, "unknown": 7})
    roster.journalled(mine(roster), {"inc1": 5})
    assert roster.commands == [(*told, "5")]

    roster.commands.clear()
    roster.start_anew()
    expires = ("EXPIRE", redis_keys.reply("inc1"), str(redis_keys.REPLY_TTL_S))
    assert roster.commands == [(*told, "5"), expires]


def test_a_node_that_was_sent_no_orders_is_told_of_none_when_redis_is_back():
    """It would take its ear for deaf, and start another one, again and again."""
    roster = joined_roster()
    roster.start_anew()
    assert not any("v" in command for command in roster.commands)

    roster.nodes["inc1"].mailbox.next_assignment()
    roster.start_anew()
    assert ("HSET", redis_keys.reply("inc1"), "v", "1:1") in roster.commands


def test_a_node_that_is_told_that_all_is_over_keeps_nothing():
    roster = joined_roster()
    roster.journalled(mine(roster), {"inc1": 5})
    roster.over(mine(roster))
    assert roster.commands[-2:] == [
        ("HSET", redis_keys.reply("inc1"), f"j:{KEY}", str(redis_keys.EVERYTHING)),
        ("EXPIRE", redis_keys.reply("inc1"), str(redis_keys.REPLY_TTL_S)),
    ]


def test_a_node_is_known_with_its_gpus():
    roster = roster_of()
    gpus = (m.Gpu("GPU-a", "NVIDIA H200", 1e9),)
    introduce(roster, gpus=gpus)
    roster.read_leases(0.0, [b"1:0:0"])
    (joined,) = mine(roster).facts
    assert joined == msgspec.structs.replace(JOINED, gpus=gpus)


def test_what_a_node_says_of_its_machine_is_kept_and_what_cannot_be_read_is_not():
    roster = joined_roster()
    assert roster.vitals_keys() == [redis_keys.vitals("inc1")]
    vitals = NodeMetrics("1.0", load=0.5, hosts=2, number=7)
    yesterday = msgspec.structs.replace(vitals, load=2.0, number=6)
    absurd = msgspec.structs.replace(vitals, disk_free=float("nan"), number=8)
    for value in (m.encode(vitals), b"nonsense", m.encode(absurd), None, m.encode(yesterday)):
        roster.read_vitals("inc1", value)
    assert roster.nodes["inc1"].vitals == vitals
    assert refused(roster) == {("vitals", "unreadable"): 2}


def test_the_silence_of_a_node_counts_from_its_last_sign_of_life():
    roster = joined_roster()
    for second in range(1, 9):
        roster.read_leases(float(second), [b"1:0:0"])
        if second < redis_keys.LEASE_TTL_S:
            assert roster.silence_s("inc1") == second
    assert not roster.nodes["inc1"].is_heard
    assert roster.silence_s("inc1") == pytest.approx(8.0, abs=1.0)
    roster.read_leases(9.0, [b"2:0:0"])
    assert roster.silence_s("inc1") == 0.0
    assert roster.silence_s("nobody") == 0.0


def test_an_introduction_that_is_no_utf8_is_ignored_with_a_note():
    roster = roster_of()

    assert roster.read_hello(b"1-0", m.encode(HELLO).replace(b"inc1", b"inc\xff")) == []
    assert "cannot be read" in roster.refusals.news()[0]


@pytest.mark.parametrize("amount", [float("nan"), float("inf"), -1.0, 1e308])
@pytest.mark.parametrize("field", ["resources", "gpus", "began"])
def test_hello_with_an_amount_that_no_machine_has_is_ignored_with_a_note(field, amount):
    fields = {"resources": {"cpu": amount}, "gpus": (m.Gpu("u", "m", amount),), "began": amount}
    roster = roster_of()
    assert introduce(roster, **{field: fields[field]}) == []
    assert "a number in it cannot be" in roster.refusals.news()[0]
    assert roster.nodes == {}


@pytest.mark.parametrize("number", [-1, 2**64 - 1, 10**300])
@pytest.mark.parametrize("lease", ["1:{}:1", "1:1:{}"])
def test_lease_whose_numbers_cannot_be_says_nothing_of_orders(lease, number):
    roster = roster_of()
    introduce(roster)
    roster.read_leases(0.0, [lease.format(number).encode()])
    assert roster.nodes["inc1"].mailbox.version == 0


@pytest.mark.parametrize("numbers", [{"first": 2**64 - 1}, {"taken": (1, 2**64 - 1)}])
def test_batch_whose_numbers_cannot_be_is_unreadable(numbers):
    roster = joined_roster()
    header = BatchHeader(m.PROTOCOL_VERSION, "inc1", 1, (0, 0))
    data = m.encode(msgspec.structs.replace(header, **numbers))
    fields = {redis_keys.HEADER: data, redis_keys.EVENTS: m.encode([FINISHED])}
    assert roster.read_batch(mine(roster), b"1-0", fields) == ("", 0)
    assert refused(roster) == {("events", "unreadable"): 1}


def test_the_newest_of_very_many_dead_incarnations_are_fenced_should_they_come_back(monkeypatch):
    monkeypatch.setattr("tunemq_scheduler.transport.nodes.node_registry._BURIED_AT_MOST", 2)
    roster = roster_of()
    for name in ("inc1", "inc2", "inc3"):
        introduce(roster, name)
        roster.bury(name, "it is dead")

    introduce(roster, "inc3")
    introduce(roster, "inc1")
    assert list(roster.nodes) == ["inc1"]


def test_s03_a_hello_of_yesterday_takes_nobodys_place_and_changes_nothing():
    roster = roster_of()
    introduce(roster, "inc2", began=200.0, number=3)

    assert introduce(roster, "inc9", began=100.0) == []  # a dead incarnation's, said again
    assert introduce(roster, "inc2", began=200.0, number=2, withheld={"GPU-a": "old"}) == []
    assert refused(roster) == {("hello", "repeated"): 1}
    assert roster.nodes["inc2"].number == 3
    assert introduce(roster, "inc8", began=300.0) == ["inc2"]


def test_s03_what_a_dead_or_unknown_node_says_is_no_fact_and_is_counted():
    roster = joined_roster()
    roster.bury("inc1", "it is dead")

    assert roster.read_batch(mine(roster), b"1-1", batch(FINISHED)) == ("", 0)
    assert introduce(roster) == []
    unknown = batch(FINISHED, incarnation="inc7")
    assert roster.read_batch(mine(roster), b"1-2", unknown) == ("", 0)
    assert mine(roster).facts == []
    assert refused(roster) == {
        ("events", "dead_node"): 1,
        ("events", "unknown_node"): 1,
        ("hello", "dead_node"): 1,
    }
