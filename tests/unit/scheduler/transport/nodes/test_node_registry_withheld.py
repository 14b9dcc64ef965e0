"""Withheld devices of a node: each experiment is notified once of each change."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from tests.unit.scheduler.transport.nodes.test_node_registry import REGISTRATION, registry_of
from tunemq_scheduler.transport.experiment_channel import ExperimentChannel
from tunemq_scheduler.transport.nodes.node_registry import NodeRegistry
from tunemq_shared.protocol import messages as m

ONE, TWO = "tunemq:events:one", "tunemq:events:two"
GPUS = (m.Gpu("GPU-a", "A100", 80e9), m.Gpu("GPU-b", "A100", 80e9))
WITH_GPUS = replace(REGISTRATION, resources={"cpu": 2.0, "gpu": 2.0}, gpus=GPUS)
BAD = {"GPU-b": "XID 79"}
WITHHELD = m.DevicesWithheld("inc1", BAD)


def says(registry: NodeRegistry, withheld: dict[str, str], entry_id: bytes = b"1-2") -> None:
    registry.read_registration(entry_id, m.encode(replace(WITH_GPUS, withheld=withheld)))


def joined(withheld: dict[str, str]) -> m.NodeJoined:
    registration = WITH_GPUS
    return m.NodeJoined(
        registration.instance_id,
        registration.node,
        registration.hostname,
        registration.node_ip,
        registration.resources,
        GPUS,
        withheld=withheld,
    )


def a_node(*events_keys: str, withheld: dict[str, str] | None = None) -> NodeRegistry:
    registry = registry_of(1, *events_keys)
    says(registry, withheld or {}, b"1-1")
    registry.read_leases(0.0, [b"1:0:0"])
    return registry


def silence(registry: NodeRegistry, now: float) -> float:
    while registry.nodes["inc1"].is_heard:
        now += 1.0
        registry.read_leases(now, [b"1:0:0"])
    return now


def test_repeated_registration_is_reported_once_if_it_withholds_other_devices() -> None:
    registry = a_node(ONE, TWO)
    for channel in registry.channels.values():
        assert channel.take() == [joined({})]
    says(registry, BAD)
    says(registry, BAD, b"1-3")
    for channel in registry.channels.values():
        assert channel.take() == [WITHHELD]
    says(registry, {}, b"1-4")
    for channel in registry.channels.values():
        assert channel.take() == [m.DevicesWithheld("inc1", {})]
    assert [one for one in registry.commands if one[0] == "XDEL"] == [
        ("XDEL", "tunemq:nodes", entry) for entry in (b"1-1", b"1-2", b"1-3")
    ]


def test_later_experiment_learns_withheld_devices_with_the_node() -> None:
    registry = a_node(ONE)
    says(registry, BAD)
    late = registry.channels[TWO] = ExperimentChannel(TWO)
    registry.announce(late)
    assert late.take() == [joined(BAD)]
    begins = a_node(ONE, withheld=BAD)
    assert begins.channels[ONE].take() == [joined(BAD)]


def test_withheld_devices_of_a_lost_node_are_reported_when_it_returns() -> None:
    registry = a_node(ONE)
    channel = registry.channels[ONE]
    now = silence(registry, 0.0)
    says(registry, BAD)
    assert [type(read_event) for read_event in channel.take()] == [m.NodeJoined, m.NodeLost]
    registry.read_leases(now + 1.0, [b"1:0:1"])
    assert channel.take() == [m.NodeReturned("inc1"), WITHHELD]


def test_resumed_experiment_is_told_only_changes() -> None:
    for known, said in ((BAD, []), ({}, [WITHHELD]), ({"GPU-a": "ECC"}, [WITHHELD])):
        registry = registry_of(1, ONE)
        channel = registry.channels[ONE]
        registry.expect(channel, joined(known), 0)
        assert channel.take() == []
        says(registry, BAD, b"1-1")
        registry.read_leases(0.0, [b"1:0:0"])
        registry.read_leases(1.0, [b"1:0:1"])
        assert channel.take() == said


def test_withheld_devices_known_to_one_experiment_are_not_told_to_another_early():
    registry = registry_of(1, ONE, TWO)
    one, two = registry.channels.values()
    registry.expect(one, joined(BAD), 0)
    registry.expect(two, joined({}), 0)
    registry.read_leases(0.0, [b"1:0:0"])
    registry.read_leases(1.0, [b"1:0:1"])
    assert one.take() == two.take() == []
    says(registry, {}, b"1-1")
    assert (one.take(), two.take()) == ([m.DevicesWithheld("inc1", {})], [])


def test_notice_names_the_device_the_reason_and_its_return() -> None:
    registry = a_node(ONE)
    registry.notices.clear()
    says(registry, BAD)
    says(registry, BAD, b"1-3")
    assert registry.notices == ["GPU GPU-b of node n is set aside: XID 79."]
    says(registry, {"GPU-a": ""}, b"1-4")
    assert registry.notices[1:] == [
        "GPU GPU-a of node n is set aside.",
        "GPU GPU-b of node n may be used again.",
    ]


def test_node_cannot_fill_journals_with_withheld_devices() -> None:
    gpus = tuple(m.Gpu(f"GPU-{place}") for place in range(100))
    reasons = {gpu.uuid: "\x1b[31m" + "broken\n" * 500 for gpu in gpus}
    reasons["of no device"] = "?"
    registry = registry_of(1, ONE)
    registration = replace(WITH_GPUS, gpus=gpus, withheld=reasons)
    registry.read_registration(b"1-1", m.encode(registration))
    withheld = registry.nodes["inc1"].about.withheld
    assert len(withheld) == 64
    assert withheld.keys() <= {gpu.uuid for gpu in gpus}
    assert {len(reason) for reason in withheld.values()} == {200}
    assert all(reason.isprintable() for reason in withheld.values())


def ends(registry: NodeRegistry, number: int, entry_id: bytes) -> None:
    registration = replace(WITH_GPUS, is_ending=True, number=number)
    registry.read_registration(entry_id, m.encode(registration))


def test_node_that_says_that_it_ends_is_reported_once_to_each_experiment() -> None:
    registry = a_node(ONE, TWO)
    for channel in registry.channels.values():
        channel.take()
    ends(registry, 1, b"1-2")
    ends(registry, 1, b"1-3")
    says(registry, {}, b"1-4")  # an old registration, replayed
    for channel in registry.channels.values():
        assert channel.take() == [m.DevicesWithheld("inc1", {}, is_ending=True)]
    late = registry.channels["late"] = ExperimentChannel("late")
    registry.announce(late)
    assert late.take() == [replace(joined({}), is_ending=True)]


def test_resumed_experiment_that_knows_that_a_node_ends_is_not_told_again() -> None:
    registry = registry_of(1, ONE)
    channel = registry.channels[ONE]
    registry.expect(channel, replace(joined({}), is_ending=True), 0)
    ends(registry, 1, b"1-1")
    registry.read_leases(0.0, [b"1:0:0"])
    registry.read_leases(1.0, [b"1:0:1"])
    assert channel.take() == []


def test_registration_of_the_previous_version_is_read() -> None:
    registry = registry_of(1, ONE)
    before = msgspec.msgpack.decode(m.encode(WITH_GPUS))[:10]
    registry.read_registration(b"1-1", msgspec.msgpack.encode(before))
    assert registry.nodes["inc1"].about == joined({})
