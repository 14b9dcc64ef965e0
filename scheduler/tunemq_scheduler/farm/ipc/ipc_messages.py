"""The messages between an experiment's process and the farm's supervisor.

Each message is one frame of msgpack (`tunemq_scheduler.farm.ipc.nonblocking_frames`). The
supervisor never unpickles: an experiment's own objects travel as bytes in these structs, or not at
all.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from tunemq_scheduler.api.farm_answer_types import RequestRejection
from tunemq_scheduler.core.shared_amounts import OfferUsage
from tunemq_scheduler.core.trial_decisions import MOST_DECISIONS, TrialDecision
from tunemq_scheduler.transport.event_batches import ReadEvent
from tunemq_shared.base import message_encoding
from tunemq_shared.objects.allowed_stores import StorePermissions
from tunemq_shared.objects.store_traffic import StoreTraffic
from tunemq_shared.protocol.farm_requests import SubmittedCode
from tunemq_shared.protocol.message_limits import Count, Line, Name
from tunemq_shared.protocol.messages import NodeJoined, NodeOffered, TrialOrder
from tunemq_shared.signing.message_signing import SigningKey

#: Upper limits for an experiment's trials and for the delay of its copy.
_MOST_TRIALS: Final = 2**40
_LONGEST_S: Final = 1e10
#: The longest reason that a process gives for its end.
MOST_CHARACTERS: Final = 16_384
#: The largest answer and last report, because they pass through the farm's Redis.
ANSWER_BYTES: Final = 2**24
#: The most incidents in one message, states of trials, and things that trials wait for.
MOST_LINES: Final = 100
#: The most threads to name, and the longest name.
MOST_THREADS: Final = 5
THREAD_CHARACTERS: Final = 100

ThreadName = Annotated[str, msgspec.Meta(max_length=THREAD_CHARACTERS)]
Lines = Annotated[tuple[Line, ...], msgspec.Meta(max_length=MOST_LINES)]


#: `ExperimentJob.retry` for all trials in state ERROR.
RETRY_ALL: Final = "*"


class IpcMessage(msgspec.Struct, frozen=True, array_like=True):
    """The base class of all messages between the two."""


# --- to the experiment ----------------------------------------------------------------------------


class ExperimentJob(IpcMessage, frozen=True, kw_only=True, tag="job"):
    """The first message to an experiment's process: what it should run.

    ``name`` is the experiment's name, ``results`` the folder that contains its own folder, and
    ``prefix`` the beginning of its trials' ids. ``code`` describes its Tuner; parts of it in a
    store are downloaded to ``folder_for_code``. ``store`` is the address of the experiment's own
    store, if its RunConfig names none; a folder is no such address. ``code_store`` is the address
    of the store through which code reaches the nodes. ``preload``, ``python`` and ``variables``
    replace values of the RunConfig. ``term`` is the supervisor's term. ``events_key`` is the stream
    of the previous run, if nodes still keep its trials and events; otherwise it is empty. ``retry``
    names the trials in state ERROR to continue: `RETRY_ALL`, else the id of one. ``take_over`` is
    the address of its copy in a store, from which it continues if this machine has nothing of it.
    ``journal_release`` says when nodes may forget events. ``journal_keys`` sign the copy of its
    journal only. ``stores`` says which stores it may use, and with which credentials.
    """

    name: str
    results: str
    code: SubmittedCode
    term: int
    prefix: str = ""
    store: str = ""
    code_store: str = ""
    folder_for_code: str = ""
    python: str = ""
    variables: dict[str, str] = {}
    preload: tuple[str, ...] | None = None
    events_key: str = ""
    retry: str = ""
    journal_release: str = "local"
    take_over: str = ""
    journal_keys: tuple[SigningKey, ...] = ()
    stores: StorePermissions | None = None


class NewEvents(IpcMessage, frozen=True, tag="read_events"):
    """Changes of nodes, and batches of events as nodes sent them."""

    read_events: list[ReadEvent]


class NewOffers(IpcMessage, frozen=True, tag="offers"):
    """New offers of nodes; in order with the `NewEvents`."""

    offers: tuple[NodeOffered, ...]


class TransportNotices(IpcMessage, frozen=True, tag="notes"):
    """Current conditions and recent incidents of the transport, for people."""

    notes: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


class LeaseProof(IpcMessage, frozen=True, tag="beat"):
    """The supervisor held the lease at this time of the machine's monotonic clock."""

    at: float


class StopSearch(IpcMessage, frozen=True, tag="stop search"):
    """Stop all trials, save their state, and finish the search."""

    reason: str


class InterruptSearch(IpcMessage, frozen=True, tag="interrupt"):
    """End now; a later run resumes every trial."""

    reason: str


class DetachSearch(IpcMessage, frozen=True, tag="leave"):
    """End at once, silently: trials continue, and the next run takes them over."""


class StopOneTrial(IpcMessage, frozen=True, tag="stop trial"):
    """Stop one trial."""

    trial: str
    reason: str


class RetryTrial(IpcMessage, frozen=True, tag="retry trial"):
    """Continue a trial in state ERROR from its last checkpoint."""

    trial: str


class ShowTrials(IpcMessage, frozen=True, tag="show"):
    """Return the state of the search, and of this many trials."""

    trials: int


class ExplainTrial(IpcMessage, frozen=True, tag="why"):
    """Explain why this trial does not run."""

    trial: str


SearchRequest = (
    StopSearch
    | InterruptSearch
    | DetachSearch
    | StopOneTrial
    | RetryTrial
    | ShowTrials
    | ExplainTrial
)


