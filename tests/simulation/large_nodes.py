"""The nodes of a large farm: they execute assignments, and report events in streams."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Final

import cloudpickle

from tests.simulation.large_experiment import metrics, plan_of, step_time
from tunemq.testing.simulated_trial_processes import SimulatedTrialProcesses
from tunemq.testing.simulated_uploads import UploadSettings
from tunemq.testing.virtual_time import VirtualTime
from tunemq_scheduler.core.commands import StartTrial
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.registration import BatchHeader, NodeRegistration

GPUS: Final = 8
_LATENCY_S: Final = 0.05
_PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}.0"

#: Key of a stream, id of an entry, its fields.
Append = Callable[[str, bytes, dict[bytes, bytes]], None]


class LargeNodes:
    """Machines of eight GPUs each, every tenth with older ones; no message is lost.

    Args:
        append: receives their events, one latency later.

    Attributes:
        seen: counts of their actions.
    """

    def __init__(self, time: VirtualTime, append: Append) -> None:
        self.seen: Counter[str] = Counter()
        self._time, self._append = time, append
        self._ids = itertools.count(1)
        self._renewals = 0
        self._taken: dict[str, int] = {}
        self._running: dict[str, set[tuple[str, int]]] = {}
        self._numbers: Counter[tuple[str, str]] = Counter()
        uploads = UploadSettings()
        self._processes = SimulatedTrialProcesses(
            time, metrics, step_time, self._report, uploads=uploads, seed=1
        )
        self._processes.open(plan_of(""))

    def registration(self, number: int) -> tuple[bytes, bytes]:
        """A node begins; returns its entry in the nodes' stream."""
        name = f"node{number:05d}"
        model, memory = ("A100", 80e9) if number % 10 else ("V100", 32e9)
        registration = NodeRegistration(
            protocol=m.PROTOCOL_VERSION,
            node=name,
            instance_id=f"{name}.1",
            hostname=name,
            node_ip="10.0.0.1",
            pid=1,
            resources={"cpu": 8.0 * GPUS, "gpu": float(GPUS), "memory": 1e12},
            python=_PYTHON,
            cloudpickle=cloudpickle.__version__,
            gpus=tuple(m.Gpu(f"GPU-{number:05d}-{one}", model, memory) for one in range(GPUS)),
        )
        self._taken[registration.instance_id] = 0
        self._running[registration.instance_id] = set()
        return self._entry_id(), m.encode(registration)

    def leases(self) -> dict[str, bytes]:
        """The nodes' current leases; read twice a second, renewed every second."""
        self._renewals += 1
        return {
            node: b"%d:1:%d" % (self._renewals // 2, confirmed)
            for node, confirmed in self._taken.items()
        }

    def send(self, assignment: bytes) -> None:
        """An assignment arrives, a latency later."""
        self.seen["assignments"] += 1
        self._time.after(_LATENCY_S, self._obey, assignment)

    def _obey(self, data: bytes) -> None:
        assignment = m.decode_assignment(data)
        node = assignment.instance_id
        if assignment.version <= self._taken[node]:
            return
        self._taken[node] = assignment.version
        for order in assignment.orders:
            key = order.trial, order.attempt
            if order.kill:
                self._processes.kill(*key)
            elif order.start is not None and key not in self._running[node]:
                self._running[node].add(key)
                self._processes.start(_start(node, order, order.start))
            elif order.stop:
                self._processes.end(*key)
            elif order.pause:
                self._processes.pause(*key)

    def _report(self, node: str, *events: m.NodeEvent) -> None:
        """All of one trial: a batch of its experiment's stream."""
        trial = next(one.trial for one in events if not isinstance(one, m.NodeWarned))
        key = redis_keys.events(trial.partition("_")[0])
        first = self._numbers[node, key] + 1
        self._numbers[node, key] += len(events)
        self.seen["results"] += sum(isinstance(one, m.ResultReported) for one in events)
        self.seen["trials over"] += sum(isinstance(one, m.SlotFreed) for one in events)
        header = BatchHeader(m.PROTOCOL_VERSION, node, first, (1, self._taken[node]))
        fields = {redis_keys.HEADER: m.encode(header), redis_keys.EVENTS: m.encode(events)}
        self.seen["bytes"] += sum(map(len, fields.values()))
        self._time.after(_LATENCY_S, self._append, key, self._entry_id(), fields)

    def _entry_id(self) -> bytes:
        return b"%d-0" % next(self._ids)


def _start(node: str, order: m.TrialOrder, start: m.TrialSpec) -> StartTrial:
    return StartTrial(
        trial=order.trial,
        attempt=order.attempt,
        instance_id=node,
        number=start.trial_number,
        config=start.config,
        resources=start.resources,
        run_until=order.run_until,
        last_step=start.last_step,
        restore=start.restore,
        devices=start.devices,
    )
