"""What scheduler and node tell each other: facts in the past tense, and orders.

Everything is a small frozen struct, written as a msgpack array (tag first), because JSON would turn
NaN into null. Facts from nodes and facts made by the scheduler itself share one union, `Event`: the
journal holds both, in the order in which they were handled. What an algorithm answered about an
event is a fact too, an `AlgorithmAnswer`, journalled beside the event (DESIGN: the core).

Units: times are seconds; ``at`` and ``timestamp`` are Unix time on the machine that says them and
are shown, never compared. Names: ``trial`` is a trial's id, ``attempt`` one attempt of it on
one host.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from tunemq_shared.base import message_encoding
from tunemq_shared.protocol import node_orders
from tunemq_shared.protocol.conditions import Horizon
from tunemq_shared.protocol.device_use import DeviceUse

#: Stands in every batch, assignment and journal; a difference is refused, both versions named.
PROTOCOL_VERSION = 1


class Message(msgspec.Struct, frozen=True, array_like=True):
    """The base of all that travels."""


# --- facts that nodes report ----------------------------------------------------------------------


class TrialStarted(Message, frozen=True, tag="started"):
    """A host exists and begins to run the trial's code.

    ``printed``: how long stdout and stderr in the trial's folder are, before it prints anything.
    """

    trial: str
    attempt: int
    pid: int
    hostname: str
    node_ip: str
    at: float
    gpus: tuple[str, ...] = ()
    printed: tuple[int, int] = (0, 0)


class ResultReported(Message, frozen=True, tag="result"):
    """The trainable reported; ``step`` is its training_iteration, from 1.

    ``metrics`` holds what the user reported, already checked and plain (nested dicts of numbers,
    strings, booleans, None, lists). The automatic keys are made from the other fields by
    `tunemq_shared.trial.results.full_result`, so that they do not travel with every result.
    """

    trial: str
    attempt: int
    step: int
    metrics: dict[str, Any]
    timestamp: float
    time_this_iter_s: float
    time_total_s: float
    time_since_restore: float
    iterations_since_restore: int
    timesteps_total: int | None = None
    episodes_total: int | None = None
    timesteps_since_restore: int = 0
    done: bool = False


class CheckpointWritten(Message, frozen=True, tag="written"):
    """A checkpoint is complete and hashed on its node's disk; its upload begins.

    It contains the result of ``step``. ``key`` is ``<trial's folder>/checkpoint_<attempt>-<n>``,
    there and in the store; ``sha256`` is that of the manifest on the disk; ``size`` the bytes of
    all its files.
    """

    trial: str
    attempt: int
    n: int
    step: int
    key: str
    sha256: str
    size: int


class CheckpointCommitted(Message, frozen=True, tag="checkpoint"):
    """A checkpoint's files and then its manifest are in the store; it contains ``step``'s result.

    Of one that its host wrote into the store itself (a local folder) there is no CheckpointWritten
    before. ``sha256`` is that of the manifest in the store. ``shared`` are the objects of *other*
    checkpoints that the manifest refers to, as ``<that checkpoint's key>/<name>``.
    """

    trial: str
    attempt: int
    n: int
    step: int
    key: str
    sha256: str
    size: int
    shared: tuple[str, ...] = ()


class CheckpointLost(Message, frozen=True, tag="unkept"):
    """A written checkpoint will never be committed: its upload was given up."""

    trial: str
    attempt: int
    key: str
    reason: str
    at: float


class CheckpointDamaged(Message, frozen=True, tag="damaged"):
    """A trial could not be restored from ``key``; ``instead`` is taken, nothing where it is empty.

    ``attempt`` is the attempt that tried.
    """

    trial: str
    attempt: int
    key: str
    reason: str
    instead: str


class TrialWaits(Message, frozen=True, tag="waits"):
    """A trial waits for the store, or for a GPU.

    ``what`` is ``save``, ``restore``, before its host starts ``code`` or ``device``, or empty when
    it goes on.
    """

    trial: str
    attempt: int
    what: str
    reason: str


class TrialPaused(Message, frozen=True, tag="paused"):
    """The trainable ended because its trial is to pause; what was due is saved."""

    trial: str
    attempt: int


class TrialFinished(Message, frozen=True, tag="finished"):
    """The trainable ended by itself or at a stop criterion; its last result is the final one."""

    trial: str
    attempt: int


#: `TrialFailed.kind` where a node's forkserver is dead: no fault of the trial's.
FORKSERVER_LOST: Final = "forkserver"


class TrialFailed(Message, frozen=True, tag="failed"):
    """The trainable raised, or could not be loaded or restored.

    ``kind`` is one of ``user`` (its code), ``metric`` (what it reported, or what else its process
    sent), ``load`` (its code or parameters could not be loaded), ``fetch`` (its node could not read
    them in the store), ``disk`` (its node's own disk did not take them), ``start`` (its node could
    not start a process for it), ``restore`` (its checkpoints are damaged), ``storage`` (a
    checkpoint could not be kept, or the store that has it is away), ``memory`` (more than its
    limit, or the machine's), ``cuda_memory`` (a GPU's), ``processes`` (more than it may have),
    ``time_limit`` (a step took longer than it may), ``trial_limit`` (the trial's own time is used
    up), ``stalled`` (no report for longer than it may), ``forkserver`` (its node lost the process
    that it forks trials from). ``output`` is the end of what it printed, for people. ``is_shared``,
    of a ``forkserver``: other trials, of whatever experiment, were on that node.
    """

    trial: str
    attempt: int
    kind: str
    error: str
    traceback: str
    at: float
    output: str = ""
    is_shared: bool = False


class TrialProcessDied(Message, frozen=True, tag="died"):
    """The host ended without saying that the trial had: by a signal, or by an exit of its own.

    ``cause`` is ``memory`` where the machine had none left for it, ``cuda_memory`` where a GPU had
    none, by what was printed last, else empty. ``output`` is the end of that, for people.
    """

    trial: str
    attempt: int
    pid: int
    signal: int | None
    exit_code: int | None
    at: float
    cause: str = ""
    output: str = ""


class SlotFreed(Message, frozen=True, tag="freed"):
    """The host's whole family is gone, or the host waits to be reused: the slot is free."""

    trial: str
    attempt: int


