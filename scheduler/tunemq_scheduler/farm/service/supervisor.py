"""`Supervisor`: a farm's scheduler service: nodes, queue, offers, and a process per experiment.

It has one thread and one loop. It holds the farm's keys and runs no user code, so an experiment's
code can harm only its own process.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from tunemq_scheduler.api.farm_answer_types import ExperimentState
from tunemq_scheduler.base.lease_holder import LeaseHolder
from tunemq_scheduler.farm.allocation.fair_share_allocator import FairShareAllocator
from tunemq_scheduler.farm.common.scheduler_lease import SchedulerLease
from tunemq_scheduler.farm.common.small_files import make_folder
from tunemq_scheduler.farm.farm_settings import FarmSettings
from tunemq_scheduler.farm.ipc import ipc_messages as r
from tunemq_scheduler.farm.ipc.experiment_processes import ExperimentForkservers
from tunemq_scheduler.farm.ipc.supervisor_side import ExperimentConnection
from tunemq_scheduler.farm.monitoring.farm_announcement import announcing, described
from tunemq_scheduler.farm.monitoring.metrics_snapshot import FarmSnapshot, TurnTimes
from tunemq_scheduler.farm.output.trial_output_collector import OutputReader
from tunemq_scheduler.farm.service.done_requests import DoneRequests
from tunemq_scheduler.farm.service.experiment_files import ResultsFolders
from tunemq_scheduler.farm.service.experiment_queue import ExperimentQueue
from tunemq_scheduler.farm.service.farm_api import FarmApi
from tunemq_scheduler.farm.service.farm_nodes import FarmNodes
from tunemq_scheduler.farm.service.queue_entry import QueueEntry
from tunemq_scheduler.farm.service.request_server import RequestServer
from tunemq_scheduler.farm.service.running_experiments import RunningExperiments
from tunemq_scheduler.farm.service.take_over import LostSearch, is_running
from tunemq_scheduler.storage.folders import OWN_FOLDER
from tunemq_scheduler.transport.node_transport import NodeTransport
from tunemq_scheduler.transport.scheduler_signing import SchedulerSigning
from tunemq_shared.base.errors import JournalFull, RedisUnavailable, TransportError
from tunemq_shared.objects.allowed_stores import StorePermissions, store_environ
from tunemq_shared.objects.store_address import is_remote, join
from tunemq_shared.objects.store_traffic import TRAFFIC
from tunemq_shared.signing.live_keys import LiveKeys

#: The interval of periodic work, and the longest that the loop waits.
_BEAT_S: Final = 1.0
#: How long processes get to end when the service ends.
_LEAVE_GRACE_S: Final = 5.0


class FarmConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A farm's configuration, as its service was started.

    Attributes:
        url: the Redis address; ``address`` is the same without the password.
        results: the folder of all experiments.
        store: the store of code and checkpoints, which all nodes reach.
        journal_release: when nodes may forget their events; see
            `tunemq_scheduler.cli.scheduler_command`.
        settings: how the farm is shared.
        keys: the keys by which the scheduler, nodes and submitters verify each other.
        lost: searches of a lost machine, by name; they continue from their copies when they are
            submitted again.
    """

    url: str
    address: str
    results: str
    store: str
    journal_release: str = "local"
    settings: FarmSettings = FarmSettings()
    keys: LiveKeys = msgspec.field(default_factory=LiveKeys.none)
    lost: dict[str, LostSearch] = {}

    def __repr__(self) -> str:
        """Hide the password."""
        return f"FarmConfig({self.address!r})"

    def store_rules(self, owner: str) -> StorePermissions:
        """Return the stores that this owner's submitted searches may use."""
        own = (self.store,) if is_remote(self.store) else ()
        return StorePermissions((*own, *self.settings.stores_of(owner)), store_environ(os.environ))


