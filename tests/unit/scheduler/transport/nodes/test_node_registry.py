from __future__ import annotations

import sys

import cloudpickle
import msgspec
import pytest

from tunemq_scheduler.transport.event_batches import events_of
from tunemq_scheduler.transport.experiment_channel import ExperimentChannel
from tunemq_scheduler.transport.nodes import node_registry
from tunemq_scheduler.transport.nodes.node_registry import NodeRegistry
from tunemq_scheduler.transport.nodes.registration_checks import read_registration
from tunemq_shared.base.errors import TransportError
from tunemq_shared.broker import redis_keys
from tunemq_shared.health.node_metrics import NodeMetrics
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.registration import BatchHeader, NodeRegistration
from tunemq_shared.protocol.rejection_counter import RejectionCounter

PYTHON = ".".join(map(str, sys.version_info[:3]))
REGISTRATION = NodeRegistration(
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


def register(registry: NodeRegistry, instance_id: str = "inc1", **fields: object) -> list[str]:
    registration = msgspec.structs.replace(REGISTRATION, instance_id=instance_id, **fields)
    return registry.read_registration(f"{instance_id[-1]}-0".encode(), m.encode(registration))


def batch(*events: m.NodeEvent, first: int = 1, instance_id: str = "inc1") -> dict[bytes, bytes]:
    header = BatchHeader(m.PROTOCOL_VERSION, instance_id, first, (0, 0))
    return {redis_keys.HEADER: m.encode(header), redis_keys.EVENTS: m.encode(list(events))}


KEY = "tunemq:events:mine"


def registry_of(term: int = 1, *keys: str) -> NodeRegistry:
    registry = NodeRegistry(term, rejections=RejectionCounter())
    for key in keys or (KEY,):
        registry.channels[key] = ExperimentChannel(key)
    return registry


def rejected(registry: NodeRegistry) -> dict[tuple[str, str], int]:
    return {(kind, reason): times for kind, reason, times in registry.rejections.counts()}


def mine(registry: NodeRegistry) -> ExperimentChannel:
    return registry.channels[KEY]


def joined_registry() -> NodeRegistry:
    registry = registry_of()
    register(registry)
    registry.read_leases(0.0, [b"1:0:0"])
    mine(registry).take()
    return registry


def test_node_joins_when_its_lease_shows_that_it_lives():
    registry = registry_of()
    register(registry)
    registry.read_leases(0.0, [None])
    assert mine(registry).read_events == []

    registry.read_leases(1.0, [b"1:0:0"])
    registry.read_leases(2.0, [b"2:0:0"])
    assert mine(registry).read_events == [JOINED]


def test_s03_events_of_an_unknown_node_before_its_first_lease_are_requested_again():
    registry = registry_of()
    register(registry)

    assert registry.read_batch(mine(registry), b"5-1", batch(FINISHED)) == ("", 0)
    assert mine(registry).read_events == []
    assert not registry.nodes["inc1"].is_joined
    registry.read_leases(0.0, [b"1:0:0"])
    assert mine(registry).take() == [JOINED]
    assert registry.gaps == [KEY]
    registry.begin_anew()
    assert registry.read_batch(mine(registry), b"6-1", batch(FINISHED)) == ("inc1", 1)
    assert events_of(mine(registry).read_events) == [m.BatchRead("inc1", 1, 1, "6-1"), FINISHED]


def test_s03_first_batch_of_an_unknown_node_must_begin_with_its_first_event():
    registry = registry_of()
    register(registry)

    assert registry.read_batch(mine(registry), b"5-1", batch(FINISHED, first=200)) == ("", 0)
    assert mine(registry).read_events == []
    assert not registry.nodes["inc1"].is_joined
    assert rejected(registry) == {("events", "repeated"): 1}
    assert not registry.gaps, "no experiment has heard it"


def test_first_events_of_a_living_node_are_requested_again():
    registry = registry_of()
    register(registry)
    registry.read_batch(mine(registry), b"5-1", batch(FINISHED, first=2))
    registry.read_leases(0.0, [b"1:0:0"])

    assert mine(registry).read_events == [JOINED]
    assert registry.gaps == [KEY]
    registry.begin_anew()
    assert registry.read_batch(mine(registry), b"6-1", batch(FINISHED, FINISHED)) == ("inc1", 2)
    assert not registry.gaps


def test_node_that_registers_again_joins_once():
    registry = joined_registry()

    assert register(registry) == []
    assert mine(registry).read_events == []


def test_new_instance_replaces_the_old_one():
    registry = joined_registry()

    assert register(registry, "inc2") == ["inc1"]
    assert register(registry, "inc3", node="another") == []


def test_dead_node_is_reported_once_fenced_and_cleaned_up():
    registry = joined_registry()
    registry.lose("inc1", "gone", is_dead=True)
    registry.lose("inc1", "gone", is_dead=True)

    assert mine(registry).read_events == [m.NodeLost("inc1", "gone", is_dead=True)]
    names = [command[:2] for command in registry.commands]
    assert ("HSET", redis_keys.reply("inc1")) in names
    assert ("EXPIRE", redis_keys.reply("inc1")) in names
    assert ("DEL", redis_keys.queue("inc1")) in names


@pytest.mark.parametrize("sign_of_life", ["registration", "batch"])
def test_dead_node_that_returns_is_fenced_again_and_reports_nothing(sign_of_life):
    registry = joined_registry()
    registry.lose("inc1", "gone", is_dead=True)
    mine(registry).take()
    registry.commands.clear()
    if sign_of_life == "registration":
        assert register(registry) == []
    else:
        assert registry.read_batch(mine(registry), b"9-0", batch(FINISHED)) == ("", 0)

    assert mine(registry).read_events == []
    assert ("HSET", redis_keys.reply("inc1"), "f") in [command[:3] for command in registry.commands]


def test_node_of_an_earlier_scheduler_is_told_to_run_nothing():
    registry = registry_of(5)
    register(registry)
    registry.read_leases(0.0, [b"9:4:17"])

    desired_state = registry.nodes["inc1"].desired_state
    assert desired_state.is_changed
    assert desired_state.next_assignment() == m.Assignment(m.PROTOCOL_VERSION, "inc1", 5, 18, ())


def test_node_that_obeyed_an_earlier_scheduler_after_it_joined_is_told_to_run_nothing():
    registry = registry_of(2)
    register(registry)
    registry.read_leases(0.0, [b"1:0:0"])
    assert not registry.nodes["inc1"].desired_state.is_changed

    registry.read_leases(1.0, [b"2:1:7"])
    assert registry.nodes["inc1"].desired_state.is_changed
    registry.nodes["inc1"].desired_state.next_assignment()
    registry.read_leases(2.0, [b"3:2:1"])
    assert not registry.nodes["inc1"].desired_state.is_changed


def test_node_that_obeys_a_later_scheduler_is_named_once():
    registry = registry_of(5)
    register(registry)
    for beat in (b"9:4:17", b"10:6:1", b"11:6:2"):
        registry.read_leases(0.0, [beat])
    (notice,) = [one for one in registry.notices if "later term (6)" in one]
    assert "restart this worker" in notice


def test_unreadable_batches_are_noted_and_do_not_block_the_others():
    registry = joined_registry()

    assert registry.read_batch(mine(registry), b"1-1", {}) == ("", 0)
    assert registry.read_batch(mine(registry), b"1-2", {redis_keys.HEADER: b"\xff"}) == ("", 0)
    no_utf8 = {redis_keys.HEADER: b"\x92\x01\xa1\xff"}
    assert registry.read_batch(mine(registry), b"1-2", no_utf8) == ("", 0)
    assert registry.read_batch(mine(registry), b"1-3", batch(FINISHED)) == ("inc1", 1)
    assert rejected(registry) == {("events", "unreadable"): 3}
    assert len(registry.rejections.notices()) == 3


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
    registry = joined_registry()
    registry.channels["other"] = ExperimentChannel("other")
    registry.announce(registry.channels["other"])
    instance_id, last = registry.read_batch(
        mine(registry), b"1-1", {**batch(FINISHED), redis_keys.EVENTS: events}
    )
    assert (instance_id, last >= 1) == ("inc1", True)
    assert registry.nodes["inc1"].takes_orders
    assert registry.channels["other"].read_events == [JOINED]
    with pytest.raises(TransportError, match=r"Events 1 to \d+ of node inc1 "):
        events_of(mine(registry).take())


@pytest.mark.parametrize(
    ("field", "theirs", "ours"),
    [
        ("protocol", 99, str(m.PROTOCOL_VERSION)),
        ("python", "2.7.18", f"{sys.version_info.major}.{sys.version_info.minor}"),
        ("cloudpickle", "0.1", cloudpickle.__version__),
    ],
)
def test_f24_node_of_another_version_is_rejected_and_both_versions_are_named(field, theirs, ours):
    registry = registry_of()
    register(registry, **{field: theirs})

    (note,) = registry.rejections.notices()
    assert rejected(registry) == {("registration", "version"): 1}
    assert "Node n is refused" in note
    assert str(theirs)[:3] in note
    assert ours in note
    assert registry.nodes == {}


def test_f24_newer_protocol_is_named_even_if_its_registration_has_other_fields():
    with pytest.raises(
        TransportError, match=r"Node n is refused: it has version 7 of TuneMQ's protocol"
    ):
        read_registration(msgspec.msgpack.encode(["NodeRegistration", 7, "n", {"new": "field"}]))


def test_invalid_registration_is_ignored_with_a_note():
    with pytest.raises(TransportError, match="cannot be read"):
        read_registration(b"")


def test_nodes_are_told_up_to_which_event_their_stream_is_journalled():
    registry = joined_registry()
    told = ("HSET", redis_keys.reply("inc1"), "j:tunemq:events:mine")

    registry.acknowledged_up_to(mine(registry), {"inc1": 5, "unknown": 7})
    registry.acknowledged_up_to(mine(registry), {"inc1": 5})
    assert registry.commands == [(*told, "5")]

    registry.commands.clear()
    registry.start_anew()
    expires = ("EXPIRE", redis_keys.reply("inc1"), str(redis_keys.REPLY_TTL_S))
    assert registry.commands == [(*told, "5"), expires]


def test_node_without_orders_is_told_so_when_redis_is_back():
    """Otherwise the node would keep restarting its consumer, as if that hung."""
    registry = joined_registry()
    registry.start_anew()
    assert not any("v" in command for command in registry.commands)

    registry.nodes["inc1"].desired_state.next_assignment()
    registry.start_anew()
    assert ("HSET", redis_keys.reply("inc1"), "v", "1:1") in registry.commands


def test_node_of_an_ended_experiment_is_told_to_keep_no_events():
    registry = joined_registry()
    registry.acknowledged_up_to(mine(registry), {"inc1": 5})
    registry.over(mine(registry))
    assert registry.commands[-2:] == [
        ("HSET", redis_keys.reply("inc1"), f"j:{KEY}", str(redis_keys.EVERYTHING)),
        ("EXPIRE", redis_keys.reply("inc1"), str(redis_keys.REPLY_TTL_S)),
    ]


def test_node_is_known_with_its_gpus():
    registry = registry_of()
    gpus = (m.Gpu("GPU-a", "NVIDIA H200", 1e9),)
    register(registry, gpus=gpus)
    registry.read_leases(0.0, [b"1:0:0"])
    (joined,) = mine(registry).read_events
    assert joined == msgspec.structs.replace(JOINED, gpus=gpus)


def test_valid_node_metrics_are_kept_and_invalid_ones_are_not():
    registry = joined_registry()
    assert registry.node_metrics_keys() == [redis_keys.node_metrics("inc1")]
    node_metrics = NodeMetrics("1.0", load=0.5, trial_processes=2, number=7)
    yesterday = msgspec.structs.replace(node_metrics, load=2.0, number=6)
    absurd = msgspec.structs.replace(node_metrics, disk_free=float("nan"), number=8)
    for value in (m.encode(node_metrics), b"nonsense", m.encode(absurd), None, m.encode(yesterday)):
        registry.read_node_metrics("inc1", value)
    assert registry.nodes["inc1"].node_metrics == node_metrics
    assert rejected(registry) == {("node_metrics", "unreadable"): 2}


def test_silence_of_a_node_counts_from_its_last_sign_of_life():
    registry = joined_registry()
    for second in range(1, 9):
        registry.read_leases(float(second), [b"1:0:0"])
        if second < redis_keys.LEASE_TTL_S:
            assert registry.silence_s("inc1") == second
    assert not registry.nodes["inc1"].is_heard
    assert registry.silence_s("inc1") == pytest.approx(8.0, abs=1.0)
    registry.read_leases(9.0, [b"2:0:0"])
    assert registry.silence_s("inc1") == 0.0
    assert registry.silence_s("unknown") == 0.0


def test_registration_that_is_no_utf8_is_ignored_with_a_note():
    registry = registry_of()

    assert (
        registry.read_registration(b"1-0", m.encode(REGISTRATION).replace(b"inc1", b"inc\xff"))
        == []
    )
    assert "cannot be read" in registry.rejections.notices()[0]


@pytest.mark.parametrize("amount", [float("nan"), float("inf"), -1.0, 1e308])
@pytest.mark.parametrize("field", ["resources", "gpus", "began"])
def test_registration_with_an_impossible_amount_is_ignored_with_a_note(field, amount):
    fields = {"resources": {"cpu": amount}, "gpus": (m.Gpu("u", "m", amount),), "began": amount}
    registry = registry_of()
    assert register(registry, **{field: fields[field]}) == []
    assert "a number in it cannot be" in registry.rejections.notices()[0]
    assert registry.nodes == {}


def test_s15_registration_with_an_impossible_number_of_gpus_is_ignored_with_a_note():
    registry = registry_of()
    assert register(registry, resources={"gpu": 1025.0}) == []
    assert "it says that it has 1025 GPUs, and 1,024" in registry.rejections.notices()[0]
    assert registry.nodes == {}
    register(registry, resources={"gpu": 1024.0})
    assert list(registry.nodes) == ["inc1"]


@pytest.mark.parametrize("number", [-1, 2**64 - 1, 10**300])
@pytest.mark.parametrize("lease", ["1:{}:1", "1:1:{}"])
def test_lease_with_impossible_numbers_confirms_no_orders(lease, number):
    registry = registry_of()
    register(registry)
    registry.read_leases(0.0, [lease.format(number).encode()])
    assert registry.nodes["inc1"].desired_state.version == 0


@pytest.mark.parametrize("numbers", [{"first": 2**64 - 1}, {"confirmed": (1, 2**64 - 1)}])
def test_batch_with_impossible_numbers_is_unreadable(numbers):
    registry = joined_registry()
    header = BatchHeader(m.PROTOCOL_VERSION, "inc1", 1, (0, 0))
    data = m.encode(msgspec.structs.replace(header, **numbers))
    fields = {redis_keys.HEADER: data, redis_keys.EVENTS: m.encode([FINISHED])}
    assert registry.read_batch(mine(registry), b"1-0", fields) == ("", 0)
    assert rejected(registry) == {("events", "unreadable"): 1}


def test_newest_of_very_many_dead_instances_are_fenced_if_they_return(monkeypatch):
    monkeypatch.setattr("tunemq_scheduler.transport.nodes.node_registry._BURIED_AT_MOST", 2)
    registry = registry_of()
    for name in ("inc1", "inc2", "inc3"):
        register(registry, name)
        registry.bury(name, "it is dead")

    register(registry, "inc3")
    register(registry, "inc1")
    assert list(registry.nodes) == ["inc1"]


def test_s03_old_registration_replaces_no_node_and_changes_nothing():
    registry = registry_of()
    register(registry, "inc2", began=200.0, number=3)

    assert register(registry, "inc9", began=100.0) == []  # repeated from a dead instance
    assert register(registry, "inc2", began=200.0, number=2, withheld={"GPU-a": "old"}) == []
    assert rejected(registry) == {("registration", "repeated"): 1}
    assert registry.nodes["inc2"].number == 3
    assert register(registry, "inc8", began=300.0) == ["inc2"]


def test_s03_messages_of_a_dead_or_unknown_node_are_no_facts_and_are_counted():
    registry = joined_registry()
    registry.bury("inc1", "it is dead")

    assert registry.read_batch(mine(registry), b"1-1", batch(FINISHED)) == ("", 0)
    assert register(registry) == []
    unknown = batch(FINISHED, instance_id="inc7")
    assert registry.read_batch(mine(registry), b"1-2", unknown) == ("", 0)
    assert mine(registry).read_events == []
    assert rejected(registry) == {
        ("events", "dead_node"): 1,
        ("events", "unknown_node"): 1,
        ("registration", "dead_node"): 1,
    }


def test_s15_registrations_of_more_nodes_than_possible_are_rejected(monkeypatch):
    monkeypatch.setattr(node_registry, "MOST_NODES", 2)
    registry = registry_of()
    for name in ("inc1", "inc2", "inc3"):
        register(registry, name)
    register(registry, "inc1", number=1)  # a change of a known node
    assert registry.nodes.keys() == {"inc1", "inc2"}
    assert rejected(registry)["registration", "too_many"] == 1
    registry.bury("inc1", "it has ended")
    register(registry, "inc4")
    assert registry.nodes.keys() == {"inc2", "inc4"}


def test_s15_registrations_of_more_bytes_than_possible_are_rejected(monkeypatch):
    size = len(m.encode(REGISTRATION))
    monkeypatch.setattr(node_registry, "NODES_BYTES", 3 * size)
    registry = registry_of()
    register(registry, "inc1", hostname="h" * (size + 20))
    register(registry, "inc2")
    assert registry.nodes.keys() == {"inc1"}
    register(registry, "inc1", number=1)
    register(registry, "inc2")
    assert registry.nodes.keys() == {"inc1", "inc2"}


def test_s02_forged_number_of_metrics_does_not_silence_a_node():
    registry = registry_of()
    register(registry)
    registry.read_leases(1.0, [b"1:0:0"])

    def say(number: int, problem: str = "") -> None:
        said = NodeMetrics(number=number, disk_problem=problem)
        registry.read_node_metrics("inc1", m.encode(said))

    say(7)
    say(2**53, "forged")
    assert registry.nodes["inc1"].node_metrics.number == 7
    assert rejected(registry)["node_metrics", "unreadable"] == 1
    say(8, "true")
    assert registry.nodes["inc1"].node_metrics.disk_problem == "true"
    registry.read_leases(1000.0, [b"2:0:0"])
    say(500)  # as after the scheduler was suspended
    assert registry.nodes["inc1"].node_metrics.number == 500


def test_s02_confirmation_of_an_assignment_that_was_not_sent_is_ignored():
    registry = registry_of()
    register(registry)
    registry.read_leases(1.0, [b"1:0:0"])
    desired = registry.nodes["inc1"].desired_state
    desired.next_assignment()
    registry.read_leases(2.0, [f"2:1:{2**52}".encode()])
    assert not desired.is_confirmed
    registry.read_leases(3.0, [f"3:1:{desired.version}".encode()])
    assert desired.is_confirmed
