"""A farm with keys, one end of it real and the other a test's; and attackers on its Redis."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.fake_node import FakeNode
from tests.integration.farm_support import RedisServer, Scheduler
from tests.support.farms.farm_processes import Command
from tests.support.keys import key_folder, of_scheduler, of_worker
from tests.support.waiting import eventually
from tunemq_scheduler.transport.event_batches import events_of
from tunemq_scheduler.transport.node_transport import NodeTransport
from tunemq_shared.broker import redis_keys as names
from tunemq_shared.health.node_metrics import NodeMetrics, decode_node_metrics
from tunemq_shared.protocol import messages as m
from tunemq_shared.signing.live_keys import LiveKeys

KEY = names.events("one")
#: Seconds to wait before a test concludes that an event does not happen.
_WHILE_S = 1.5


class SignedTransport:
    """A scheduler's transport with keys and one experiment, and nodes with and without keys."""

    def __init__(self, server: RedisServer, folder: Path) -> None:
        self.server = server
        self.folder = key_folder(folder / "keys")
        self.strangers = key_folder(folder / "others")
        self.read_events: list[m.Event] = []
        self.notices: list[str] = []
        self._nodes: list[FakeNode] = []
        self.term = 0
        self.start()

    def start(self) -> None:
        """A scheduler, the first or the next one."""
        self.term += 1
        self.transport = NodeTransport(
            self.server.url, term=self.term, keys=of_scheduler(self.folder)
        )
        self.client = self.transport.add(KEY)
        self.transport.open()

    def restart(self) -> None:
        """This scheduler ends, and another begins that knows nothing."""
        self.client.leave()
        self.transport.close(now=True)
        self.read_events.clear()
        self.start()

    def node(self, instance_id: str, keys: LiveKeys | None = None, *, name: str = "n") -> FakeNode:
        """A node of the farm, unless it has other keys."""
        given = of_worker(self.folder) if keys is None else keys
        self._nodes.append(FakeNode(self.server.url, instance_id, name=name, keys=given))
        return self._nodes[-1]

    def stranger(self, instance_id: str) -> FakeNode:
        """One with the keys of another farm."""
        return self.node(instance_id, of_worker(self.strangers))

    def turn(self) -> None:
        """One turn of its loop."""
        self.transport.poll(0.02)
        self.read_events += events_of(self.client.take())
        self.client.settle()
        self.transport.send()
        self.transport.flush()
        self.notices += self.transport.notices()

    def until(self, condition: Callable[[], object]) -> None:
        """Turn until the condition holds."""
        eventually(
            lambda: (self.turn(), condition())[1],
            message=lambda: f"{self.read_events} {self.notices} {self.counted()}",
        )

    def a_while(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Turn until an expected event would have happened."""
        ends = time.monotonic() + _WHILE_S
        while time.monotonic() < ends:
            meanwhile()
            self.turn()

    def said(self, kind: type[Any]) -> list[Any]:
        """The events of a kind so far."""
        return [read_event for read_event in self.read_events if isinstance(read_event, kind)]

    def counted(self) -> dict[tuple[str, str], int]:
        """The number of rejected messages, by kind and reason."""
        return {(kind, reason): times for kind, reason, times in self.transport.rejections.counts()}

    def close(self) -> None:
        """Close everything."""
        for node in self._nodes:
            node.close()
        self.transport.close(now=True)


class SignedWorker(Command):
    """A real `tunemq worker` with keys, and its scheduler: a test's.

    Args:
        has_keys: whether it is given some.
    """

    def __init__(self, server: RedisServer, folder: Path, *, has_keys: bool = True) -> None:
        self.folder = folder
        made = key_folder(folder / "keys")
        self.strangers = key_folder(folder / "others")
        self.scheduler = Scheduler(server, folder, keys=of_scheduler(made))
        self.stranger = Scheduler(server, folder, "others", keys=of_scheduler(self.strangers))
        self.keyless = Scheduler(server, folder, "keyless")
        line = ["worker", "--redis", server.url, "--name", "one", "--cpus", "2"]
        line += ["--workdir", str(folder / "work")]
        line += ["--keys", str(made.path / "worker.toml")] if has_keys else []
        super().__init__(*line, log=folder / "worker.log")

    def registered(self) -> str:
        """Wait until the worker has registered; return its instance id."""
        eventually(self.scheduler.registrations, within=60, message=lambda: self.said)
        return self.scheduler.registrations()[-1].instance_id

    def node_metrics(self) -> NodeMetrics:
        """The node's metrics; empty if it has published none for seconds."""
        for key in self.scheduler.client.keys(names.node_metrics("*")):
            if (signed_message := self.scheduler.client.get(key)) is not None:
                instance_id = key.rpartition(b":")[2]
                opened = self.scheduler.keys.events.open(
                    signed_message, b"node_metrics", instance_id
                )
                return decode_node_metrics(opened)
        return NodeMetrics()

    def rejected(self, **at_least: int) -> None:
        """Wait until it has rejected this many, by kind and reason with two underscores."""

        def has_rejected() -> bool:
            rejected = self.node_metrics().rejected
            return all(
                rejected.get(about.replace("__", ":"), 0) >= times
                for about, times in at_least.items()
            )

        eventually(
            has_rejected, within=60, message=lambda: f"{self.node_metrics().rejected} {self.said}"
        )


@pytest.fixture
def worker(server: RedisServer, tmp_path: Path) -> Iterator[SignedWorker]:
    worker = SignedWorker(server, tmp_path)
    yield worker
    worker.kill()