class DevicesUsed(Message, frozen=True, tag="used"):
    """What an attempt used of each GPU that it had; told before its HostFreed."""

    trial: str
    attempt: int
    devices: tuple[DeviceUse, ...]


class LogMatched(Message, frozen=True, tag="logged"):
    """A line that the trial, or what it started, printed matches a log policy's ``pattern``.

    Told once of each pattern and attempt, and before the TrialFailed or HostDied of that: what
    follows from it follows from the failure. ``line`` is its beginning, without control characters.
    """

    trial: str
    attempt: int
    pattern: str
    line: str
    at: float


class NodeWarned(Message, frozen=True, tag="warned"):
    """Something about the node that the person at the terminal should read; of no trial.

    ``has_leftovers``: there may now be something in the store that nobody refers to.
    """

    text: str
    has_leftovers: bool = False


NodeEvent = (
    TrialStarted
    | ResultReported
    | CheckpointWritten
    | CheckpointCommitted
    | CheckpointLost
    | CheckpointDamaged
    | TrialWaits
    | TrialPaused
    | TrialFinished
    | TrialFailed
    | TrialProcessDied
    | SlotFreed
    | DevicesUsed
    | LogMatched
    | NodeWarned
)

# --- facts that the scheduler makes ---------------------------------------------------------------


class Tick(Message, frozen=True, tag="tick"):
    """Time went on: a scheduler ran this experiment for ``elapsed`` seconds, all runs together."""

    elapsed: float


class Gpu(Message, frozen=True):
    """A device of a node; ``memory`` in bytes, 0 where nobody knows."""

    uuid: str
    model: str = ""
    memory: float = 0.0


class NodeJoined(Message, frozen=True, tag="joined"):
    """A node instance offers its resources (name to amount).

    ``gpus``: its devices, where they are known one by one. ``is_shared``: other experiments use the
    node, too; of it this one has nothing until it is offered something (`NodeOffered`).
    ``withheld``: of the devices those that nobody is to use now, see `DevicesWithheld`.
    """

    instance_id: str
    node: str
    hostname: str
    node_ip: str
    resources: dict[str, float]
    gpus: tuple[Gpu, ...] = ()
    is_shared: bool = False
    withheld: dict[str, str] = {}


class NodeOffered(Message, frozen=True, tag="offered"):
    """Of a shared node this experiment may hold so much from now on, all in all; the ``n``-th time.

    ``devices`` are the GPUs among it by UUID, and how much of each. Where more than that is held
    nothing is placed there until it is not; with ``preempt_grace_s`` trials give way: they have so
    many seconds to save what they did.
    """

    instance_id: str
    n: int
    resources: dict[str, float]
    devices: dict[str, float] = {}
    preempt_grace_s: float | None = None


class NodeLost(Message, frozen=True, tag="lost"):
    """A node attempt is silent for too long: its trials may be started elsewhere.

    ``is_dead``: it will not come back (its node was started again, or its machine is ours and it
    ended), so that nothing of it has to be kept in mind. ``is_shared``: trials of other experiments
    were on it, or may have been.
    """

    instance_id: str
    reason: str
    is_dead: bool = False
    is_shared: bool = False


