"""What an experiment's process and the farm's supervisor tell each other.

Each message is one frame of msgpack (`tunemq_scheduler.farm.ipc.nonblocking_frames`). The
supervisor never unpickles: what is the experiment's own travels as bytes in these structs, or not
at all.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from tunemq_scheduler.api.farm_answers import RequestRejection
from tunemq_scheduler.core.allotments import OfferUsage
from tunemq_scheduler.transport.node_batches import ReadEvent
from tunemq_shared.base import message_encoding
from tunemq_shared.objects.store_permissions import StorePermissions
from tunemq_shared.objects.store_traffic import StoreTraffic
from tunemq_shared.protocol.farm_requests import SubmittedCode
from tunemq_shared.protocol.message_limits import Amount, Count
from tunemq_shared.protocol.messages import NodeJoined, NodeOffered, TrialOrder
from tunemq_shared.signing.message_signing import SigningKey

#: No experiment has more trials, and none is behind for longer.
_MOST_TRIALS: Final = 2**40
_LONGEST_S: Final = 1e10
#: What a process says of why it ends is not longer.
MOST_CHARACTERS: Final = 16_384
#: So many threads are named at most, with names that are not longer.
MOST_THREADS: Final = 5
THREAD_CHARACTERS: Final = 100

ThreadName = Annotated[str, msgspec.Meta(max_length=THREAD_CHARACTERS)]


class IpcMessage(msgspec.Struct, frozen=True, array_like=True):
    """The base of all that travels between the two."""


# --- to the experiment ----------------------------------------------------------------------------


class ExperimentJob(IpcMessage, frozen=True, kw_only=True, tag="job"):
    """The first thing that an experiment's process hears: what it is to run.

    ``name`` is the experiment's, ``results`` the folder in which its own is, ``prefix`` what the
    ids of its trials begin with. ``code`` says what its Tuner is; what of it is in a store is
    brought to ``folder_for_code``. ``store`` is the address
    of the experiment's own store, where its RunConfig names none; a folder is no such address.
    ``code_store`` is that of the store through which code gets to nodes. ``preload``, ``python``
    and ``variables`` replace what the RunConfig says. ``term`` is the supervisor's. ``events_key``
    is the stream of the run before, where nodes still keep what they host and have to say of it;
    where they may not, or nobody knows, it is empty. ``retry``: trials in ERROR that go on: ``*``
    for all, else the id of one. ``take_over`` is the address of its copy in a store, from which it
    continues if nothing of it is on this machine. ``journal_keys`` sign the copy of its journal,
    and of no other's.
    ``stores`` says which stores it may use, and with which credentials.
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
    """What nodes stated and what became of them; batches of nodes as those sent them."""

    read_events: list[ReadEvent]


class NewOffers(IpcMessage, frozen=True, tag="offers"):
    """What the experiment may use of nodes from now on; in this order with the `NewEvents`."""

    offers: tuple[NodeOffered, ...]


class TransportNotices(IpcMessage, frozen=True, tag="notes"):
    """What holds now and what happened on the wire, for people."""

    notes: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


class LeaseProof(IpcMessage, frozen=True, tag="beat"):
    """At this time, of the machine's monotonic clock, the farm was certainly the supervisor's."""

    at: float


class StopSearch(IpcMessage, frozen=True, tag="stop search"):
    """Stop all trials; what they have is saved, and the search is over."""

    reason: str


class InterruptSearch(IpcMessage, frozen=True, tag="interrupt"):
    """End now; every trial stays where it is, to be resumed by a later run."""

    reason: str


class DetachSearch(IpcMessage, frozen=True, tag="leave"):
    """End at once and tell nobody: trials go on, for the next run to take over."""


class StopOneTrial(IpcMessage, frozen=True, tag="stop trial"):
    """Stop one trial."""

    trial: str
    reason: str


class RetryTrial(IpcMessage, frozen=True, tag="retry trial"):
    """Have a trial in ERROR go on from its last checkpoint."""

    trial: str


class ShowTrials(IpcMessage, frozen=True, tag="show"):
    """How is the search, and how are this many of its trials?"""

    trials: int


class ExplainTrial(IpcMessage, frozen=True, tag="why"):
    """Why does this trial not run?"""

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
    """A request; it is answered by an `IpcReply` of the same ``id``."""

    id: int
    request: SearchRequest


ToExperiment = ExperimentJob | NewEvents | NewOffers | TransportNotices | LeaseProof | IpcRequest

