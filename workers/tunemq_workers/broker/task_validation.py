"""Check each message in a node's queue before Celery sees it, and pass on only valid ones.

Any client that may write to Redis can put messages into a queue, and Celery does what a message
says: it decompresses the body, delays the task, sends follow-up tasks and builds objects of the
named types. So the consumer checks each raw message first. It accepts a message only if each part
has the form that `tunemq_scheduler.transport.redis.celery_publisher` writes, and passes only these
parts on. The node verifies later that the assignment in the message comes from the scheduler.
"""

from __future__ import annotations

import base64
import binascii
from typing import Literal

import msgspec

from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.protocol import message_limits as limits


class _Headers(msgspec.Struct):
    task: Literal["tunemq.run_steps"]
    id: str
    compression: None = None
    eta: None = None
    expires: None = None
    group: None = None
    timelimit: tuple[None, None] = (None, None)


class _Properties(msgspec.Struct):
    body_encoding: Literal["base64"]
    delivery_tag: str
    delivery_info: dict[str, str | None]


class _Task(msgspec.Struct):
    body: str
    headers: _Headers
    properties: _Properties
    content_type: Literal["application/json"] = msgspec.field(name="content-type")
    content_encoding: Literal["utf-8"] = msgspec.field(name="content-encoding")


class _Canvas(msgspec.Struct):
    """Celery's options for follow-up tasks; none is allowed."""

    callbacks: None = None
    errbacks: None = None
    chain: None = None
    chord: None = None


_task = msgspec.json.Decoder(_Task).decode
_arguments = msgspec.json.Decoder(tuple[tuple[str], dict[str, None], _Canvas]).decode


class InvalidCeleryMessage(Exception):
    """A message that TuneMQ's scheduler cannot have written.

    Attributes:
        reason: one of the reasons in `tunemq_shared.protocol.rejection_counter.RejectionCount`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def check_task(message: bytes) -> bytes:
    """Return the message, rebuilt from its checked parts only, for Celery.

    Raises:
        InvalidCeleryMessage: the message is too long or has an unexpected part.
    """
    if len(message) > limits.TASK_BYTES:
        raise InvalidCeleryMessage("oversized")
    try:
        task = _task(message)
        arguments = _arguments(base64.b64decode(task.body, validate=True))
    except (*UNDECODABLE, binascii.Error, ValueError) as problem:
        raise InvalidCeleryMessage("unreadable") from problem
    if arguments[1]:
        raise InvalidCeleryMessage("unreadable")
    task.body = base64.b64encode(msgspec.json.encode(arguments)).decode()
    return msgspec.json.encode(task)