class IpcRequest(IpcMessage, frozen=True, tag="asked"):
    """A request; an `IpcReply` with the same ``id`` answers it."""

    id: int
    request: SearchRequest


ToExperiment = ExperimentJob | NewEvents | NewOffers | TransportNotices | LeaseProof | IpcRequest

# --- to the supervisor ----------------------------------------------------------------------------


class ExperimentAttached(IpcMessage, frozen=True, tag="attach"):
    """The experiment is open: its stream, and the nodes that it knows from the previous run."""

    events_key: Name
    nodes: tuple[NodeJoined, ...] = ()
    away: tuple[NodeJoined, ...] = ()
    acknowledged: dict[str, Count] = {}


class PutTrialOrder(IpcMessage, frozen=True, tag="host"):
    """An order about a trial for a node; see `put`."""

    instance_id: str
    order: TrialOrder


class ReleaseOrder(IpcMessage, frozen=True, tag="release"):
    """Forget a trial whose process has ended."""

    instance_id: str
    trial: str
    attempt: int


IpcOrder = PutTrialOrder | ReleaseOrder


class TurnOrders(IpcMessage, frozen=True, tag="orders"):
    """The orders of a turn."""

    orders: tuple[IpcOrder, ...]


class EventsAcknowledged(IpcMessage, frozen=True, tag="journalled"):
    """The first ``events_handled`` events are handled, and their orders were sent.

    ``acknowledged``: up to which number nodes may forget events, by instance; None means no change.
    """

    events_handled: Count
    acknowledged: dict[str, Count] | None = None


class OfferUsageUpdate(IpcMessage, frozen=True, tag="used"):
    """How the experiment uses its offers."""

    usage: OfferUsage


class SearchStatus(IpcMessage, frozen=True, kw_only=True, tag="status"):
    """The progress of the search.

    ``counts`` are trials by state; ``total`` is the expected number of trials, None if unknown;
    ``results`` is how many results this process has received. ``waits`` says what trials wait for,
    other than slots and stores.
    """

    counts: Annotated[dict[Name, Count], msgspec.Meta(max_length=MOST_LINES)]
    total: Count | None = None
    results: Count = 0
    waits: Lines = ()


class StoreUse(IpcMessage, frozen=True, tag="store use"):
    """The store requests of this process, and the trials that wait for a store.

    ``waiting``: how many trials wait for a store. ``copy_behind_s``: for how many seconds the
    journal's copy has lacked turns.
    """

    traffic: StoreTraffic = StoreTraffic()
    waiting: int = 0
    copy_behind_s: float = 0.0

    @property
    def is_possible(self) -> bool:
        """Whether a process can have counted these values."""
        return (
            self.traffic.is_possible
            and 0 <= self.waiting <= _MOST_TRIALS
            and 0.0 <= self.copy_behind_s <= _LONGEST_S
        )


class ExperimentNotices(IpcMessage, frozen=True, tag="notices"):
    """Recent incidents, as lines for people."""

    lines: Lines


class IpcReply(IpcMessage, frozen=True, tag="answered"):
    """The answer to a request, in msgpack, or why there is none."""

    id: int
    answer: msgspec.Raw = msgspec.Raw(b"\xc0")
    rejection: RequestRejection | None = None


class TrialExplanation(IpcMessage, frozen=True):
    """The answer to `ExplainTrial`; ``request`` is its resource request, if it waits for a slot.

    ``decisions``: the newest decisions about it; ``decisions_before``: the number of older ones.
    """

    lines: tuple[str, ...]
    request: dict[str, float] = {}
    decisions: Annotated[tuple[TrialDecision, ...], msgspec.Meta(max_length=MOST_DECISIONS)] = ()
    decisions_before: Count = 0


class SearchEnded(IpcMessage, frozen=True, tag="deregistration"):
    """The search has ended, and nodes may discard the rest of its data.

    ``outcome``: how the search ended, as text to show after its name; ``is_interrupted``: it can be
    resumed; ``detail``: an `ExperimentDetail` in msgpack for later requests, or nothing.
    """

    outcome: Annotated[str, msgspec.Meta(max_length=MOST_CHARACTERS)] = ""
    is_interrupted: bool = False
    detail: Annotated[bytes, msgspec.Meta(max_length=ANSWER_BYTES)] = b""


class ExperimentProblem(IpcMessage, frozen=True, tag="problem"):
    """Why the process is about to end; the file with its output may be on a full disk."""

    text: Annotated[str, msgspec.Meta(max_length=MOST_CHARACTERS)]


class ExperimentAlive(IpcMessage, frozen=True, tag="alive"):
    """The search's thread reads the supervisor's messages, so no user code hangs."""


class ExperimentExiting(IpcMessage, frozen=True, tag="exits"):
    """The last message: all is done, and the process will exit with this code.

    ``threads``: the names of the threads that Python waits for before it exits.
    """

    code: Annotated[int, msgspec.Meta(ge=0, le=255)]
    threads: Annotated[tuple[ThreadName, ...], msgspec.Meta(max_length=MOST_THREADS)] = ()


ToSupervisor = (
    ExperimentAttached
    | TurnOrders
    | EventsAcknowledged
    | OfferUsageUpdate
    | SearchStatus
    | StoreUse
    | ExperimentNotices
    | IpcReply
    | SearchEnded
    | ExperimentProblem
    | ExperimentAlive
    | ExperimentExiting
)

encode: Final = message_encoding.encode
decode_for_experiment: Final = msgspec.msgpack.Decoder(ToExperiment).decode
decode_for_supervisor: Final = msgspec.msgpack.Decoder(ToSupervisor).decode
