"""Which messages of a node's queue a consumer gives to Celery: only those of our schedulers.

Anybody who may write to Redis can put anything into a queue, and what Celery does with a message
depends on what that says: it unpacks it, keeps it for a time that it names, sends others on, makes
objects of tables that name a type. So a consumer looks at each as it came, before anything else
does, takes one whose every part is as `tunemq_scheduler.transport.redis.celery_publisher` makes it,
and gives on these parts alone. Whether the assignment in it is the scheduler's is for the node to
see.
"""

from __future__ import annotations

import base64
import binascii
from typing import Literal

import msgspec

from tunemq_shared.base.undecodable import UNDECODABLE
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
    """What Celery would do besides."""

    callbacks: None = None
    errbacks: None = None
    chain: None = None
    chord: None = None


_task = msgspec.json.Decoder(_Task).decode
_arguments = msgspec.json.Decoder(tuple[tuple[str], dict[str, None], _Canvas]).decode


class InvalidCeleryMessage(Exception):
    """A message that no scheduler of ours made.

    Attributes:
        reason: see `tunemq_shared.protocol.rejections.RejectionCount`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def check_task(message: bytes) -> bytes:
    """What Celery may be given of a message: what was looked at, and nothing else.

    Raises:
        NoMail: it may not.
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
