"""A supervisor of one experiment that passes it all messages of its nodes.

Runs in the test's process, or in a separate one: ``python -m tests.support.farms.relay_supervisor
URL JOB FOLDER``.
"""

from __future__ import annotations

import selectors
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from tests.support.waiting import eventually
from tunemq_scheduler.base.lease_holder import LeaseHolder
from tunemq_scheduler.farm.common.scheduler_lease import SchedulerLease
from tunemq_scheduler.farm.ipc import ipc_messages as r
from tunemq_scheduler.farm.ipc.experiment_processes import ExperimentForkservers
from tunemq_scheduler.farm.ipc.supervisor_side import (
    ExperimentConnection,
    ExperimentExit,
    ExperimentReply,
)
from tunemq_scheduler.storage.last_run import read_record
from tunemq_scheduler.transport.node_transport import NodeTransport
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import messages as m


class RelaySupervisor:
    """Has a farm, and runs one experiment at a time on it.

    Args:
        url: where Redis is.
        earlier: the stream of an experiment that ran here before this one.
    """

    def __init__(self, url: str, earlier: str = "") -> None:
        self.lease = SchedulerLease(url, LeaseHolder.this_process())
        self.lease.claim(1, lambda _text: None)
        self.transport = NodeTransport(
            url, term=self.lease.term, guard=self.lease, absent=[earlier] if earlier else []
        )
        self._own = self.transport.add(redis_keys.events("supervisor"))
        self.nodes: dict[str, m.NodeJoined] = {}
        self.transport.open()
        self.connection: ExperimentConnection | None = None
        self._forkservers = ExperimentForkservers("")
        #: Nothing is offered while this is so, and all is taken back.
        self.is_stingy = False
        self._offered = 0
        self._beat_at = 0.0

    def start(self, job: r.ExperimentJob, folder: Path) -> ExperimentConnection:
        """Start the experiment's process."""
        job = msgspec.structs.replace(job, term=self.lease.term)
        self._offered = 0
        self.connection = ExperimentConnection(
            job, self.transport, folder=folder, begin=self._forkservers.start
        )
        return self.connection

    def turn(self, pause: float = 0.05) -> None:
        """One turn of its loop."""
        connection = self.connection
        with selectors.EpollSelector() as ready:
            if connection is not None and connection.process_exit is None:
                ready.register(connection.watched, selectors.EVENT_READ)
                if connection.is_readable:
                    ready.register(connection, selectors.EVENT_READ)
            self.transport.poll(pause, also=(ready.fileno(),))
            for key, _ in ready.select(0):
                if connection is not None and key.fileobj is connection:
                    connection.on_readable()
        self.nodes.update(
            (fact.instance_id, fact) for fact in self._own.take() if isinstance(fact, m.NodeJoined)
        )
        if connection is not None:
            self._offer(connection)
            if time.monotonic() > self._beat_at + 1:
                self._beat_at = time.monotonic()
                connection.beat(self.lease.proven_at)
            connection.attend()
        self.transport.send()

    def _offer(self, connection: ExperimentConnection) -> None:
        """Offer all of each node that it knows of, once; or nothing."""
        if connection.usage is None:
            return
        for node, seen in connection.usage.seen.items():
            wanted = 2 if self.is_stingy else 1
            if seen % 2 != wanted % 2 and node in self.nodes and seen >= self._offered:
                self._offered = seen + 1
                what = {} if self.is_stingy else self.nodes[node].resources
                connection.offer(m.NodeOffered(node, seen + 1, what, preempt_grace_s=5.0))

    def until(self, condition: Callable[[], object], within: float = 60.0) -> None:
        """Turn until something is so."""

        def has_come() -> object:
            self.turn()
            return condition()

        eventually(has_come, within=within, message=self.told)

    def answer(self, request: r.SearchRequest) -> ExperimentReply:
        """Ask the experiment, and turn until it has answered."""
        assert self.connection is not None
        replies: list[ExperimentReply] = []
        self.connection.ask(request, replies.append)
        self.until(lambda: replies)
        return replies[0]

    def ends(self, within: float = 90.0) -> ExperimentExit:
        """Turn until the experiment's process has ended."""
        assert self.connection is not None
        self.until(lambda: self.connection is not None and self.connection.process_exit, within)
        assert self.connection.process_exit is not None
        return self.connection.process_exit

    def told(self) -> str:
        """For messages."""
        connection = self.connection
        if connection is None:
            return "nothing was started"
        written = "\n".join(
            path.read_text()[-3000:] for path in connection.folder.glob("experiment.*")
        )
        return f"{connection.process_exit} {connection.status} {connection.usage}\n{written}"

    def close(self) -> None:
        """End the experiment's process, and give the farm back."""
        if self.connection is not None and self.connection.process_exit is None:
            self.connection.kill()
            self.ends()
        self._forkservers.close()
        self.transport.close(now=True)
        self.lease.close()


def main(url: str, job_file: str, folder: str) -> None:
    """Run the experiment until it ends."""
    job = msgspec.json.decode(Path(job_file).read_bytes(), type=r.ExperimentJob)
    before = read_record(str(Path(job.results, job.name)))
    earlier = before.events_key if before is not None else ""
    supervisor = RelaySupervisor(url, earlier)
    supervisor.start(msgspec.structs.replace(job, events_key=earlier), Path(folder))
    print(supervisor.ends(within=120.0), flush=True)
    supervisor.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
