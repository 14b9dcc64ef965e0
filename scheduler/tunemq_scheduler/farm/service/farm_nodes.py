"""`FarmNodes`: the machines of a farm, as its users see and control them.

A request about a node, such as to drain it, applies to every later instance of it, also after a
restart of the scheduler: a file keeps it by the node's name.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from tunemq_scheduler.api.farm_answer_types import GpuRow, NodeRow, RejectionRow
from tunemq_scheduler.farm.allocation.allocation_reasons import NodeAllocation
from tunemq_scheduler.farm.allocation.amounts import minus, plus
from tunemq_scheduler.farm.allocation.fair_share_allocator import FairShareAllocator
from tunemq_scheduler.farm.common.small_files import replace_file
from tunemq_scheduler.farm.monitoring.metrics_snapshot import NodeSnapshot
from tunemq_scheduler.transport.node_transport import NodeTransport
from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.base.errors import JournalError
from tunemq_shared.broker import redis_keys as names
from tunemq_shared.health.node_metrics import NodeMetrics
from tunemq_shared.protocol import messages as m

#: The stream of the farm itself, to which nodes never write.
EVENTS_KEY: Final = names.events("farm")
#: The state of a node whose disk cannot take a trial.
SET_ASIDE: Final = "set aside"
#: The state of a node whose lease has expired.
SILENT: Final = "silent"
#: How long trials on a drained node get to save.
DRAIN_GRACE_S: Final = 60.0
#: The most rejections to report; nodes may report any number.
_MOST_REJECTED: Final = 1_000


class _KnownNode(NamedTuple):
    about: m.NodeJoined
    since: float


class FarmNodes:
    """The nodes of a farm.

    Args:
        path: the file with requests about nodes.
        transport: connects to the nodes.
        allocator: receives their changes.
        grace_s: how long trials on a drained node get to save; seconds.

    Raises:
        JournalError: the file cannot be read.
    """

    def __init__(
        self,
        path: Path,
        transport: NodeTransport,
        allocator: FairShareAllocator,
        *,
        grace_s: float = DRAIN_GRACE_S,
    ) -> None:
        self._path, self._grace_s = path, grace_s
        self._transport, self._allocator = transport, allocator
        self._client = transport.add(EVENTS_KEY)
        self._nodes: dict[str, _KnownNode] = {}
        #: The drained and retired nodes by name, with the reason.
        self._asked = _read(path)
        #: Node instances that get no trials until they can run them again.
        self._set_aside: set[str] = set()

    def turn(self) -> list[str]:
        """Process changes of nodes; return the instances that will not come back."""
        dead = []
        for read_event in self._client.take():
            match read_event:
                case m.NodeJoined():
                    self._nodes[read_event.instance_id] = _KnownNode(read_event, time.time())
                    self._allocator.node_joined(read_event)
                    if read_event.node in self._asked:
                        self._allocator.node_drained(read_event.instance_id, self._grace_s)
                case m.NodeLost():
                    if read_event.is_dead:
                        self._nodes.pop(read_event.instance_id, None)
                        self._set_aside.discard(read_event.instance_id)
                        dead.append(read_event.instance_id)
                    self._allocator.node_lost(read_event.instance_id, is_dead=read_event.is_dead)
                case m.NodeReturned():
                    self._allocator.node_returned(read_event.instance_id)
                case m.DevicesWithheld():
                    self._withheld(read_event)
                case _:
                    pass  # experiments get reports, not the farm itself
        self._client.settle()
        self._client.acknowledge({})  # no node writes to this stream; others may
        self._judge()
        return dead

    def _withheld(self, event: m.DevicesWithheld) -> None:
        instance_id = event.instance_id
        self._allocator.devices_withheld(instance_id, event.devices)
        if event.is_ending:
            self._allocator.node_ending(instance_id)
        if (known := self._nodes.get(instance_id)) is not None:
            about = msgspec.structs.replace(known.about, is_ending=event.is_ending)
            self._nodes[instance_id] = known._replace(about=about)

    def name_of(self, instance_id: str) -> str:
        """Return the name of a node; the instance id if it is unknown."""
        known = self._nodes.get(instance_id)
        return known.about.node if known is not None else instance_id

    def rows(self) -> tuple[NodeRow, ...]:
        """Return a row for each node, sorted by name.

        A lost instance is left out if its node came back as another one, and no trial is there.
        """
        rows = [self._row(one) for one in self._allocator.explainer.snapshot()]
        alive = {row.node for row in rows if row.state != SILENT}
        there = [
            row
            for row in rows
            if row.state != SILENT or row.node not in alive or row.trials or any(row.used.values())
        ]
        return tuple(sorted(there, key=lambda row: (row.node, row.since)))

    def rejected(self) -> tuple[RejectionRow, ...]:
        """Return the messages that the scheduler and its nodes have rejected since they started."""
        rows = [
            RejectionRow(kind=kind, reason=reason, times=times)
            for kind, reason, times in self._transport.rejections.counts()
        ]
        for instance_id, known in sorted(self._nodes.items()):
            for about, times in sorted(self._transport.node_metrics(instance_id).rejected.items()):
                kind, _, reason = about.partition(":")
                if kind.isidentifier() and reason.isidentifier():
                    node = known.about.node
                    rows.append(RejectionRow(node=node, kind=kind, reason=reason, times=times))
        return tuple(rows[:_MOST_REJECTED])

    def asked(self) -> Collection[str]:
        """Return the names of drained and retired nodes, whether or not they exist now."""
        return tuple(self._asked)

    def states(self) -> tuple[NodeSnapshot, ...]:
        """Return all nodes with their metrics."""
        return tuple(
            NodeSnapshot(
                row,
                self._metrics_of(row),
                self._transport.silence_s(row.instance_id),
            )
            for row in self.rows()
        )

    def _metrics_of(self, row: NodeRow) -> NodeMetrics:
        """Return a node's newest metrics; a lost one asks no store any more."""
        found = self._transport.node_metrics(row.instance_id)
        if row.state != SILENT:
            return found
        return msgspec.structs.replace(found, store=found.store.ended)

    def troubles(self) -> Iterator[str]:
        """Yield the nodes that are set aside or cannot reach a store, as lines for people."""
        for state in self.states():
            if state.row.state == SET_ASIDE:
                yield f"node {state.row.node} is set aside: {state.row.health}"
            if line := state.node_metrics.store.shown(f"node {state.row.node}"):
                yield line

    def drain(self, instance_id: str, reason: str) -> str:
        """Place nothing new on a node; its trials save and continue elsewhere.

        Raises:
            JournalError: the request cannot be stored; nothing was done.
        """
        node = self.name_of(instance_id)
        self._keep({**self._asked, node: reason})
        self._allocator.node_drained(instance_id, self._grace_s)
        return (
            f"{node} is {reason}: its trials have {self._grace_s:g} s to save, and continue on"
            f" other nodes; it gets no trial until `tunemq nodes resume {node}`"
        )

    def resume(self, instance_id: str) -> str:
        """Place trials on a node again.

        Args:
            instance_id: the node instance, or a name from `asked` if there is no such node now.

        Raises:
            JournalError: the request cannot be stored; nothing was done.
        """
        node = self.name_of(instance_id)
        if node not in self._asked:
            return f"{node} accepts trials already"
        self._keep({name: reason for name, reason in self._asked.items() if name != node})
        if instance_id not in self._nodes:
            return f"{node} is absent now; it accepts trials when it joins"
        self._set_aside.discard(instance_id)
        self._allocator.node_resumed(instance_id)
        return f"{node} accepts trials again"

    def retire(self, instance_id: str, reason: str) -> str:
        """Drain a node, and end its worker.

        Raises:
            JournalError: the request cannot be stored; nothing was done.
        """
        self.drain(instance_id, reason)
        self._transport.retire(instance_id, reason)
        node = self.name_of(instance_id)
        return (
            f"{node} is {reason}: its trials save and continue elsewhere, and it ends; after a "
            f"restart it gets no trial until `tunemq nodes resume {node}`"
        )

    def _row(self, allocation: NodeAllocation) -> NodeRow:
        known = self._nodes.get(allocation.instance_id)
        gpus = known.about.gpus if known is not None else ()
        rest = plus(allocation.free, allocation.aside)
        there = minus(allocation.total, allocation.aside).resources
        node_metrics = self._transport.node_metrics(allocation.instance_id)
        foreign = {gpu.uuid: gpu.foreign for gpu in node_metrics.gpus}
        is_idle = not allocation.held
        state = {"ready": "ready", "lost": SILENT}.get(allocation.state)
        is_ending = known is not None and known.about.is_ending
        if state is None and allocation.node not in self._asked and not is_ending:
            state = SET_ASIDE
        return NodeRow(
            node=allocation.node,
            instance_id=allocation.instance_id,
            state=state or ("drained" if is_idle else "draining"),
            health=self._health(allocation),
            total={name: there.get(name, 0.0) for name in allocation.total.resources},
            used={
                name: round(amount - rest.resources.get(name, 0.0), 6)
                for name, amount in allocation.total.resources.items()
            },
            gpus=tuple(
                GpuRow(
                    uuid=gpu.uuid,
                    model=gpu.model,
                    memory=int(gpu.memory),
                    used=round(1.0 - rest.devices.get(gpu.uuid, 0.0), 6),
                    withheld=allocation.withheld.get(gpu.uuid),
                    foreign=foreign.get(gpu.uuid, ""),
                )
                for gpu in gpus
            ),
            trials=self._transport.trial_count(allocation.instance_id),
            version=node_metrics.version,
            rejected=sum(node_metrics.rejected.values()),
            since=known.since if known is not None else 0.0,
        )

    def _why_no_trial(self, instance_id: str) -> str:
        """Return why a node cannot run trials; empty if it can."""
        if self._transport.obeys_later(instance_id):
            return "it obeyed a scheduler of a later term: restart this worker"
        return self._transport.node_metrics(instance_id).why_no_trial

    def _judge(self) -> None:
        """Place nothing on nodes that cannot take a trial; running trials continue."""
        for instance_id, known in self._nodes.items():
            if known.about.node in self._asked:
                continue
            takes_none = bool(self._why_no_trial(instance_id))
            if takes_none and instance_id not in self._set_aside:
                self._set_aside.add(instance_id)
                self._allocator.node_drained(instance_id)
            elif not takes_none and instance_id in self._set_aside:
                self._set_aside.discard(instance_id)
                self._allocator.node_resumed(instance_id)

    def _health(self, allocation: NodeAllocation) -> str:
        if allocation.state == "lost":
            return "silent for longer than its lease"
        if allocation.node in self._asked:
            return self._asked[allocation.node]
        known = self._nodes.get(allocation.instance_id)
        if known is not None and known.about.is_ending:
            return "its worker was told to end"
        if reason := self._why_no_trial(allocation.instance_id):
            return reason
        store = self._transport.node_metrics(allocation.instance_id).store
        if store.failing_s:
            return f"store requests have been failing for {store.failing_s:.0f} s: tunemq doctor"
        if not allocation.withheld:
            return "ok"
        all_, aside = len(allocation.total.devices), len(allocation.withheld)
        return f"{aside} of {all_} GPUs set aside"

    def _keep(self, asked: dict[str, str]) -> None:
        replace_file(self._path, msgspec.json.encode(asked))
        self._asked = asked


def _read(path: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, *UNDECODABLE) as error:
        raise JournalError(f"{path} cannot be read: {error}.") from error