# --- to the supervisor ----------------------------------------------------------------------------


class ExperimentAttached(IpcMessage, frozen=True, tag="attach"):
    """The experiment is open: its stream, and what it knows of nodes from the run before."""

    events_key: str
    nodes: tuple[NodeJoined, ...] = ()
    away: tuple[NodeJoined, ...] = ()
    acknowledged: dict[str, Count] = {}


class PutTrialOrder(IpcMessage, frozen=True, tag="host"):
    """What a node is to do about a trial; see `put`."""

    instance_id: str
    order: TrialOrder


class ReleaseOrder(IpcMessage, frozen=True, tag="release"):
    """Forget a trial whose host is gone."""

    instance_id: str
    trial: str
    attempt: int


IpcOrder = PutTrialOrder | ReleaseOrder


class TurnOrders(IpcMessage, frozen=True, tag="orders"):
    """A turn's orders."""

    orders: tuple[IpcOrder, ...]


class EventsAcknowledged(IpcMessage, frozen=True, tag="journalled"):
    """The first ``events_handled`` facts of all are handled, their orders are in.

    ``acknowledged``: how far nodes' events, by instance, may be forgotten; None says nothing
    new.
    """

    events_handled: Count
    acknowledged: dict[str, Count] | None = None


class OfferUsageUpdate(IpcMessage, frozen=True, tag="used"):
    """What the experiment makes of what it was offered."""

    usage: OfferUsage


class SearchStatus(IpcMessage, frozen=True, kw_only=True, tag="status"):
    """How far the search is.

    ``counts`` are trials by state; ``total`` how many there will be, None if nobody knows;
    ``best`` the id and the value of the best trial; ``results`` how many results this process
    was given. ``waits``: for what trials wait that wait neither for a slot nor for a store.
    """

    counts: dict[str, Count]
    total: Count | None = None
    elapsed_s: Amount = 0.0
    metric: str = ""
    mode: str = ""
    best: tuple[str, float] | None = None
    best_config: dict[str, Any] = {}
    used: dict[str, Amount] = {}
    notes: tuple[str, ...] = ()
    results: Count = 0
    waits: tuple[str, ...] = ()


class StoreUse(IpcMessage, frozen=True, tag="store use"):
    """What this process asks of object stores, and who waits for one.

    ``waiting``: how many trials wait for a store. ``copy_behind_s``: for so long the copy of the
    journal has lacked turns.
    """

    traffic: StoreTraffic = StoreTraffic()
    waiting: int = 0
    copy_behind_s: float = 0.0

    @property
    def is_possible(self) -> bool:
        """Whether a process could have counted this."""
        return (
            self.traffic.is_possible
            and 0 <= self.waiting <= _MOST_TRIALS
            and 0.0 <= self.copy_behind_s <= _LONGEST_S
        )


class ExperimentNotices(IpcMessage, frozen=True, tag="notices"):
    """What happened, in lines for people."""

    lines: tuple[str, ...]


class IpcReply(IpcMessage, frozen=True, tag="answered"):
    """The answer to a request, in msgpack, or why there is none."""

    id: int
    answer: msgspec.Raw = msgspec.Raw(b"\xc0")
    rejection: RequestRejection | None = None


class TrialExplanation(IpcMessage, frozen=True):
    """Answers `ExplainTrial`; ``request`` is what it asks for, where it waits for a place."""

    lines: tuple[str, ...]
    request: dict[str, float] = {}


class SearchEnded(IpcMessage, frozen=True, tag="deregistration"):
    """Nobody wants what nodes still have of this experiment.

    ``outcome``: how the search ended, to be read behind its name; ``is_interrupted``: it is to be
    resumed; ``detail``: an `ExperimentDetail` in msgpack, for those who ask when there is no
    process any more, or nothing.
    """

    outcome: str = ""
    is_interrupted: bool = False
    detail: bytes = b""


class ExperimentProblem(IpcMessage, frozen=True, tag="problem"):
    """Why the process is about to end; the file with what it prints may be on a full disk."""

    text: Annotated[str, msgspec.Meta(max_length=MOST_CHARACTERS)]


class ExperimentAlive(IpcMessage, frozen=True, tag="alive"):
    """The thread that runs the search reads what the supervisor sends: no code of users hangs."""


class ExperimentExiting(IpcMessage, frozen=True, tag="exits"):
    """The last message: all is done, and the process is about to end with this exit code.

    ``threads``: the names of those that Python waits for before it ends.
    """

    code: int
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
