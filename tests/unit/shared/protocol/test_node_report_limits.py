"""Limits on the number and length of names in a node's reports, which people read."""

from __future__ import annotations

import msgspec
import pytest

from tunemq_shared.health.node_metrics import (
    GpuMetrics,
    NodeDescription,
    NodeMetrics,
    decode_node_metrics,
)
from tunemq_shared.protocol.message_limits import LINE_CHARACTERS, MOST_OF_NODE, NAME_CHARACTERS
from tunemq_shared.protocol.messages import Gpu
from tunemq_shared.protocol.registration import NodeRegistration, decode_registration

NAME = "n" * NAME_CHARACTERS
LINE = "l" * LINE_CHARACTERS
REGISTRATION = NodeRegistration(
    1,
    *(NAME, NAME, NAME, NAME, 1),
    *({f"r{number}": 1.0 for number in range(MOST_OF_NODE)}, NAME, NAME),
    gpus=(Gpu(NAME, NAME),) * MOST_OF_NODE,
    withheld={NAME: LINE},
)
ABOUT = NodeDescription(NAME, NAME, NAME, {NAME: NAME}, (NAME,) * MOST_OF_NODE)
NODE_METRICS = NodeMetrics(
    NAME, gpus=(GpuMetrics(NAME, foreign=LINE),) * MOST_OF_NODE, about=ABOUT, rejected={NAME: 1}
)


def test_reports_of_nodes_are_read_up_to_their_bounds():
    assert decode_registration(msgspec.msgpack.encode(REGISTRATION)) == REGISTRATION
    assert decode_node_metrics(msgspec.msgpack.encode(NODE_METRICS)) == NODE_METRICS


@pytest.mark.parametrize(
    "changed",
    [
        *({field: NAME + "x"} for field in ("node", "instance_id", "hostname", "node_ip")),
        *({field: NAME + "x"} for field in ("python", "cloudpickle")),
        {"resources": {NAME + "x": 1.0}},
        {"resources": REGISTRATION.resources | {"more": 1.0}},
        {"gpus": (*REGISTRATION.gpus, Gpu("g"))},
        {"gpus": (Gpu(NAME + "x"),)},
        {"gpus": (Gpu("g", NAME + "x"),)},
        {"withheld": {NAME + "x": "why"}},
        {"withheld": {"g": LINE + "x"}},
        {"withheld": {str(number): "" for number in range(MOST_OF_NODE + 1)}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_registration_beyond_a_bound_is_rejected(changed):
    registration = msgspec.structs.replace(REGISTRATION, **changed)
    with pytest.raises(msgspec.ValidationError):
        decode_registration(msgspec.msgpack.encode(registration))


@pytest.mark.parametrize(
    "changed",
    [
        {"version": NAME + "x"},
        {"gpus": (*NODE_METRICS.gpus, GpuMetrics("g"))},
        {"gpus": (GpuMetrics(NAME + "x"),)},
        {"gpus": (GpuMetrics("g", foreign=LINE + "x"),)},
        {"rejected": {NAME + "x": 1}},
        {"rejected": {str(number): 1 for number in range(MOST_OF_NODE + 1)}},
        {"about": msgspec.structs.replace(ABOUT, node=NAME + "x")},
        {"about": msgspec.structs.replace(ABOUT, libraries={"l": NAME + "x"})},
        {"about": msgspec.structs.replace(ABOUT, libraries={str(n): "" for n in range(5000)})},
        {"about": msgspec.structs.replace(ABOUT, gpus=(NAME + "x",))},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_node_metrics_beyond_a_bound_are_rejected(changed):
    vitals = msgspec.structs.replace(NODE_METRICS, **changed)
    with pytest.raises(msgspec.ValidationError):
        decode_node_metrics(msgspec.msgpack.encode(vitals))
