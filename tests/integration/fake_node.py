"""A node in a few lines: it speaks the wire, hosts nothing, and does what a test says."""

from __future__ import annotations

import base64
import json
import sys

import cloudpickle
import redis

from tunemq_shared import messages as m
from tunemq_shared import wire
from tunemq_shared.introductions import BatchHeader, NodeHello


class FakeNode:
    """Introduces itself, reads its mail from the queue, and states events."""

    def __init__(self, url: str, incarnation: str, *, name: str = "local") -> None:
        self.redis = redis.Redis.from_url(url)
        self.incarnation = incarnation
        self.name = name
        self.taken = (0, 0)
        self.last = 0
        self._renewals = 0

    def close(self) -> None:
        self.redis.close()

    def renew(self) -> None:
        self._renewals += 1
        value = f"{self._renewals}:{self.taken[0]}:{self.taken[1]}"
        self.redis.set(wire.lease(self.incarnation), value, px=int(wire.LEASE_TTL_S * 1000))

    def say_hello(self) -> None:
        self.renew()
        hello = NodeHello(
            m.PROTOCOL_VERSION,
            self.name,
            self.incarnation,
            "host",
            "127.0.0.1",
            1,
            {"cpu": 2.0},
            ".".join(map(str, sys.version_info[:3])),
            cloudpickle.__version__,
        )
        self.redis.xadd(wire.NODES, {wire.HELLO: m.encode(hello)})

    def read_mail(self, within: int = 20) -> m.Assignment | None:
        """Take the next assignment in the queue; None when there is none for ``within`` seconds."""
        popped = self.redis.brpop([wire.queue(self.incarnation)], within)
        if popped is None:
            return None
        return self.take(json.loads(popped[1]))

    def take(self, message: dict) -> m.Assignment:
        assert message["headers"]["task"] == wire.TASK
        (payload,), _, _ = json.loads(base64.b64decode(message["body"]))
        assignment = m.decode_assignment(base64.b64decode(payload))
        self.taken = max(self.taken, (assignment.term, assignment.version))
        return assignment

    def send(self, key: str, *events: m.NodeEvent, first: int | None = None) -> bool:
        """Append a batch; whether the stream is there. Numbers go on unless ``first`` is given."""
        start = self.last + 1 if first is None else first
        header = BatchHeader(m.PROTOCOL_VERSION, self.incarnation, start, self.taken)
        fields = {wire.HEADER: m.encode(header), wire.EVENTS: m.encode(list(events))}
        self.last = max(self.last, start + len(events) - 1)
        return self.redis.xadd(key, fields, nomkstream=True) is not None

    def journalled(self) -> int:
        fields = self.redis.hgetall(wire.reply(self.incarnation))
        return max((int(n) for name, n in fields.items() if name.startswith(b"j:")), default=0)
