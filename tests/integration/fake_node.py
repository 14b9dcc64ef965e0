"""A small fake node: it speaks the transport protocol, runs no trials, and obeys the test."""

from __future__ import annotations

import base64
import json
import sys

import cloudpickle
import redis

from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.registration import BatchHeader, NodeRegistration
from tunemq_shared.signing.live_keys import LiveKeys
from tunemq_workers.broker.node_signing import NodeSigning


class FakeNode:
    """Registers, reads its commands from the queue, and sends events."""

    def __init__(
        self, url: str, instance_id: str, *, name: str = "local", keys: LiveKeys | None = None
    ) -> None:
        self.keys = LiveKeys.none() if keys is None else keys
        # A client that times out sends the command again: Redis would execute it twice.
        self.redis = redis.Redis.from_url(url, socket_timeout=60)
        self.instance_id = instance_id
        self.name = name
        self.confirmed = (0, 0)
        self.last = 0
        self._renewals = 0
        self._signing = NodeSigning(instance_id, self.keys)

    def close(self) -> None:
        self.redis.close()

    def renew(self) -> None:
        self._signing.hear_challenge(self.redis.get(redis_keys.CHALLENGE) or b"")
        self._renewals += 1
        signed_message = self._signing.lease(
            f"{self._renewals}:{self.confirmed[0]}:{self.confirmed[1]}"
        )
        self.redis.set(
            redis_keys.lease(self.instance_id),
            signed_message,
            px=int(redis_keys.LEASE_TTL_S * 1000),
        )

    def send_registration(self, began: float = 0.0) -> None:
        self.renew()
        registration = NodeRegistration(
            m.PROTOCOL_VERSION,
            self.name,
            self.instance_id,
            "host",
            "127.0.0.1",
            1,
            {"cpu": 2.0},
            ".".join(map(str, sys.version_info[:3])),
            cloudpickle.__version__,
            began=began,
        )
        signed_message = self.keys.events.close(m.encode(registration), b"registration")
        self.redis.xadd(redis_keys.NODES, {redis_keys.REGISTRATION: signed_message})

    def send_deregistration(self) -> None:
        signed_message = self.keys.events.close(self.instance_id.encode(), b"bye")
        self.redis.xadd(redis_keys.NODES, {redis_keys.BYE: signed_message})

    def read_commands(self, within: int = 60) -> m.Assignment | None:
        """Return the next assignment from the queue, or None after ``within`` seconds."""
        popped = self.redis.brpop([redis_keys.queue(self.instance_id)], within)
        if popped is None:
            return None
        return self.take(json.loads(popped[1]))

    def take(self, message: dict) -> m.Assignment:
        assert message["headers"]["task"] == redis_keys.TASK
        (payload,), _, _ = json.loads(base64.b64decode(message["body"]))
        signed_message = base64.b64decode(payload)
        about = (b"command", self.instance_id.encode())
        assignment = m.decode_assignment(self.keys.orders.open(signed_message, *about))
        self.confirmed = max(self.confirmed, (assignment.term, assignment.version))
        return assignment

    def send(self, key: str, *events: m.NodeEvent, first: int | None = None) -> bool:
        """Append a batch from number ``first`` or the next; return whether the stream exists."""
        start = self.last + 1 if first is None else first
        header = BatchHeader(m.PROTOCOL_VERSION, self.instance_id, start, self.confirmed)
        encoded = m.encode(list(events))
        about = (b"batch", key.encode(), encoded)
        fields = {
            redis_keys.HEADER: self.keys.events.close(m.encode(header), *about),
            redis_keys.EVENTS: encoded,
        }
        self.last = max(self.last, start + len(events) - 1)
        return self.redis.xadd(key, fields, nomkstream=True) is not None

    def acknowledged_up_to(self) -> int:
        fields = self.redis.hgetall(redis_keys.reply(self.instance_id))
        named = [name for name in fields if name.startswith(b"j:")]
        return max((int(self.reply(name.decode())) for name in named), default=0)

    def reply(self, field: str) -> str:
        """Return a field of the scheduler's reply; empty if there is no reply."""
        signed_message = self.redis.hget(redis_keys.reply(self.instance_id), field)
        if signed_message is None:
            return ""
        about = (b"reply", self.instance_id.encode(), field.encode())
        return self.keys.orders.open(signed_message, *about).decode()
