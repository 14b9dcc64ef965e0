"""Decoders of signed messages, with keys and without, and of unsigned messages."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable

import msgspec

from tests.fuzz.decoder import Bench, Decoder
from tests.support.keys import key_folder, of_scheduler
from tunemq_scheduler.transport.scheduler_signing import SchedulerSigning
from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.broker import redis_keys
from tunemq_shared.signing.live_keys import LiveKeys
from tunemq_workers.broker.node_signing import NodeSigning
from tunemq_workers.broker.task_validation import InvalidCeleryMessage, check_task

_NODE = "0123456789abcdef"
_KEY = "tunemq:events:1"


def of_signing(bench: Bench) -> list[Decoder]:
    """Decoders of both sides, which count rejected messages and raise nothing."""
    found = []
    for keys in (LiveKeys.none(), of_scheduler(key_folder(bench.folder / "keys"))):
        how = "signed" if keys.is_signed else "unsigned"
        found += [
            Decoder(
                f"{how} mail",
                _assignment(keys),
                (),
                (base64.b64encode(keys.orders.close(b"\x80", b"command", _NODE.encode())),),
                ("tunemq_workers.broker.node_signing:NodeSigning.command",),
            ),
            Decoder(
                f"{how} reply",
                _of_table(lambda fields, keys=keys: NodeSigning(_NODE, keys).replies(  # type: ignore[misc]
                    {name.decode(errors="replace"): value for name, value in fields.items()}
                )),
                (),
                (_table(f=keys.orders.close(b"1", b"reply", _NODE.encode(), b"f")),),
                (),
            ),
            Decoder(
                f"{how} challenge",
                lambda data, keys=keys: NodeSigning(_NODE, keys).hear_challenge(data),  # type: ignore[misc]
                (),
                (keys.orders.close(b"0123456789abcdef", b"challenge"),),
                (),
            ),
            Decoder(
                f"{how} introduction",
                _of_table(SchedulerSigning(keys).registration_entry),
                (),
                (
                    _table(
                        **{
                            redis_keys.REGISTRATION.decode(): keys.events.close(
                                b"h", b"registration"
                            )
                        }
                    ),
                    _table(**{redis_keys.BYE.decode(): keys.events.close(b"h", b"bye")}),
                ),
                (),
            ),
            Decoder(
                f"{how} batch",
                _of_table(lambda fields, keys=keys: SchedulerSigning(keys).batch(_KEY, fields)),  # type: ignore[misc]
                (),
                (
                    _table(
                        h=keys.events.close(b"h", b"batch", _KEY.encode(), b"e"),
                        e=b"e",
                    ),
                ),
                (),
            ),
            Decoder(
                f"{how} lease, vitals, output",
                _beside_leases(keys),
                (),
                (
                    keys.events.close(b"1:2:3", b"lease", _NODE.encode()),
                    keys.events.close(b"\x80", b"node_metrics", _NODE.encode()),
                    keys.events.close(b"\x80", b"output", _KEY.encode()),
                ),
                (),
            ),
        ]  # fmt: skip
    found.append(
        Decoder(
            "task of Celery",
            check_task,
            (InvalidCeleryMessage,),
            (_task(),),
            (
                "tunemq_workers.broker.task_validation:_task",
                "tunemq_workers.broker.task_validation:_arguments",
                "tunemq_workers.broker.task_validation:check_task",
            ),
        )
    )
    return found


def _assignment(keys: LiveKeys) -> Callable[[bytes], object]:
    def read(data: bytes) -> object:
        opened = NodeSigning(_NODE, keys).command(data)
        signed_message = base64.b64encode(keys.orders.close(data, b"command", _NODE.encode()))
        return opened, NodeSigning(_NODE, keys).command(signed_message)

    return read


def _of_table(read: Callable[[dict[bytes, bytes]], object]) -> Callable[[bytes], object]:
    """Read the fields of an entry; input that is no table becomes the content of each field."""

    def read_fields(data: bytes) -> object:
        try:
            fields = msgspec.msgpack.decode(data, type=dict[bytes, bytes])
        except UNDECODABLE:
            fields = dict.fromkeys(
                (
                    redis_keys.REGISTRATION,
                    redis_keys.BYE,
                    redis_keys.HEADER,
                    redis_keys.EVENTS,
                    b"f",
                ),
                data,
            )
        return read(fields)

    return read_fields


def _beside_leases(keys: LiveKeys) -> Callable[[bytes], object]:
    def read(data: bytes) -> object:
        signing = SchedulerSigning(keys)
        return (
            signing.leases({_NODE: data}),
            signing.leases({_NODE: keys.events.close(data, b"lease", _NODE.encode())}),
            signing.node_metrics(_NODE, data),
            signing.output(_KEY, data),
        )

    return read


def _table(**fields: bytes) -> bytes:
    return msgspec.msgpack.encode({name.encode(): value for name, value in fields.items()})


def _task() -> bytes:
    canvas = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    body = json.dumps([["bWFpbA=="], {}, canvas]).encode()
    return json.dumps({
        "body": base64.b64encode(body).decode(),
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {"task": redis_keys.TASK, "id": "1", "timelimit": [None, None]},
        "properties": {"body_encoding": "base64", "delivery_tag": "t", "delivery_info": {}},
    }).encode()  # fmt: skip
