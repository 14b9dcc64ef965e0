"""A large farm in virtual time: the real scheduler except Redis and the processes.

One supervisor's `NodeRegistry` and `FairShareAllocator`; for each experiment the supervisor's
`ExperimentConnection`, a socket, and the `RelayedExecutor`, `ExperimentLoop` and `TrialRunner` of
its process. A `Meter` adds up the cost of each.
"""

from __future__ import annotations

import selectors
from collections import Counter
from typing import Final

from tests.simulation.cost_meters import Meter
from tests.simulation.large_experiment import Experiment
from tests.simulation.large_nodes import LargeNodes
from tunemq.testing.virtual_time import VirtualTime
from tunemq_scheduler.farm.allocation.fair_share_allocator import FairShareAllocator
from tunemq_scheduler.transport.experiment_channel import ExperimentChannel
from tunemq_scheduler.transport.experiment_transport import TransportClient
from tunemq_scheduler.transport.nodes.node_registry import NodeRegistry
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import messages as m

#: Resource requests of the experiments' trials, in turn.
REQUESTS: Final = (
    {"cpu": 4.0, "gpu": 1.0},
    {"cpu": 2.0, "gpu": 0.5},
    {"cpu": 8.0, "gpu": 2.0},
    {"cpu": 32.0, "gpu": 8.0},
)
OWNERS: Final = 10


