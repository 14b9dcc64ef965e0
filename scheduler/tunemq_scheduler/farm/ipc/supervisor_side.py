"""`ExperimentConnection`: the supervisor's side of one experiment: its process and its events.

Nothing here waits for the experiment, whatever its code does. Unread messages are queued, and when
there are many, its nodes wait, too. Its messages are checked, and a process that sends an illegal
one is killed.
"""

from __future__ import annotations

import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from tunemq_scheduler.api.farm_answer_types import ExperimentDetail, RequestDone, RequestRejection
from tunemq_scheduler.core.shared_amounts import OfferUsage
from tunemq_scheduler.farm.common.scheduler_exit_codes import (
    EXIT_AGAIN,
    EXIT_FAILED,
    EXIT_MUST_WAIT,
    EXIT_SUPERSEDED,
    EXIT_UNAVAILABLE,
    EXIT_USE,
    how_it_ended,
)
from tunemq_scheduler.farm.ipc import ipc_messages as r
from tunemq_scheduler.farm.ipc.experiment_processes import ExperimentProcess
from tunemq_scheduler.farm.ipc.nonblocking_frames import FrameSocket
from tunemq_scheduler.farm.ipc.notice_limit import NoticeLimit
from tunemq_scheduler.transport.event_batches import EventBatch, ReadEvent
from tunemq_scheduler.transport.experiment_transport import TransportClient
from tunemq_scheduler.transport.node_transport import NodeTransport
from tunemq_scheduler.transport.nodes.registration_checks import check_known
from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.base.errors import BugError, ConfigError, TransportError
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.message_limits import MOST_NODES, NAME_CHARACTERS
from tunemq_shared.system.standard_streams import tell

#: How many bytes may be queued for an experiment before it gets no more.
MOST_WAITING: Final = 8 * 2**20
#: Events are sent in frames of this size, or of one batch if that is larger.
_FRAME_BYTES: Final = 2**20
#: How long its process gets to exit after it has reported that all is done.
EXIT_WITHIN_S: Final = 600.0
#: How long it gets to print its threads' stacks when it is aborted.
_ABORT_WITHIN_S: Final = 5.0
#: The longest time between two beats; a supervisor that took longer was suspended itself.
_LONGEST_BEAT_S: Final = 5.0
#: The longest report about offers: the farm's allocator considers all of it at each turn.
_USAGE_BYTES: Final = 4 * 2**20
#: The size that other events count as; few are longer.
_FACT_BYTES: Final = 1024

_Answer = RequestDone | ExperimentDetail | r.TrialExplanation
ExperimentReply = _Answer | RequestRejection

#: The answers to requests, other than `RequestDone`.
_ANSWERS: Final[dict[type, type[_Answer]]] = {
    r.ShowTrials: ExperimentDetail,
    r.ExplainTrial: r.TrialExplanation,
}


class ExperimentOutcome(StrEnum):
    """How an experiment's process ended."""

    #: The search is finished.
    FINISHED = "finished"
    #: It was asked to end, or got a signal; everything is saved and can be resumed.
    INTERRUPTED = "interrupted"
    #: The search failed, and its reason is known; a person must resume it.
    FAILED = "failed"
    #: The search is intact: restart it. Its trials continue meanwhile.
    LEFT = "left"
    #: It needs another version, or a store that the farm does not allow: retry until it has them.
    MUST_WAIT = "must wait"
    #: Its process died, by a signal or its own exit. Its trials continue meanwhile.
    DIED = "died"


class ExperimentExit(NamedTuple):
    """How an experiment's process ended.

    Attributes:
        outcome: the kind of end.
        returncode: its exit code, negative for a signal.
        text: for people.
        detail: an `ExperimentDetail` in msgpack, if it deregistered.
    """

    outcome: ExperimentOutcome
    returncode: int
    text: str
    detail: bytes = b""


