"""A node outlives any order of a scheduler whose fields no process or path can have."""

from __future__ import annotations

import math
import time

import msgspec
import pytest

from tests.integration.farm_support import order
from tests.integration.node_fixtures import node, scheduler, server
from tests.support.waiting import eventually
from tunemq_shared.protocol.message_limits import Finite
from tunemq_shared.protocol.messages import (
    BlobRef,
    CheckpointRef,
    Environment,
    TrialFinished,
    TrialSpec,
)
from tunemq_shared.protocol.node_orders import Text
from tunemq_shared.protocol.result_conditions import Condition
from tunemq_shared.protocol.trial_limits import TrialLimitSpec

__all__ = ["node", "scheduler", "server"]

pytestmark = [pytest.mark.security, pytest.mark.integration]

TEXTS = ("", "\0", "a\0b", "/", "..", "../x", "a=b", "x" * 300, "x" * 70_000, "s3://", "\n", "é")
WHOLE = (-1, 0, 2**63 - 1, -(2**63))
NUMBERS = (*map(float, WHOLE), math.nan, math.inf, -math.inf, 1e308)


def finishes(config):
    from tunemq_shared.trial.session import report

    report({"loss": 1})


finishes.__module__ = "__main__"  # is sent by value: hundreds of processes import no test


def changed(start: TrialSpec) -> list[TrialSpec]:
    """The order of a trial with one field changed, in ways that a node reads."""
    found = []
    for field in msgspec.structs.fields(TrialSpec):
        value, values = getattr(start, field.name), []
        if field.name == "events_key":
            continue  # the test reads that stream
        if field.type == Text:
            values = list(TEXTS)
        elif field.type is int:
            values = list(WHOLE)
        elif field.type == Finite:
            values = list(NUMBERS)
        elif field.type == dict[Text, Finite]:
            values = [{text: 1.0} for text in TEXTS] + [{"cpu": n} for n in NUMBERS]
        elif field.type is bytes:
            values = [b"", b"\xc1", b"\x91" * 10_000, b"\x80"]
        elif field.type == BlobRef or field.name == "bundle":
            values = blobs(start.code)
        elif field.name == "blobs":
            values = [(one,) for one in blobs(start.code)]
        elif field.name == "restore":
            values = [(CheckpointRef(text, text, 1, text),) for text in TEXTS]
        elif field.name == "stop":
            values = [(Condition(text, n),) for text, n in zip(TEXTS, NUMBERS, strict=False)]
        elif field.name == "limits":
            values = [
                TrialLimitSpec(**{one.name: n})
                for one in msgspec.structs.fields(TrialLimitSpec)
                for n in (-1, 2**62)
            ]
        elif field.type == tuple[Text, ...]:
            values = [(text,) for text in (*TEXTS, "(", "(a+)+$")]
        elif field.type == Environment:
            values = environments(value)
        found += [msgspec.structs.replace(start, **{field.name: one}) for one in values]
    return [one for one in found if is_readable(one)]


def is_readable(start: TrialSpec) -> bool:
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(start), type=TrialSpec)
    except msgspec.ValidationError:
        return False
    return True


def blobs(code: BlobRef) -> list[BlobRef]:
    return [
        msgspec.structs.replace(code, **{name: text})
        for name in ("sha256", "path", "store")
        for text in TEXTS
    ] + [msgspec.structs.replace(code, size=n) for n in (-1, 0, 2**62)]


def environments(given: Environment) -> list[Environment]:
    replace = msgspec.structs.replace
    found = []
    for text in TEXTS:
        found += [
            replace(given, python=text),
            replace(given, preload=(text,)),
            replace(given, sys_path=(text,)),
            replace(given, variables={**given.variables, text: "x"}),
            replace(given, variables={**given.variables, "X": text}),
        ]
    return found


@pytest.mark.slow
def test_s01_node_outlives_orders_of_nonsense(node, scheduler):
    orders = changed(scheduler.start(finishes))
    for first in range(0, len(orders), 32):
        several = enumerate(orders[first : first + 32], start=first)
        scheduler.assign(node.instance_id, *(order(f"t{n}", one) for n, one in several))
        last = order(f"good{first}", scheduler.start(finishes, trial_number=first))
        time.sleep(3)
        scheduler.assign(node.instance_id, last)
        eventually(
            lambda name=last.trial: name in {one.trial for one in scheduler.said(TrialFinished)},
            within=60,
            message=lambda first=first: (
                f"{first}: {orders[first : first + 32]}{node.log()[-4000:]}"
            ),
        )
        assert node.process.poll() is None, node.log()[-4000:]