class NodeReturned(Message, frozen=True, tag="returned"):
    """A lost attempt is heard again: what nobody took over from it is its own as before."""

    instance_id: str


class DevicesWithheld(Message, frozen=True, tag="withheld"):
    """On these devices of a node nothing begins from now on, on all others it may (again).

    ``devices``: their UUIDs, and why, for people. What has one goes on with it.
    """

    instance_id: str
    devices: dict[str, str]


class ExperimentResumed(Message, frozen=True, tag="resumed"):
    """A scheduler took up this journal again; ``run`` counts its schedulers, the first is 1.

    What was interrupted or exhausted goes on; what was stopped, too, if it is cold. ``unfinished``:
    trials that are not over go on; else they end where they are. ``errored``: what becomes of
    trials in ERROR: empty (they stay so), ``resume`` (from their last checkpoint) or ``restart``
    (from their beginning, a new lineage). ``is_cold``: no node of the run before is left, with all
    that it hosted. ``settings`` are the rules that hold from now on, packed; empty where they stay
    as they are. ``also`` are further trials that were over and go on from their last checkpoint.
    ``attempts_from``: trials start with higher epochs than this, because the run before may have
    started some of which the journal does not know (it is a copy).
    """

    run: int
    at: float
    unfinished: bool = True
    errored: str = ""
    is_cold: bool = True
    settings: bytes = b""
    also: tuple[str, ...] = ()
    attempts_from: int = 0


class BatchRead(Message, frozen=True, tag="batch"):
    """Events ``first`` to ``last`` of an attempt follow; ``cursor`` is their stream entry."""

    instance_id: str
    first: int
    last: int
    cursor: str


class ConfigSuggested(Message, frozen=True, tag="suggested"):
    """The search algorithm gave the ``n``-th configuration (from 0), for a new trial.

    ``config`` is packed by `tunemq_shared.code.config_packing`; ``resources`` is what one trial of
    it needs.
    """

    n: int
    trial: str
    config: bytes
    tag: str
    resources: dict[str, float]


class SearchExhausted(Message, frozen=True, tag="exhausted"):
    """The search algorithm has no more configurations; after it no ConfigSuggested comes."""


class TrialChosen(Message, frozen=True, tag="chosen"):
    """The trial scheduler chose which waiting trial starts next."""

    trial: str


class StopRequested(Message, frozen=True, tag="stop"):
    """Somebody asked to stop a trial, or the whole experiment (``trial`` is None)."""

    trial: str | None
    reason: str


class CheckpointsForgotten(Message, frozen=True, tag="forgotten"):
    """Somebody asked that a trial goes on from where it began, when it next starts."""

    trial: str


class RunInterrupted(Message, frozen=True, tag="interrupted"):
    """The scheduler was told to end: hosts stop, trials stay where they are, to be resumed."""

    reason: str


Event = (
    NodeEvent
    | Tick
    | NodeJoined
    | NodeOffered
    | NodeLost
    | NodeReturned
    | DevicesWithheld
    | ExperimentResumed
    | BatchRead
    | ConfigSuggested
    | SearchExhausted
    | TrialChosen
    | StopRequested
    | CheckpointsForgotten
    | RunInterrupted
)

# --- what algorithms answered about an event ------------------------------------------------------

#: No Decided record means CONTINUE.
CONTINUE, PAUSE, STOP = "CONTINUE", "PAUSE", "STOP"


class DecisionMade(Message, frozen=True, tag="decided"):
    """A trial scheduler or stopper decided something other than CONTINUE about a result."""

    trial: str
    step: int
    decision: str
    reason: str


class HorizonSet(Message, frozen=True, tag="horizon"):
    """Up to where the trial may run before anybody has to decide again."""

    trial: str
    horizon: Horizon


AlgorithmAnswer = DecisionMade | HorizonSet


class JournalRecord(msgspec.Struct, frozen=True, array_like=True):
    """One line of the journal: an event and what was answered about it."""

    event: Event
    answers: tuple[AlgorithmAnswer, ...] = ()


# --- orders to a node (`tunemq_shared.protocol.node_orders`)
# -----------------------------------------------

BlobRef = node_orders.BlobRef
CheckpointRef = node_orders.CheckpointRef
Environment = node_orders.Environment
TrialSpec = node_orders.TrialSpec
TrialOrder = node_orders.TrialOrder
Assignment = node_orders.Assignment

encode = message_encoding.encode
decode_node_event = msgspec.msgpack.Decoder(NodeEvent).decode
decode_node_events = msgspec.msgpack.Decoder(list[NodeEvent]).decode
decode_records = msgspec.msgpack.Decoder(list[JournalRecord]).decode
decode_assignment = msgspec.msgpack.Decoder(Assignment).decode
