"""The main loop of a node: it owns the trial processes, the outboxes and the state of Redis.

The loop handles three kinds of input: commands from the consumer, events from the sockets of trial
processes, and reports of the event publisher about Redis. After each round it hands new events to
the publisher, one batch per stream at a time. While a batch is on its way, the next one grows: a
single event leaves at once, and many events travel in large batches.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple

import msgspec

from tunemq_shared.base.backoff import backoff_s
from tunemq_shared.base.failpoints import failpoint
from tunemq_shared.broker.redis_address import RedisAddress
from tunemq_shared.broker.redis_keys import STARTED_AGAIN
from tunemq_shared.protocol.message_limits import LINE_CHARACTERS
from tunemq_shared.protocol.messages import PROTOCOL_VERSION, NodeWarned, TrialSpec, encode
from tunemq_shared.protocol.registration import BatchHeader, NodeRegistration
from tunemq_workers.broker import publisher_messages
from tunemq_workers.broker.consumer_supervisor import ConsumerProcess
from tunemq_workers.broker.event_publisher import EventPublisher
from tunemq_workers.broker.node_signing import NodeSigning
from tunemq_workers.broker.outbox import BLOCK_BYTES, MemoryBudget
from tunemq_workers.broker.outbox_spool import Spool
from tunemq_workers.broker.outboxes import Outboxes
from tunemq_workers.checkpoints.checkpoint_cache import CacheLimits
from tunemq_workers.checkpoints.trial_checkpoint_requests import CheckpointRequests
from tunemq_workers.forkservers.forkserver_pool import ForkserverPool
from tunemq_workers.gpu.gpu_availability import GpuAvailability
from tunemq_workers.gpu.gpu_meter import GpuMeter
from tunemq_workers.logs.failure_output import FailureOutput
from tunemq_workers.logs.log_policy_search import LogWatch
from tunemq_workers.logs.output_caps import OutputCaps
from tunemq_workers.node.key_mismatch import KeyWatch
from tunemq_workers.node.worker_exit_codes import EXIT_BROKEN, EXIT_FENCED, EXIT_REPLACED
from tunemq_workers.node.worker_health import WorkerHealth
from tunemq_workers.processes.child_process import LOGS, ChildProcess
from tunemq_workers.runtime.disk_jobs import DiskJobs
from tunemq_workers.runtime.reactor import Reactor, Timer, cancel
from tunemq_workers.runtime.trial_process_state import AttemptId
from tunemq_workers.system.node_metrics_collector import MachineWatch
from tunemq_workers.transfers.transfer_client import TransferClient
from tunemq_workers.trials.assignment_filter import AssignmentFilter
from tunemq_workers.trials.dependencies import DependencyFetcher
from tunemq_workers.trials.trial_folder_uploads import TrialFiles
from tunemq_workers.trials.trial_supervisor import TrialSupervisor

#: For this long after Redis is empty, the publisher checks often for a scheduler that may start.
_EXPECTING_S: Final = 5.0
#: Shortest and longest delay after which the node restarts its consumer, when the scheduler
#: announced an assignment that did not arrive.
_OVERDUE_S: Final = (2.0, 60.0)
#: At the end: the most time for process trees to exit and the last events to be sent, then for the
#: deregistration, which takes milliseconds if Redis answers.
_ENDING_S: Final = 3.0
_DEREGISTER_S: Final = 5.0

_log = logging.getLogger(__name__)


class _RegistrationState(NamedTuple):
    """A node's registration, and the generation of Redis to which it was sent."""

    generation: bytes
    registration: NodeRegistration


class _RedisState(msgspec.Struct):
    """What the node knows about Redis."""

    is_up: bool = True
    generation: bytes | None = None
    #: When this generation was first seen, by the monotonic clock.
    since: float = msgspec.field(default_factory=time.monotonic)
    #: The last registration that succeeded, and the one on its way.
    registered: _RegistrationState | None = None
    introducing: _RegistrationState | None = None