class ExperimentConnection:
    """One run of one experiment.

    Args:
        job: what the process should run.
        on: the transport.
        folder: the folder for the process's output.
        begin: starts the process, as `ExperimentForkservers` does.
        exit_within_s: how long the process gets to exit after it has reported that all is done;
            seconds.

    Raises:
        ConfigError: the process cannot be started; says why.
    """

    def __init__(
        self,
        job: r.ExperimentJob,
        on: NodeTransport,
        *,
        folder: Path,
        begin: Callable[..., ExperimentProcess],
        exit_within_s: float = EXIT_WITHIN_S,
    ) -> None:
        self.job, self.folder = job, folder
        #: The key of its event stream; empty until it is open.
        self.events_key = ""
        #: Its last reports.
        self.usage: OfferUsage | None = None
        self.status: r.SearchStatus | None = None
        self.store_use = r.StoreUse()
        #: How it ended; None while it runs.
        self.process_exit: ExperimentExit | None = None
        self._transport = on
        self._client: TransportClient | None = None
        self._search_ended: r.SearchEnded | None = None
        self._problem = ""
        self._notices: list[str] = []
        self._notice_limit = NoticeLimit()
        self._notes = r.TransportNotices()
        self._offers: dict[str, m.NodeOffered] = {}
        self._known: set[str] = set()
        #: For each open request, the type of its answer, and what takes that.
        self._asked: dict[int, tuple[type[_Answer], Callable[[ExperimentReply], None]]] = {}
        self._last_id = 0
        #: For how many seconds its process has been silent, because its code may hang.
        self.silent_s = 0.0
        self._beat_at = time.monotonic()
        self._exit_within_s = exit_within_s
        self._exits: r.ExperimentExiting | None = None
        self._kill_at: float | None = None
        self._trespass = ""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise ConfigError(
                f"there is no socket for the experiment's process: {error}."
            ) from error
        self._frames = FrameSocket(ours)
        try:
            self._process = begin(folder, theirs, python=job.python, variables=job.variables)
        except BaseException:  # passed on: the supervisor reports it
            ours.close()
            raise
        self._send(job)

    # --- for the supervisor's selector ------------------------------------------------------------

    def fileno(self) -> int:
        """Return the socket; -1 once it is closed."""
        return self._frames.fileno()

    @property
    def pid(self) -> int | None:
        """The pid of its process; None until there is one."""
        return self._process.pid

    @property
    def incomplete_node(self) -> str:
        """The name of a node that has deleted events which this search lacks; empty if none has."""
        return self._client.incomplete_node if self._client is not None else ""

    @property
    def results(self) -> int:
        """How many results its process has received, according to its last report."""
        return self.status.results if self.status is not None else 0

    @property
    def has_ended_search(self) -> bool:
        """Whether its trials are done; callbacks and copies may still run."""
        return self._search_ended is not None

    @property
    def held_up_by(self) -> str:
        """What an exiting process waits for after all is done; empty if it does not."""
        if self._exits is None:
            return ""
        threads = ", ".join(self._exits.threads)
        return f"the threads {threads}" if threads else "an exit handler (atexit)"

    @property
    def likely_reason(self) -> str:
        """The likely reason for its silence."""
        if self.held_up_by:
            return f"its process waits for {self.held_up_by}; all else is done"
        if self.has_ended_search:
            return (
                "its trials are done, and on_experiment_end of its callbacks or the copying of its"
                " files takes long"
            )
        if not self.events_key:
            return (
                "its code (its script, what that imports, or the setup of a callback) has not"
                " returned while it is loaded"
            )
        return (
            "its own code (a callback, logger, stopper, trial scheduler or search algorithm) has"
            " not returned"
        )

    @property
    def watched(self) -> int:
        """Readable when the process has changed its state, which `attend` handles."""
        return self._process.watched

    @property
    def wants_write(self) -> bool:
        """Whether messages wait to be sent."""
        return self._frames.waiting > 0

    @property
    def is_readable(self) -> bool:
        """Whether more may arrive; after the end, the socket would be ready all the time."""
        return not self._frames.is_at_end

    def on_readable(self) -> None:
        """Read and process the experiment's messages."""
        try:
            for payload in self._frames.receive():
                self.silent_s = 0.0
                message = r.decode_for_supervisor(payload)
                if isinstance(message, r.OfferUsageUpdate):
                    _check_usage(message.usage, len(payload))
                self._do(message)
        except (*UNDECODABLE, TransportError) as error:
            self._trespassed(f"it sent what cannot be read ({error})")
        except ConfigError as error:
            self._trespassed(f"it ordered what it may not: {error}")
        except Exception as error:  # noqa: BLE001  recorded: one experiment must not end the others
            self.fail(error)

    def attend(self) -> None:
        """Forward events and offers, and check whether the process ended; called once a turn."""
        if self.process_exit is not None:
            return
        try:
            self._hand_over()
            self._frames.flush()
        except Exception as error:  # noqa: BLE001  recorded: one experiment must not end the others
            self.fail(error)
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._process.kill()
        returncode = self._process.returncode()
        if returncode is not None:
            self._end(returncode)

    # --- to the experiment ------------------------------------------------------------------------

    def beat(self, at: float) -> None:
        """Forward a lease proof with its monotonic time in seconds; called once a second."""
        self._send(r.LeaseProof(at))
        now = time.monotonic()
        # Time in which the supervisor was suspended does not count.
        self.silent_s += min(now - self._beat_at, _LONGEST_BEAT_S)
        self._beat_at = now

    def offer(self, offer: m.NodeOffered) -> None:
        """Offer a part of a node; sent once the experiment knows the node."""
        self._offers[offer.instance_id] = offer

    def tell(self, notes: Sequence[str], notices: Sequence[str] = ()) -> None:
        """Report conditions and incidents of the transport; sent only when they are new."""
        now = r.TransportNotices(tuple(notes), tuple(notices))
        if notices or now != self._notes:
            self._notes = r.TransportNotices(now.notes)
            self._send(now)

    def ask(
        self,
        request: r.SearchRequest,
        then: Callable[[ExperimentReply], None] = lambda _reply: None,
    ) -> None:
        """Send a request; ``then`` gets the answer later, or a rejection when the process ends."""
        self._last_id += 1
        if self.process_exit is not None:
            then(_unanswered(self.process_exit))
            return
        self._asked[self._last_id] = _ANSWERS.get(type(request), RequestDone), then
        self._send(r.IpcRequest(self._last_id, request))

    def stop(
        self, request: r.StopSearch | r.InterruptSearch | r.DetachSearch, grace_s: float
    ) -> None:
        """Ask the process to end; kill it if it has not after this many seconds."""
        self.ask(request)
        self._kill_within(grace_s)

    def kill(self) -> None:
        """Kill the process at once."""
        self._process.kill()

    def abort(self) -> None:
        """Abort a process that hangs, so that it prints its stacks."""
        self._process.abort()
        self._kill_within(_ABORT_WITHIN_S)

    def fail(self, error: Exception) -> None:
        """Log an error in the supervisor's handling of this experiment, and end the experiment."""
        tell("".join(traceback.format_exception(error)))
        self._trespassed(f"the scheduler failed on it ({type(error).__name__}: {error})")

    def _kill_within(self, seconds: float) -> None:
        due = time.monotonic() + seconds
        self._kill_at = due if self._kill_at is None else min(due, self._kill_at)

    def take_notices(self) -> list[str]:
        """Return the notices since the last call, of which there may be few in a minute."""
        notices, self._notices = self._notices, []
        return self._notice_limit.take(notices, time.monotonic())

    def _send(self, message: r.ToExperiment) -> None:
        self._frames.put(r.encode(message))
        self._frames.flush()

    # --- events -----------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        client = self._client
        if client is None:
            return
        client.hold(is_full=self._frames.waiting > MOST_WAITING or self._frames.is_stalled)
        if client.is_full:
            return
        for read_events in frames_of([self._told_of(read_event) for read_event in client.take()]):
            self._send(r.NewEvents(read_events))
        known = [node for node in self._offers if node in self._known]
        if known:
            self._send(r.NewOffers(tuple(self._offers.pop(node) for node in known)))

    def _told_of(self, read_event: ReadEvent) -> ReadEvent:
        if isinstance(read_event, m.NodeJoined):
            self._known.add(read_event.instance_id)
            return msgspec.structs.replace(read_event, is_shared=True)
        if isinstance(read_event, m.NodeLost) and read_event.is_dead:
            self._known.discard(read_event.instance_id)
            self._offers.pop(read_event.instance_id, None)
        return read_event

    # --- from the experiment ----------------------------------------------------------------------

    def _do(self, message: r.ToSupervisor) -> None:
        match message:
            case r.ExperimentAttached():
                self._attach(message)
            case r.TurnOrders():
                self._order(message)
            case r.EventsAcknowledged():
                self._acknowledge(message)
            case r.OfferUsageUpdate():
                self.usage = message.usage
            case r.SearchStatus():
                self.status = message
            case r.StoreUse() if message.is_possible:  # else it cannot be added to others
                self.store_use = message
            case r.ExperimentNotices():
                self._notices = [*self._notices, *message.lines][-r.MOST_LINES :]
            case r.IpcReply():
                self._answer(message)
            case r.ExperimentProblem():
                self._problem = message.text
            case r.ExperimentExiting():
                self._exits = message
                self._kill_within(self._exit_within_s)
            case r.SearchEnded():
                self._end_search(message)
            case _:  # numbers that cannot be
                pass

    def _end_search(self, message: r.SearchEnded) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        elif self.events_key:
            return
        self._search_ended = message

    def _acknowledge(self, message: r.EventsAcknowledged) -> None:
        if self._client is None:
            return
        if message.acknowledged is not None:
            self._client.acknowledge(message.acknowledged)
        self._client.settle(message.events_handled)

    def _attach(self, message: r.ExperimentAttached) -> None:
        num_nodes = len(message.nodes) + len(message.away)
        if num_nodes > MOST_NODES:
            self._trespassed(f"it named {num_nodes:,} nodes, and {MOST_NODES:,} are possible")
            return
        for node in (*message.nodes, *message.away):
            check_known(node)
        before, key = self.job.events_key, message.events_key
        is_late = bool(self.events_key) or self.has_ended_search
        if is_late or not key.startswith(redis_keys.events(self.job.prefix)):
            self._trespassed(f"it asked for the events of {key}")
            return
        if before and before != key:
            self._transport.add(before).close()
        try:
            self._client = self._transport.add(key)
        except BugError:  # another experiment has this stream
            self._trespassed(f"it asked for the events of {key}")
            return
        self.events_key = key
        self._client.can_restart = True
        if message.nodes or message.away:
            self._client.reattach(message.nodes, message.away, message.acknowledged)
        self._known.update(one.instance_id for one in (*message.nodes, *message.away))

    def _order(self, message: r.TurnOrders) -> None:
        for one in message.orders:
            trial = one.order.trial if isinstance(one, r.PutTrialOrder) else one.trial
            if not trial.startswith(f"{self.job.prefix}_"):  # a node finds orders by the trial's id
                self._trespassed(f"it gave an order for trial {trial[:NAME_CHARACTERS]!r}")
                return
            start = one.order.start if isinstance(one, r.PutTrialOrder) else None
            if start is not None and start.events_key != self.events_key:
                self._trespassed(f"it gave an order for the events of {start.events_key}")
                return
            if self._client is None:
                continue
            if start is not None and self.job.stores is not None:
                self.job.stores.check_order(start)
            orders = self._client.orders(one.instance_id)
            if orders is None:  # the node was lost meanwhile
                continue
            if isinstance(one, r.PutTrialOrder):
                orders.put(one.order)
            else:
                orders.release(one.trial, one.attempt)

    def _answer(self, message: r.IpcReply) -> None:
        if message.id in self._asked:
            kind, then = self._asked[message.id]
            if len(memoryview(message.answer)) > r.ANSWER_BYTES:
                raise TransportError(f"an answer of more than {r.ANSWER_BYTES:,} bytes")
            # First: the requester gets a rejection at the process's end if this is not decodable.
            reply = message.rejection or msgspec.msgpack.decode(message.answer, type=kind)
            del self._asked[message.id]
            then(reply)

    def _trespassed(self, what: str) -> None:
        """Kill a broken or hostile process, and ignore all its further messages."""
        self._trespass = what
        self._process.kill()
        self._frames.close()

    # --- its end ----------------------------------------------------------------------------------

    def _end(self, returncode: int) -> None:
        self._frames.refuse_more()  # a child that it left may write for ever
        while not self._frames.is_at_end:  # its earlier messages
            before = self._frames.received
            self.on_readable()
            if self._frames.received == before:
                break
        try:
            self.process_exit = self._judged(returncode)
        except Exception as error:  # noqa: BLE001  recorded: one experiment must not end the others
            self.fail(error)
            self.process_exit = ExperimentExit(
                ExperimentOutcome.FAILED, returncode, f"its process was killed: {self._trespass}."
            )
        if self._client is not None:
            if self.process_exit.outcome is ExperimentOutcome.FINISHED:
                self._client.close()
            else:
                self._client.leave()
            self._client = None
        self._frames.close()
        self._process.close()
        for _, then in self._asked.values():
            then(_unanswered(self.process_exit))
        self._asked.clear()

    def _judged(self, returncode: int) -> ExperimentExit:
        """Return how it ended; after its exit message, the reported end counts."""
        if self._exits is None:
            return self._judged_by(returncode)
        process_exit = self._judged_by(self._exits.code)
        if returncode != -signal.SIGKILL:
            return process_exit
        late = (
            f"its process was killed: {self.held_up_by} had not ended {self._exit_within_s:g} s"
            " after it"
        )
        return process_exit._replace(text=f"{process_exit.text.rstrip('.')}; {late}")

    def _judged_by(self, returncode: int) -> ExperimentExit:
        words, ended = self._problem or self._process.last_output(), self._search_ended
        outcome, text, detail = ExperimentOutcome.FAILED, words, b""
        if self._trespass:
            text = f"its process was killed: {self._trespass}."
        elif ended is not None and ended.is_interrupted:
            outcome, text, detail = ExperimentOutcome.INTERRUPTED, ended.outcome, ended.detail
        elif returncode == 0 and ended is not None:
            outcome, text, detail = ExperimentOutcome.FINISHED, ended.outcome, ended.detail
        elif returncode in {EXIT_AGAIN, EXIT_SUPERSEDED, EXIT_UNAVAILABLE}:
            outcome = ExperimentOutcome.LEFT
        elif returncode == EXIT_MUST_WAIT:
            outcome = ExperimentOutcome.MUST_WAIT
        elif returncode in {EXIT_FAILED, EXIT_USE}:
            silent = f"its process ended with exit code {returncode} and did not say why"
            text = words or silent
        else:
            outcome, how = ExperimentOutcome.DIED, how_it_ended(returncode)
            if returncode == 0:
                how += " without saying that the search has ended"
            said = f"; the last that it wrote:\n{words}" if words else ""
            text = f"its process {how}{said}"
        return ExperimentExit(outcome, returncode, text, detail)


