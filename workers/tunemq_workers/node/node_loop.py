"""A node: one loop that owns the hosts, the outbox and what is known of the wire.

Three things bring work: the consumer (mail), the hosts' sockets (events), the pump (facts about
Redis). After each round the outboxes' news go to the pump, each stream's if none of it is under
way: while a batch is under way the next one grows, so a lone event waits for nothing and a flood
travels in large pieces.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import msgspec

from tunemq_shared.base.backoff import backoff_s
from tunemq_shared.base.failpoints import failpoint
from tunemq_shared.broker.redis_address import RedisAddress
from tunemq_shared.broker.redis_keys import STARTED_AGAIN
from tunemq_shared.health.service_health import ServiceHealth
from tunemq_shared.protocol.message_limits import LINE_CHARACTERS
from tunemq_shared.protocol.messages import PROTOCOL_VERSION, NodeWarned, encode
from tunemq_shared.protocol.registration import BatchHeader, NodeRegistration
from tunemq_workers.broker.consumer_process import ConsumerProcess
from tunemq_workers.broker.event_publisher import EventPublisher
from tunemq_workers.broker.memory_budget import BLOCK_BYTES, MemoryBudget
from tunemq_workers.broker.node_signing import NodeSigning
from tunemq_workers.broker.outboxes import Outboxes
from tunemq_workers.broker.publisher_messages import (
    AppendFailed,
    BatchesAppended,
    Deregister,
    ForgetStream,
    LeaseReply,
    OutputSent,
    PublisherReport,
    RedisLost,
    Register,
    Registered,
    RegistrationFailed,
    RenewLeaseNow,
    SendOutput,
)
from tunemq_workers.checkpoints.checkpoint_requests import CheckpointRequests
from tunemq_workers.gpu.gpu_availability import GpuAvailability
from tunemq_workers.gpu.gpu_meter import GpuMeter
from tunemq_workers.logs.failure_output import FailureOutput
from tunemq_workers.logs.log_watch import LogWatch
from tunemq_workers.logs.output_caps import OutputCaps
from tunemq_workers.node.key_watch import KeyWatch
from tunemq_workers.node.worker_exit_codes import EXIT_FENCED, EXIT_REPLACED
from tunemq_workers.node.worker_health import WorkerHealth
from tunemq_workers.processes.child_process import ChildProcess
from tunemq_workers.runtime.checkpoint_interfaces import Emit
from tunemq_workers.runtime.reactor import Reactor, Timer
from tunemq_workers.runtime.trial_process_interfaces import TrialProcessLauncher
from tunemq_workers.system.machine_watch import MachineWatch
from tunemq_workers.trials.command_queue import CommandQueue
from tunemq_workers.trials.dependencies import DependencyFetcher
from tunemq_workers.trials.trial_files import TrialFiles
from tunemq_workers.trials.trial_supervisor import TrialSupervisor

#: Until then the pump looks often for a scheduler that is about to start.
_EXPECTING_S: Final = 5.0
#: An assignment that the scheduler announces and that does not come for so long: the consumer is
#: deaf.
_OVERDUE_S: Final = (2.0, 60.0)
#: At the end: for the families to go and the last events to be sent, then for the deregistration,
#: which takes a Redis that answers milliseconds.
_ENDING_S: Final = 3.0
_DEREGISTER_S: Final = 5.0

_log = logging.getLogger(__name__)


class _RegistrationState(NamedTuple):
    """In which generation of Redis a node said what of itself."""

    generation: bytes
    registration: NodeRegistration


@dataclass(slots=True)
class _RedisState:
    """What is known of Redis."""

    is_up: bool = True
    generation: bytes | None = None
    #: Since when the generation is what it is, by the monotonic clock.
    since: float = field(default_factory=time.monotonic)
    #: How this node was introduced last, and is being.
    registered: _RegistrationState | None = None
    introducing: _RegistrationState | None = None


class NodeLoop:
    """Runs a node until it is told to stop; `run` returns the exit code.

    Args:
        instance: this node's.
        hello: as which it is introduced.
        redis: where Redis is.
        reactor: not running yet.
        room: for what is not journalled yet.
        forkservers: what starts hosts.
        make_checkpoints: makes what cares for their checkpoints; takes what takes its events.
        luggage: gets what hosts need to start.
        make_files: makes what cares for their folders; takes what takes its events, and its pieces
            of output, and what says whether these may be sent.
        make_logs: makes what looks at what they print; takes what takes its events, and warnings.
        children: the pids of the node's own children; the consumers' forkserver's is kept there.
        start_consumers: starts a forkserver of consumers.
        consumers: one that was started already.
        lost_after_s: hosts save and end when no scheduler was heard for so long.
        grace_s: how long they get to do so when somebody has the node retire.
        watch: says how the machine is, where somebody may want to know.
        watchdog: knows the GPUs, where this node knows them one by one.
        meter: adds up what is used of them.
        seals: for what goes to the scheduler, and what comes from it.
        health: says how the node is to whoever looks after it.
    """

    def __init__(
        self,
        *,
        instance_id: str,
        registration: NodeRegistration,
        redis: RedisAddress,
        reactor: Reactor,
        budget: MemoryBudget,
        forkservers: TrialProcessLauncher,
        make_checkpoints: Callable[[Emit], CheckpointRequests],
        dependencies: DependencyFetcher,
        make_files: Callable[[Emit, Callable[[SendOutput], None], Callable[[], bool]], TrialFiles],
        make_logs: Callable[[Emit, Callable[[str, str], None]], LogWatch],
        children: set[int],
        start_consumers: Callable[[], ChildProcess],
        consumers: ChildProcess,
        signing: NodeSigning,
        lost_after_s: float,
        grace_s: float,
        watch: MachineWatch | None = None,
        availability: GpuAvailability | None = None,
        meter: GpuMeter | None = None,
        health: WorkerHealth | None = None,
    ) -> None:
        self._instance_id, self._registration = instance_id, registration
        self._reactor, self._forkservers = reactor, forkservers
        self._watch = watch
        self._health = WorkerHealth(ServiceHealth("worker"), reactor) if health is None else health
        self._publisher = EventPublisher(
            redis,
            instance_id,
            lambda report: reactor.post(partial(self._heard, report)),
            None if watch is None else watch.said,
            signing,
        )
        self._keys = KeyWatch(signing)
        self._outboxes = Outboxes(budget, reactor, order=self._publisher.order, header=self._header)
        self._checkpoints = make_checkpoints(self._outboxes.add)
        self._dependencies = dependencies
        self._files = make_files(self._outboxes.add, self._publisher.order, self._has_time)
        self._logs = make_logs(self._outboxes.add, self._warn)
        self._failure_output = FailureOutput(self._logs.emit)
        emit = self._failure_output.emit
        self._supervisor = TrialSupervisor(
            reactor,
            forkservers,
            self._checkpoints,
            dependencies,
            emit,
            self._outboxes.add,
            availability=availability,
            meter=meter,
        )
        self._logs.running_trials = self._failure_output.running_trials = (
            self._supervisor.running_trials
        )
        if availability is not None:
            availability.on_withheld, availability.on_warning = self._withhold, self._warn
        self._files.running_trials, self._files.expected = (
            self._supervisor.running_trials,
            self._supervisor.expected,
        )
        self._supervisor.on_left = self._files.left
        forkservers.on_warning = self._warn
        self._caps = OutputCaps(reactor, self._supervisor.folders)
        self._supervisor.on_cut_off = self._caps.look_at
        self._commands = CommandQueue(instance_id, signing, self._supervisor.reject)
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
        #: The generation of the wire in which people were told that this node is ready.
        self._ready_in: bytes | None = None
        #: Whether there was ever a scheduler with a lease, and whether this one waits for another.
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
        )

    def run(self) -> int:
        """Serve until `stop` or `abandon`."""
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
        """End the hosts, send what they said, deregister, end; again is allowed.

        What is not uploaded by then is given up: the scheduler forgets it with this node.

        Args:
            reason: for the log.
            exit_code: what `run` returns.
            grace_s: how long hosts get to save and end by themselves, and uploads to be done.
        """
        if self._ending is None:
            trial_processes = len(self._supervisor)
            if exit_code != EXIT_FENCED:  # then the service goes on, as another attempt
                self._health.stopping()
            _log.info("node.stopping reason=%s hosts=%d grace=%s", reason, trial_processes, grace_s)
            self._exit_code = exit_code
            # What saves in the first half repeats nothing; the rest ends at its next result.
            self._supervisor.leave(at_checkpoint=grace_s > 0)
            self._reactor.after(grace_s / 2, self._supervisor.leave)
            self._ending = self._reactor.after(grace_s, self._end_trial_processes)
            if not grace_s:
                self._end_trial_processes()

    def _end_trial_processes(self) -> None:
        """No more grace: kill what is left, send what it said."""
        if self._ending is not None:
            self._ending.cancel()
        if self._supervisor:
            _log.info("node.ending hosts=%d", len(self._supervisor))
        self._supervisor.kill_all()
        self._checkpoints.close()
        self._files.close()
        # A failure whose trial's output is still being read goes out before the deregistration.
        self._reactor.after(_ENDING_S / 2, self._logs.hold_no_more)
        self._ending = self._reactor.after(_ENDING_S, self._deregister)

    def abandon(self, reason: str, exit_code: int = 0) -> None:
        """End at once, without a deregistration; the forkservers notice, and kill what is left."""
        _log.info("node.abandoned reason=%r hosts=%d", reason, len(self._supervisor))
        self._exit_code = exit_code
        self._reactor.stop()

    def _deregister(self) -> None:
        if not self._has_deregistered:
            self._has_deregistered = True
            self._publisher.order(Deregister())
            self._publisher.join(_DEREGISTER_S)
            _log.info("node.ended")
            self._reactor.stop()

    def _withhold(self, devices: dict[str, str]) -> None:
        """These are not to be used now."""
        number = self._registration.number + 1
        devices = {uuid: why[:LINE_CHARACTERS] for uuid, why in devices.items()}
        self._registration = msgspec.structs.replace(
            self._registration, withheld=devices, number=number
        )
        self._register()

    def _warn(self, events_key: str, text: str) -> None:
        self._outboxes.add(events_key, encode(NodeWarned(text)))

    # --- mail -----------------------------------------------------------------------------------

    def _consumer_is_ready(self) -> None:
        self._has_heard = True
        self._register()

    def _consumer_died(self) -> None:
        # Another one waits for Redis, should that be away. The lease shows what was not heard.
        if self._ending is None:
            self._consumer.start_if_none()
        self._publisher.order(RenewLeaseNow())

    def _obey(self, message: bytes) -> None:
        term_before, _ = self._commands.confirmed
        assignment = self._commands.open(message)
        if assignment is None or self._ending is not None:
            return
        self._publisher.confirmed = self._commands.confirmed
        if assignment.term > term_before or self._redis_state.generation is None:
            # A scheduler has begun, perhaps on a wire that was reset while there was none.
            self._publisher.order(RenewLeaseNow())
        self._overdue_in_a_row = 0
        if assignment.store and assignment.store != self._tried_store:
            self._tried_store = assignment.store
            self._checkpoints.try_store(assignment.store)
        failpoint("orders.before_obey")
        self._supervisor.obey(assignment.orders, assignment.untouched)
        failpoint("orders.after_obey")
        self._expect_command()

    def _expect_command(self) -> None:
        """Have the consumer replaced if what the scheduler announced does not come."""
        if self._announced <= self._commands.confirmed:
            if self._overdue is not None:
                self._overdue.cancel()
            self._overdue = None
        elif self._overdue is None:
            delay_s = backoff_s(self._overdue_in_a_row, *_OVERDUE_S)
            self._overdue = self._reactor.after(delay_s, self._command_is_overdue)

    def _command_is_overdue(self) -> None:
        self._overdue = None
        if not self._consumer.is_ready:  # it is on its way, and watched
            self._expect_command()
            return
        self._overdue_in_a_row += 1
        self._consumer.restart(f"assignment {self._announced} was announced and did not come")

    # --- the wire -------------------------------------------------------------------------------

    def _heard(self, report: PublisherReport) -> None:
        self._publisher.reports_handled()
        redis_state = self._redis_state
        match report:
            case LeaseReply():
                self._seen(report)
            case Registered():
                redis_state.registered, redis_state.introducing = redis_state.introducing, None
                self._say_ready()
                self._register()
            case RegistrationFailed():
                redis_state.introducing = None  # the next look tries again
            case BatchesAppended(key):
                self._outboxes.appended(key)
            case OutputSent():
                self._files.output_sent()
            case AppendFailed(key, reason):
                self._outboxes.not_appended(key, reason)
                if redis_state.is_up:  # it may be another generation
                    self._publisher.order(RenewLeaseNow())
            case RedisLost(reason):
                _log.warning("wire.out_of_reach reason=%r", reason)
                redis_state.is_up, redis_state.introducing = False, None
                self._consumer.redis_is_away()
                self._heed(is_heard=False)

    def _seen(self, seen: LeaseReply) -> None:
        self._health.confirmed(has_scheduler=seen.has_scheduler)
        redis_state = self._redis_state
        if seen.generation != redis_state.generation:
            _log.info("wire.generation old=%s new=%s", redis_state.generation, seen.generation)
            redis_state.generation, redis_state.since = seen.generation, time.monotonic()
            # Whatever was sent in the generation before may have gone with it.
            self._outboxes.rewind()
        if self._keys.look(has_scheduler=seen.has_scheduler, signs=seen.signs):
            # What lies in Redis may be sealed with a key that goes soon.
            self._outboxes.rewind()
            redis_state.registered = None
        self._say_ready()
        # Without a generation no stream has to be there.
        missing = frozenset[str]() if seen.generation is None else seen.missing
        self._outboxes.acknowledge(seen.acknowledged_up_to, missing)
        unsettled = self._checkpoints.unsettled() | self._files.unsettled()
        used = self._supervisor.events_keys() | unsettled
        for key in self._checkpoints.forget_all_but(used, seen.acknowledged_up_to, missing):
            self._publisher.order(ForgetStream(key))
        self._outboxes.forget_all_but(used)
        was_up, redis_state.is_up = redis_state.is_up, True
        if self._ending is not None:
            return
        self._had_scheduler |= seen.has_scheduler
        is_served = seen.has_scheduler or not self._had_scheduler
        self._heed(is_heard=is_served and seen.generation is not None)
        if was_up:
            self._consumer.start_if_none()
        else:
            _log.info("wire.back")
            self._consumer.redis_is_back()
        self._register()
        self._announced = seen.announced
        self._expect_command()
        if seen.fenced:
            _log.warning("node.fenced reason=%s", seen.fenced)
            is_replaced = seen.fenced == STARTED_AGAIN
            self.stop("fenced", EXIT_REPLACED if is_replaced else EXIT_FENCED)
        elif seen.retired:
            _log.info("node.retired reason=%s", seen.retired)
            self.stop("retired", grace_s=self._grace_s)

    def _heed(self, *, is_heard: bool) -> None:
        """Have the hosts end when no scheduler is heard for too long, and go on when one is."""
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
            _log.warning("node.given_up hosts=%d silence=%s", trial_processes, silence_s)
            self._has_given_up = True
            self._supervisor.give_up()

    def _say_ready(self) -> None:
        """Log, once a generation, that schedulers know of this node and believe it."""
        registered = self._redis_state.registered
        if registered is None or not self._keys.agrees:
            return
        if registered.generation != self._ready_in:
            self._ready_in = registered.generation
            _log.info("node.introduced generation=%s", registered.generation)

    def _register(self) -> None:
        """Say hello, when the answer can be heard: once a generation, and when it has changed."""
        redis_state = self._redis_state
        if not (self._has_heard and redis_state.is_up and redis_state.generation is not None):
            return
        under_way, due = (
            redis_state.introducing,
            _RegistrationState(redis_state.generation, self._registration),
        )
        is_under_way = under_way is not None and under_way.generation == due.generation
        if redis_state.registered != due and not is_under_way:  # one after the other
            redis_state.introducing = due
            self._publisher.order(Register(encode(self._registration)))

    # --- after each round -----------------------------------------------------------------------

    def _after_round(self) -> None:
        self._send()
        if self._watch is not None:
            self._show(self._watch)
        outboxes, redis_state = self._outboxes, self._redis_state
        if (full := outboxes.full) != self._full:
            self._full = full
            self._supervisor.hold(full)
        kept = self._checkpoints.kept
        self._publisher.keys = tuple({*outboxes.keys, *kept}) if kept else outboxes.keys
        is_expecting = (
            redis_state.generation is None and time.monotonic() < redis_state.since + _EXPECTING_S
        )
        was_hurried, is_hurried = (
            self._publisher.is_hurried,
            outboxes.size > BLOCK_BYTES or is_expecting,
        )
        self._publisher.is_hurried = is_hurried
        if is_hurried and not was_hurried:  # it may just have begun to wait
            self._publisher.order(RenewLeaseNow())
        is_settled = outboxes.is_settled or not redis_state.is_up
        unsettled = self._checkpoints.unsettled() | self._files.unsettled()
        is_alone = not self._supervisor and not unsettled and not self._logs.is_holding
        if self._ending is not None and is_alone and is_settled:
            self._ending.cancel()
            self._deregister()

    def _send(self) -> None:
        """Hand the outboxes' news to the pump if Redis would take them."""
        redis_state = self._redis_state
        registered = redis_state.registered
        if (
            redis_state.is_up
            and registered is not None
            and registered.generation == redis_state.generation
        ):
            self._outboxes.send(registered.generation)

    def _show(self, watch: MachineWatch) -> None:
        watch.trial_processes, watch.outbox = len(self._supervisor), self._outboxes.size
        watch.cache = self._checkpoints.size
        watch.store = self._checkpoints.traffic

    def _has_time(self) -> bool:
        """Whether there is time for what nobody waits for."""
        return self._redis_state.is_up and self._outboxes.unsent <= BLOCK_BYTES

    def _header(self, first: int) -> bytes:
        confirmed = self._commands.confirmed
        return encode(BatchHeader(PROTOCOL_VERSION, self._instance_id, first, confirmed))