class NodeLoop:
    """Runs a node until it is stopped; `run` returns the exit code.

    Args:
        instance_id: names this start of the node.
        registration: the node's first message to schedulers.
        redis: the address of Redis.
        reactor: the event loop, not running yet.
        disk: runs slow disk jobs.
        transfers: uploads and downloads.
        forkservers: starts and ends trial processes.
        folder: the node's working folder, an absolute path.
        cache: parent of the folders for checkpoints of experiments that name none.
        limits: limits for all checkpoints in caches together.
        variables: the node's environment variables that trials get.
        children: the pids of the node's child processes; this loop adds its own.
        start_scanner: starts a log scanner.
        start_consumers: starts a forkserver for consumers.
        consumers: the first such forkserver, already running.
        signing: signs messages to the scheduler and checks messages from it.
        lost_after_s: trials save and end when no scheduler answered for this long, in seconds.
        grace_s: how long trials get to save and end when the node is retired, in seconds.
        availability: decides which GPUs may be used.
        meter: measures how trials use GPUs.
        watch: publishes node metrics; None on an embedded farm.
        health: reports the node's health to a service manager.
    """

    def __init__(
        self,
        *,
        instance_id: str,
        registration: NodeRegistration,
        redis: RedisAddress,
        reactor: Reactor,
        disk: DiskJobs,
        transfers: TransferClient,
        forkservers: ForkserverPool,
        folder: str,
        cache: str,
        limits: CacheLimits,
        variables: Mapping[str, str],
        children: set[int],
        start_scanner: Callable[[], ChildProcess],
        start_consumers: Callable[[], ChildProcess],
        consumers: ChildProcess,
        signing: NodeSigning,
        lost_after_s: float,
        grace_s: float,
        availability: GpuAvailability,
        meter: GpuMeter,
        watch: MachineWatch | None,
        health: WorkerHealth,
    ) -> None:
        self._instance_id, self._registration = instance_id, registration
        self._reactor, self._forkservers, self._transfers = reactor, forkservers, transfers
        self._watch, self._health = watch, health
        self._publisher = EventPublisher(
            redis,
            instance_id,
            lambda report: reactor.post(partial(self._heard, report)),
            None if watch is None else watch.said,
            signing,
        )
        self._keys = KeyWatch(signing)
        self._outboxes = Outboxes(
            MemoryBudget(Spool(os.path.join(folder, LOGS))),
            reactor,
            order=self._publisher.order,
            header=self._header,
        )
        emit = self._outboxes.add
        self._checkpoints = CheckpointRequests(
            reactor, disk, transfers, emit, folder=cache, limits=limits
        )
        self._dependencies = DependencyFetcher(disk, transfers, folder, variables, limits)
        self._files = TrialFiles(
            reactor,
            disk,
            transfers,
            emit,
            send=self._publisher.order,
            may_send=self._has_time,
            folder=folder,
            node=registration.node,
            limits=limits,
        )
        self._logs = LogWatch(
            reactor, start=start_scanner, children=children, emit=emit, warn=self._warn
        )
        self._failure_output = FailureOutput(self._logs.emit)
        self._supervisor = supervisor = TrialSupervisor(
            reactor,
            forkservers,
            self._checkpoints,
            self._dependencies,
            self._failure_output.emit,
            emit,
            availability,
            meter,
        )
        for part in (self._logs, self._failure_output, self._files):
            part.running_trials = supervisor.running_trials
        supervisor.on_left = self._files.left
        availability.on_withheld, availability.on_warning = self._withhold, self._warn
        forkservers.on_warning = self._warn
        disk.on_late = self._warn_all
        self._caps = OutputCaps(reactor, self._supervisor.folders)
        self._supervisor.on_cut_off = self._tidy_after
        self._commands = AssignmentFilter(instance_id, signing, self._supervisor.reject)
        self._tried_store = ""
        self._redis_state = _RedisState()
        self._full = frozenset[str]()
        self._announced = (0, 0)
        self._overdue: Timer | None = None
        self._overdue_in_a_row = 0
        self._ending: Timer | None = None
        self._has_deregistered = False
        self._exit_code = 0
        self._has_heard = False
        self._lost_after_s, self._grace_s = lost_after_s, grace_s
        self._silence: Timer | None = None
        #: The generation of Redis in which the log said that this node is ready.
        self._ready_in: bytes | None = None
        #: Whether a scheduler ever held a lease, and whether trials were ended for lack of one.
        self._had_scheduler = self._has_given_up = False
        self._consumer = ConsumerProcess(
            reactor,
            start_consumers,
            consumers,
            children,
            on_ready=self._consumer_is_ready,
            on_command=self._obey,
            on_rejected=partial(signing.reject_command, why="is no task of ours"),
            on_death=self._consumer_died,
            on_failing=partial(self.stop, exit_code=EXIT_BROKEN, grace_s=grace_s),
        )

    def run(self) -> int:
        """Serve until `stop` or `abandon`, and return the exit code."""
        self._publisher.start()
        self._caps.start()
        self._checkpoints.start()
        self._dependencies.start()
        self._files.start()
        self._health.start(lambda: len(self._supervisor))
        self._reactor.run(self._after_round)
        self._consumer.close()
        self._logs.close()
        self._failure_output.close()
        self._checkpoints.close()
        if self._ending is not None:
            self._forkservers.close()
        return self._exit_code

    def stop(self, reason: str, exit_code: int = 0, *, grace_s: float = 0.0) -> None:
        """End the trial processes, send their events, deregister and end; further calls do nothing.

        Uploads that are not complete by then are given up: the scheduler drops them with this node.

        Args:
            reason: for the log.
            exit_code: what `run` returns.
            grace_s: how long trials get to save and end by themselves, and uploads to complete, in
                seconds.
        """
        if self._ending is None:
            trial_processes = len(self._supervisor)
            if exit_code != EXIT_FENCED:  # a fenced node restarts as another instance
                self._health.stopping()
            _log.info(
                "node.stopping reason=%s trials=%d grace=%s", reason, trial_processes, grace_s
            )
            self._exit_code = exit_code
            self._outboxes.send_last()
            if not exit_code:
                # Early: trials that end must not start again here. A node that fails says nothing,
                # because one of its trials may be the cause.
                self._register_anew(is_ending=True)
            # In the first half trials end at a checkpoint, so that no step is repeated; the rest
            # end at their next result.
            self._supervisor.leave(at_checkpoint=grace_s > 0)
            self._reactor.after(grace_s / 2, self._supervisor.leave)
            self._ending = self._reactor.after(grace_s, self._end_trial_processes)
            if not grace_s:
                self._end_trial_processes()

    def _end_trial_processes(self) -> None:
        """Kill the trial processes that are left after the grace, and send their events."""
        cancel(self._ending)
        if self._supervisor:
            _log.info("node.ending trials=%d", len(self._supervisor))
        self._supervisor.kill_all()
        self._checkpoints.close()
        self._files.close()
        # A failure event that waits for the trial's output has to leave before the deregistration.
        self._reactor.after(_ENDING_S / 2, self._logs.hold_no_more)
        self._ending = self._reactor.after(_ENDING_S, self._deregister)

    def abandon(self, reason: str, exit_code: int = 0) -> None:
        """End at once, without a deregistration; the forkservers then kill all trial processes."""
        _log.info("node.abandoned reason=%r trials=%d", reason, len(self._supervisor))
        self._exit_code = exit_code
        self._reactor.stop()

    def _deregister(self) -> None:
        if not self._has_deregistered:
            self._has_deregistered = True
            self._publisher.order(publisher_messages.Deregister())
            self._publisher.join(_DEREGISTER_S)
            if left := self._outboxes.left:
                _log.warning("node.reports_dropped size=%d", left)
            _log.info("node.ended")
            self._reactor.stop()

    def _tidy_after(self, trial: AttemptId, start: TrialSpec) -> None:
        """Do what a trial process that was killed could not do itself."""
        self._caps.look_at(start.folder)
        self._files.cut_off(trial, start)

    def _withhold(self, devices: dict[str, str]) -> None:
        """Register again, with these GPUs (UUID to reason) withheld from trials."""
        devices = {uuid: why[:LINE_CHARACTERS] for uuid, why in devices.items()}
        self._register_anew(withheld=devices)

    def _register_anew(self, **changes: object) -> None:
        number = self._registration.number + 1
        self._registration = msgspec.structs.replace(self._registration, number=number, **changes)
        self._register()

    def _warn(self, events_key: str, text: str) -> None:
        self._outboxes.add(events_key, encode(NodeWarned(text)))

    def _warn_all(self, text: str) -> None:
        for events_key in {start.events_key for _, start in self._supervisor.running_trials()}:
            self._warn(events_key, text)

    # --- commands -------------------------------------------------------------------------------

    def _consumer_is_ready(self) -> None:
        self._has_heard = True
        self._register()

    def _consumer_died(self) -> None:
        # The next consumer waits for Redis if that is away. The lease reply shows which assignments
        # this one missed.
        if self._ending is None:
            self._consumer.start_if_none()
        self._publisher.order(publisher_messages.RenewLeaseNow())

    def _obey(self, message: bytes) -> None:
        term_before, _ = self._commands.confirmed
        assignment = self._commands.open(message)
        if assignment is None or self._ending is not None:
            return
        self._publisher.confirmed = self._commands.confirmed
        if assignment.term > term_before or self._redis_state.generation is None:
            # A new scheduler runs; Redis may have been reset before it started.
            self._publisher.order(publisher_messages.RenewLeaseNow())
        self._overdue_in_a_row = 0
        if assignment.store and assignment.store != self._tried_store:
            self._tried_store = assignment.store
            self._transfers.try_store(assignment.store)
        failpoint("orders.before_obey")
        self._supervisor.obey(assignment.orders, assignment.untouched)
        failpoint("orders.after_obey")
        self._expect_command()

    def _expect_command(self) -> None:
        """Restart the consumer if an announced assignment does not arrive in time."""
        if self._announced <= self._commands.confirmed:
            cancel(self._overdue)
            self._overdue = None
        elif self._overdue is None:
            delay_s = backoff_s(self._overdue_in_a_row, *_OVERDUE_S)
            self._overdue = self._reactor.after(delay_s, self._command_is_overdue)

    def _command_is_overdue(self) -> None:
        self._overdue = None
        if not self._consumer.is_ready:  # it is starting, and supervised
            self._expect_command()
            return
        self._overdue_in_a_row += 1
        self._consumer.restart(f"assignment {self._announced} was announced and did not come")

    # --- Redis ----------------------------------------------------------------------------------

    def _heard(self, report: publisher_messages.PublisherReport) -> None:
        self._publisher.reports_handled()
        redis_state = self._redis_state
        match report:
            case publisher_messages.LeaseReply():
                self._seen(report)
            case publisher_messages.Registered():
                redis_state.registered, redis_state.introducing = redis_state.introducing, None
                self._say_ready()
                self._register()
            case publisher_messages.RegistrationFailed():
                redis_state.introducing = None  # the next lease reply tries again
            case publisher_messages.BatchesAppended(key):
                self._outboxes.appended(key)
            case publisher_messages.OutputSent():
                self._files.output_sent()
            case publisher_messages.AppendFailed(key, reason):
                self._outboxes.not_appended(key, reason)
                if redis_state.is_up:  # Redis may have another generation
                    self._publisher.order(publisher_messages.RenewLeaseNow())
            case publisher_messages.RedisLost(reason):
                _log.warning("redis.unreachable reason=%r", reason)
                redis_state.is_up, redis_state.introducing = False, None
                self._consumer.redis_is_away()
                self._heed(is_heard=False)

    def _seen(self, seen: publisher_messages.LeaseReply) -> None:
        self._health.confirmed(has_scheduler=seen.has_scheduler)
        redis_state = self._redis_state
        if seen.generation != redis_state.generation:
            _log.info("redis.generation old=%s new=%s", redis_state.generation, seen.generation)
            redis_state.generation, redis_state.since = seen.generation, time.monotonic()
            # Events sent in the generation before may be lost with it.
            self._outboxes.rewind()
        if self._keys.look(has_scheduler=seen.has_scheduler, signs=seen.signs):
            # Entries in Redis may be signed with a key that expires soon.
            self._outboxes.rewind()
            redis_state.registered = None
        self._say_ready()
        # Without a generation, missing streams mean nothing.
        missing = frozenset[str]() if seen.generation is None else seen.missing
        forged = self._outboxes.acknowledge(seen.acknowledged_up_to, missing)
        unsettled = self._checkpoints.unsettled() | self._files.unsettled()
        used = self._supervisor.events_keys() | unsettled
        lost = self._outboxes.lost
        for key in self._checkpoints.forget_all_but(used, seen.acknowledged_up_to, lost):
            self._publisher.order(publisher_messages.ForgetStream(key))
        self._outboxes.forget_all_but(used)
        was_up, redis_state.is_up = redis_state.is_up, True
        if self._ending is not None:
            self._register()
            return
        self._had_scheduler |= seen.has_scheduler
        is_served = seen.has_scheduler or not self._had_scheduler
        self._heed(is_heard=is_served and seen.generation is not None)
        if was_up:
            self._consumer.start_if_none()
        else:
            _log.info("redis.back")
            self._consumer.redis_is_back()
        self._register()
        self._announced = seen.announced
        self._expect_command()
        if seen.fenced:
            _log.warning("node.fenced reason=%s", seen.fenced)
            is_replaced = seen.fenced == STARTED_AGAIN
            self.stop("fenced", EXIT_REPLACED if is_replaced else EXIT_FENCED)
        elif forged is not None:
            _log.error("node.impersonated stream=%s", forged)
            self.stop("impersonated", EXIT_FENCED)
        elif seen.retired:
            _log.info("node.retired reason=%s", seen.retired)
            self.stop("retired", grace_s=self._grace_s)

    def _heed(self, *, is_heard: bool) -> None:
        """End trials when no scheduler answers for too long; start them again when one does."""
        if is_heard:
            if self._silence is not None:
                self._silence.cancel()
                self._silence = None
            if self._has_given_up:
                _log.info("node.heard_again")
                self._has_given_up = False
                self._supervisor.go_on()
        elif self._silence is None:
            self._silence = self._reactor.after(self._lost_after_s, self._give_up)

    def _give_up(self) -> None:
        if self._ending is None:
            trial_processes, silence_s = len(self._supervisor), self._lost_after_s
            _log.warning("node.given_up trials=%d silence=%s", trial_processes, silence_s)
            self._has_given_up = True
            self._supervisor.give_up()

    def _say_ready(self) -> None:
        """Log, once per generation, that the node is registered and that both sides' keys agree."""
        registered = self._redis_state.registered
        if registered is None or not self._keys.agrees:
            return
        if registered.generation != self._ready_in:
            self._ready_in = registered.generation
            _log.info("node.introduced generation=%s", registered.generation)

    def _register(self) -> None:
        """Register with Redis: once per generation, and when the registration changed.

        Waits until a consumer is ready, so that the node can receive the scheduler's answer.
        """
        redis_state = self._redis_state
        if not (self._has_heard and redis_state.is_up and redis_state.generation is not None):
            return
        under_way = redis_state.introducing
        due = _RegistrationState(redis_state.generation, self._registration)
        is_under_way = under_way is not None and under_way.generation == due.generation
        if redis_state.registered != due and not is_under_way:  # one at a time
            redis_state.introducing = due
            self._publisher.order(publisher_messages.Register(encode(self._registration)))

    # --- after each round -----------------------------------------------------------------------

    def _after_round(self) -> None:
        self._send()
        if (watch := self._watch) is not None:
            watch.trial_processes, watch.outbox = len(self._supervisor), self._outboxes.size
            watch.cache, watch.store = self._checkpoints.size, self._checkpoints.traffic
        outboxes, redis_state = self._outboxes, self._redis_state
        if (full := outboxes.full) != self._full:
            self._full = full
            self._supervisor.hold(full)
        kept = self._checkpoints.kept
        self._publisher.keys = tuple({*outboxes.keys, *kept}) if kept else outboxes.keys
        is_expecting = (
            redis_state.generation is None and time.monotonic() < redis_state.since + _EXPECTING_S
        )
        was_hurried = self._publisher.is_hurried
        self._publisher.is_hurried = is_hurried = outboxes.size > BLOCK_BYTES or is_expecting
        if is_hurried and not was_hurried:  # the publisher may just have begun a long wait
            self._publisher.order(publisher_messages.RenewLeaseNow())
        is_settled = outboxes.is_settled or not redis_state.is_up
        unsettled = self._checkpoints.unsettled() | self._files.unsettled()
        is_alone = not self._supervisor and not unsettled and not self._logs.is_holding
        if self._ending is not None and is_alone and is_settled:
            self._ending.cancel()
            self._deregister()

    def _send(self) -> None:
        """Hand new events to the publisher if the node is registered in Redis."""
        is_up, generation = self._redis_state.is_up, self._redis_state.generation
        registered = self._redis_state.registered
        if is_up and registered is not None and registered.generation == generation:
            self._outboxes.send(registered.generation)

    def _has_time(self) -> bool:
        """Return whether the publisher has room for output, which is less urgent than events."""
        return self._redis_state.is_up and self._outboxes.unsent <= BLOCK_BYTES

    def _header(self, first: int) -> bytes:
        confirmed = self._commands.confirmed
        return encode(BatchHeader(PROTOCOL_VERSION, self._instance_id, first, confirmed))