class Supervisor:
    """Serves a farm until `stop`.

    Args:
        farm: the farm's configuration.
        lease: the farm's lease, which this process holds.
        me: this process, as the lease names it.
        tell: shows a line to the person at the terminal.
        publish: receives a snapshot of the farm once a second; None if it is not used.
    """

    def __init__(
        self,
        farm: FarmConfig,
        lease: SchedulerLease,
        me: LeaseHolder,
        tell: Callable[[str], None],
        publish: Callable[[FarmSnapshot], None] | None = None,
    ) -> None:
        self._publish, self._turns = publish, TurnTimes()
        self._farm, self._lease, self._tell = farm, lease, tell
        folder = Path(farm.results, OWN_FOLDER)
        make_folder(folder)
        self._folder = folder
        ids = {one.name: one.id for one in farm.lost.values()}
        self._queue = ExperimentQueue(folder / "experiments", ids=ids)
        for line in self._queue.damaged:
            tell(line)
        self._allocator = FairShareAllocator(farm.settings)
        self._forkservers = ExperimentForkservers(farm.store)
        self._experiments = RunningExperiments(
            folder,
            self._queue,
            self._allocator,
            self._start_connection,
            end_trial_processes=self._end_trial_processes,
            folders=ResultsFolders(Path(farm.results), folder / "trash", farm.store),
            max_running=farm.settings.max_running,
            pause_grace_s=farm.settings.preempt_grace_s,
            unresponsive_after_s=farm.settings.unresponsive_after_s,
            notices=tell,
        )
        for one in farm.lost.values():
            if is_running(farm.url, one):
                self._experiments.expect(one.name, one.events_key, has_ended=one.has_ended)
        self._transport = NodeTransport(
            farm.url,
            term=lease.term,
            guard=lease,
            absent=self._experiments.streams.values(),
            keys=farm.keys,
            store=farm.store if is_remote(farm.store) else "",
        )
        self._nodes = FarmNodes(folder / "nodes.json", self._transport, self._allocator)
        known = described(farm.store, str(me), farm.results)
        self._api = FarmApi(self._queue, self._experiments, self._nodes, Path(farm.results), known)
        done = DoneRequests(folder / "requests")
        self._server = RequestServer(
            farm.url, self._api, done, lambda: lease.term, farm.keys, self._transport.rejections.add
        )
        self._announcement = announcing(lease.term)
        self._output = self._output_reader() if is_remote(farm.store) else None
        self._followed: Mapping[str, str] | None = None
        self._beat_at = float("-inf")
        self._is_full = False
        self._stop_reason = ""

    def stop(self, reason: str) -> None:
        """Make `serve` return soon; also for signal handlers."""
        self._stop_reason = reason
        self._transport.wake()

    def serve(self) -> None:
        """Serve until `stop`; trials keep running afterwards.

        Raises:
            SchedulerSuperseded: another scheduler took over the farm.
            RedisUnavailable: Redis cannot be reached at the start.
            JournalError: the disk rejects a write that must not be lost.
        """
        self._transport.open()
        try:
            if self._output is not None:
                self._output.start()
            self._forkservers.prepare()
            self._experiments.take_up()
            self._tell_start()
            while not self._stop_reason:
                self._turn()
            self._tell(f"{self._stop_reason}: trials continue, and wait for the next scheduler.")
        finally:
            self._leave()

    # --- one turn ---------------------------------------------------------------------------------

    def _turn(self) -> None:
        with selectors.EpollSelector() as ready:
            for connection in self._experiments.connections():
                if connection.is_readable:
                    write = selectors.EVENT_WRITE if connection.wants_write else 0
                    ready.register(connection, selectors.EVENT_READ | write, connection)
                ready.register(connection.watched, selectors.EVENT_READ)
            if (requests := self._server.fileno()) is not None:
                ready.register(requests, selectors.EVENT_READ)
            self._transport.poll(self._pause(), also=(ready.fileno(),))
            began = time.monotonic()
            for key, _ in ready.select(0):
                if key.data is not None:
                    key.data.on_readable()
        now = time.monotonic()
        self._allocator.advance(now)
        self._experiments.forget_nodes(self._nodes.turn())
        with contextlib.suppress(RedisUnavailable):  # the transport reports it
            self._server.turn()
        self._api.turn()
        self._experiments.turn()
        self._experiments.offer()
        self._transport.send()
        self._follow_output()
        if now >= self._beat_at + _BEAT_S:
            self._beat(now)
        for line in self._transport.notices():
            self._tell(line)
        self._turns.add(time.monotonic() - began)

    def _pause(self) -> float:
        now = time.monotonic()
        due = min(self._beat_at + _BEAT_S, self._experiments.next_due or float("inf"))
        return min(max(due - now, 0.0), _BEAT_S)

    def _beat(self, now: float) -> None:
        self._beat_at = now
        if line := self._farm.keys.look():
            self._tell(line)
        self._experiments.beat(self._lease.proven_at)
        self._save()
        self._forkservers.close_unused()
        notes = self._transport.notes()
        for connection in self._experiments.connections():
            connection.tell(notes)
        with contextlib.suppress(TransportError):
            self._transport.announce(self._announcement)
        if self._publish is not None:
            self._publish(self._snapshot())

    def _save(self) -> None:
        """Write changes for which the disk had no space; report the problem and its end once."""
        try:
            self._experiments.save()
            self._server.save()
        except JournalFull as full:
            if not self._is_full:
                self._tell(
                    f"degraded: {full} Nothing is lost: searches wait, requests that change the "
                    "farm are refused, and all continues once the disk accepts writes."
                )
            self._is_full = True
        else:
            if self._is_full:
                self._tell("the scheduler's files can be written again, and are complete.")
            self._is_full = False

    def _follow_output(self) -> None:
        streams = self._experiments.streams
        if self._output is not None and streams is not self._followed:
            self._followed = streams
            results = Path(self._farm.results)
            self._output.follow({name: (results / name, key) for name, key in streams.items()})

    def _output_reader(self) -> OutputReader:
        signing = SchedulerSigning(self._farm.keys, self._transport.rejections)
        return OutputReader(self._farm.url, self._tell, signing.output, signing.rejected.add)

    def _snapshot(self) -> FarmSnapshot:
        return FarmSnapshot(
            at=time.time(),
            experiments={state: len(self._queue.in_state(state)) for state in ExperimentState},
            trials=self._experiments.trials(),
            troubles=self._experiments.troubles(),
            waiting=self._allocator.explainer.waiting(),
            results=self._experiments.results,
            turns=self._turns.so_far(),
            is_redis_away=self._transport.is_away,
            redis_full_s=self._transport.full_s,
            nodes=self._nodes.states(),
            accounts=tuple(self._allocator.explainer.accounts()),
            rejected=self._nodes.rejected(),
            traffic=TRAFFIC.so_far().plus(self._experiments.traffic),
            store_uses=self._experiments.store_uses(),
        )

    # --- experiments ------------------------------------------------------------------------------

    def _start_connection(self, entry: QueueEntry, events_key: str) -> ExperimentConnection:
        farm, settings = self._farm, entry.settings
        lost = farm.lost.get(entry.name)
        job = r.ExperimentJob(
            name=entry.name,
            results=farm.results,
            code=entry.code,
            term=self._lease.term,
            prefix=entry.id,
            store=join(farm.store, entry.name) if is_remote(farm.store) else "",
            code_store=farm.store,
            folder_for_code=str(self._folder / "code"),
            python=settings.python,
            variables=settings.variables,
            preload=settings.preload,
            events_key=events_key,
            retry=entry.retry,
            take_over=lost.address if lost is not None and lost.id == entry.id else "",
            journal_release=farm.journal_release,
            journal_keys=farm.keys.journal_keys(entry.name),
            stores=farm.store_rules(entry.owner),
        )
        folder = Path(farm.results, entry.name)
        return ExperimentConnection(
            job,
            self._transport,
            folder=folder,
            begin=self._forkservers.start,
            exit_within_s=farm.settings.unresponsive_after_s,
        )

    def _end_trial_processes(self, events_key: str) -> None:
        self._transport.add(events_key).close()

    # --- beginning and end ------------------------------------------------------------------------

    def _tell_start(self) -> None:
        waiting, running = len(self._queue.waiting()), len(self._experiments)
        self._tell(
            f"Serving the farm on {self._farm.address}; results in {self._farm.results}, code and"
            f" checkpoints in {self._farm.store}. {running} experiments run, {waiting} wait."
        )

    def _leave(self) -> None:
        self._experiments.leave(_LEAVE_GRACE_S)
        deadline = time.monotonic() + _LEAVE_GRACE_S
        for connection in list(self._experiments.connections()):
            left = max(0.0, deadline - time.monotonic())
            if connection.watched < 0:  # it has ended already
                continue
            with selectors.DefaultSelector() as ended:
                ended.register(connection.watched, selectors.EVENT_READ)
                if not ended.select(left):
                    connection.kill()
        self._forkservers.close()
        self._server.close()
        if self._output is not None:
            self._output.close()
        self._transport.close(now=True)