class LargeFarm:
    """A farm of nodes with eight GPUs each, and experiments of ten owners that use all of them.

    Args:
        turn_s: seconds that a turn waits for more messages after the first.

    Attributes:
        seen: counts of events.
    """

    def __init__(self, nodes: int, experiments: int, meter: Meter, turn_s: float = 0.0) -> None:
        self.time = VirtualTime()
        self.meter = meter
        self.seen: Counter[str] = Counter()
        self.experiments: dict[str, Experiment] = {}
        self.nodes = LargeNodes(self.time, self._append)
        self.turn_s = turn_s
        self._submitted = 0
        self._registry = NodeRegistry(1)
        self._allocator = FairShareAllocator()
        self._selector = selectors.EpollSelector()
        self._entries: list[tuple[str, bytes, dict[bytes, bytes]]] = []
        self._is_turn_due = False
        farm = self._registry.channels["farm"] = ExperimentChannel("farm")
        with meter("nodes join"):
            for number in range(nodes):
                self._registry.read_registration(*self.nodes.registration(number))
            self._look()
            for fact in farm.take():
                if isinstance(fact, m.NodeJoined):
                    with meter("allocator: node"):
                        self._allocator.node_joined(fact)
        for number in range(experiments):
            self.submit(REQUESTS[number % len(REQUESTS)])
        self._beat()

    # --- use of the transport ---------------------------------------------------------------------

    def add(self, events_key: str) -> TransportClient:
        """Create the transport of one experiment."""
        client = self._registry.channels[events_key] = TransportClient(
            events_key, self._registry, hold=_nothing, end_experiment=_nothing, forget=_nothing
        )
        self._registry.announce(client)
        return client

    # --- control ----------------------------------------------------------------------------------

    def submit(self, request: dict[str, float], priority: int = 0, at_most: int = 0) -> Experiment:
        """Start an experiment that uses all the slots it gets, or `at_most` slots."""
        number = self._submitted
        self._submitted += 1
        owner = f"owner{number % OWNERS}"
        one = Experiment(number, owner, request, self, lambda: self.time.now, at_most)
        self.experiments[one.name] = one
        self._allocator.experiment_added(one.name, owner, priority, number)
        self._selector.register(one.connection.fileno(), selectors.EVENT_READ, one.connection)
        one.step()
        self._turn_soon()
        return one

    def stop(self, one: Experiment) -> None:
        """An experiment ends: its trials are stopped, and all that it had is free."""
        one.stop()
        self._step(one)
        self._turn_soon()

    def start_anew(self) -> None:
        """Nothing was spent, and nothing happened."""
        self.meter.start_anew()
        self.seen.clear()
        self.nodes.seen.clear()

    def run(self, seconds: float) -> None:
        """Run for this many virtual seconds."""
        self.time.pass_to(self.time.now + seconds)

    def held(self) -> float:
        """How many GPUs experiments hold."""
        return sum(one.gpus() for one in self.experiments.values())

    def said(self) -> int:
        """Number of bytes that experiments have sent to the supervisor."""
        return sum(one.connection._frames.received for one in self.experiments.values())

    def close(self) -> None:
        """Close all sockets."""
        self._selector.close()
        for one in self.experiments.values():
            one.close()

    # --- the supervisor's turns -------------------------------------------------------------------

    def _append(self, key: str, entry_id: bytes, fields: dict[bytes, bytes]) -> None:
        self._entries.append((key, entry_id, fields))
        self._turn_soon(self.turn_s)

    def _turn_soon(self, delay: float = 0.0) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            self.time.after(delay, self._turn)

    def _turn(self) -> None:
        """As `Supervisor` does it; experiments have their turns in the middle of it."""
        self._is_turn_due = False
        self.seen["turns"] += 1
        with self.meter("redis: read"):
            journal_records, self._entries = self._entries, []
            for key, entry_id, fields in journal_records:
                channel = self._registry.channels[key]
                channel.was_read(entry_id, *self._registry.read_batch(channel, entry_id, fields))
        self._relay()
        self._allocate()
        with self.meter("redis: send"):
            for node in self._registry.nodes.values():
                if node.desired_state.is_changed and node.takes_orders:
                    self.nodes.send(m.encode(node.desired_state.next_assignment()))
        self.seen["commands"] += len(self._registry.commands)
        self._registry.commands = []

    def _relay(self) -> None:
        """Relay events to experiments until neither side has anything left to read."""
        ones = self.experiments.values()
        is_under_way = True
        while is_under_way:
            with self.meter("relay: to experiments"):
                for one in ones:
                    one.connection.attend()
            for one in ones:
                if one.has_commands:
                    self._step(one)
            with self.meter("relay: from experiments"):
                for key, _ in self._selector.select(0):
                    key.data.on_readable()
            is_under_way = any(one.has_unsent for one in ones)

    def _step(self, one: Experiment) -> None:
        journal_records, trials = one.journal.journal_records, one.runner.suggested
        with self.meter("experiment: turn"):
            one.step()
        self.seen["journal_records"] += one.journal.journal_records - journal_records
        self.seen["trials"] += one.runner.suggested - trials

    def _allocate(self) -> None:
        self._allocator.advance(1.0 + self.time.now)
        for one in list(self.experiments.values()):
            if one.connection.usage is not None and one.connection.usage is not one.told:
                one.told = one.connection.usage
                with self.meter("allocator: usage"):
                    self._allocator.usage(one.name, one.told)
            if one.runner.is_finished:
                self._forget(one)
        with self.meter("allocator: offers"):
            offers = self._allocator.offers()
        self.seen["offers"] += len(offers)
        for name, offer in offers:
            self.experiments[name].connection.offer(offer)
        if offers:
            self._turn_soon(0.001)

    def _forget(self, one: Experiment) -> None:
        del self.experiments[one.name]
        self._selector.unregister(one.connection.fileno())
        one.close()
        with self.meter("allocator: gone"):
            self._allocator.experiment_gone(one.name)

    def _beat(self) -> None:
        self._look()
        self._turn_soon()
        self.time.after(redis_keys.LEASE_PERIOD_S / 2, self._beat)

    def _look(self) -> None:
        """Twice a second: the leases."""
        leases = self.nodes.leases()
        values = [leases[node] for node in self._registry.nodes]
        with self.meter("redis: look"):
            self._registry.lease_keys()
            self._registry.read_leases(1.0 + self.time.now, values)


def _nothing(*_arguments: object) -> None:
    pass
