"""What a node says of itself has no long names and not many of them: people look at all of it."""

from __future__ import annotations

import msgspec
import pytest

from tunemq_shared.health.node_metrics import (
    GpuMetrics,
    NodeDescription,
    NodeMetrics,
    decode_vitals,
)
from tunemq_shared.protocol.message_limits import LINE_CHARACTERS, MOST_OF_NODE, NAME_CHARACTERS
from tunemq_shared.protocol.messages import Gpu
from tunemq_shared.protocol.registration import NodeRegistration, decode_hello

NAME = "n" * NAME_CHARACTERS
LINE = "l" * LINE_CHARACTERS
HELLO = NodeRegistration(
    1,
    *(NAME, NAME, NAME, NAME, 1),
    *({f"r{number}": 1.0 for number in range(MOST_OF_NODE)}, NAME, NAME),
    gpus=(Gpu(NAME, NAME),) * MOST_OF_NODE,
    withheld={NAME: LINE},
)
ABOUT = NodeDescription(NAME, NAME, NAME, {NAME: NAME}, (NAME,) * MOST_OF_NODE)
VITALS = NodeMetrics(
    NAME, gpus=(GpuMetrics(NAME, foreign=LINE),) * MOST_OF_NODE, about=ABOUT, refused={NAME: 1}
)


def test_what_nodes_say_is_read_up_to_its_bounds():
    assert decode_hello(msgspec.msgpack.encode(HELLO)) == HELLO
    assert decode_vitals(msgspec.msgpack.encode(VITALS)) == VITALS


@pytest.mark.parametrize(
    "changed",
    [
        *({field: NAME + "x"} for field in ("node", "incarnation", "hostname", "node_ip")),
        *({field: NAME + "x"} for field in ("python", "cloudpickle")),
        {"resources": {NAME + "x": 1.0}},
        {"resources": HELLO.resources | {"more": 1.0}},
        {"gpus": (*HELLO.gpus, Gpu("g"))},
        {"gpus": (Gpu(NAME + "x"),)},
        {"gpus": (Gpu("g", NAME + "x"),)},
        {"withheld": {NAME + "x": "why"}},
        {"withheld": {"g": LINE + "x"}},
        {"withheld": {str(number): "" for number in range(MOST_OF_NODE + 1)}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_introduction_beyond_a_bound_is_refused(changed):
    hello = msgspec.structs.replace(HELLO, **changed)
    with pytest.raises(msgspec.ValidationError):
        decode_hello(msgspec.msgpack.encode(hello))


@pytest.mark.parametrize(
    "changed",
    [
        {"version": NAME + "x"},
        {"gpus": (*VITALS.gpus, GpuMetrics("g"))},
        {"gpus": (GpuMetrics(NAME + "x"),)},
        {"gpus": (GpuMetrics("g", foreign=LINE + "x"),)},
        {"refused": {NAME + "x": 1}},
        {"refused": {str(number): 1 for number in range(MOST_OF_NODE + 1)}},
        {"about": msgspec.structs.replace(ABOUT, node=NAME + "x")},
        {"about": msgspec.structs.replace(ABOUT, libraries={"l": NAME + "x"})},
        {"about": msgspec.structs.replace(ABOUT, libraries={str(n): "" for n in range(5000)})},
        {"about": msgspec.structs.replace(ABOUT, gpus=(NAME + "x",))},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_vitals_beyond_a_bound_are_refused(changed):
    vitals = msgspec.structs.replace(VITALS, **changed)
    with pytest.raises(msgspec.ValidationError):
        decode_vitals(msgspec.msgpack.encode(vitals))