def _check_usage(usage: OfferUsage, size: int) -> None:
    """Check a report about offers.

    Raises:
        TransportError: it is too long, or no trial can request what it wants.
    """
    if size > _USAGE_BYTES:
        raise TransportError(f"a report of {size:,} bytes about its offers")
    for demand in usage.wants:
        if not demand.is_possible:
            raise TransportError(f"a demand for {str(demand.request)[:NAME_CHARACTERS]}")


def _unanswered(process_exit: ExperimentExit) -> RequestRejection:
    """Return the answer to a request to a process that has ended."""
    reason = (process_exit.text or "its process has ended").rstrip(".")
    return RequestRejection(text=f"the search did not answer: {reason}.")


def frames_of(read_events: Sequence[ReadEvent]) -> list[list[ReadEvent]]:
    """Group events into frames that can be sent."""
    frames: list[list[ReadEvent]] = []
    size = _FRAME_BYTES
    for read_event in read_events:
        if size >= _FRAME_BYTES:
            frames.append([])
            size = 0
        frames[-1].append(read_event)
        size += _size_of(read_event)
    return frames


def _size_of(read_event: ReadEvent) -> int:
    match read_event:
        case EventBatch():
            return len(read_event.payload)
        case m.NodeJoined():
            return len(m.encode(read_event))
        case _:
            return _FACT_BYTES
