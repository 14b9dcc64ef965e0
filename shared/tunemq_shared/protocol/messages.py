"""Messages between scheduler and nodes: events in the past tense, and orders.

Every message is a small frozen struct, encoded as a msgpack array (tag first), because JSON would
turn NaN into null. Events of nodes and events that the scheduler makes share one union, `Event`:
the journal holds both, in the order in which the scheduler handled them. An algorithm's answer to
an event is an `AlgorithmAnswer`, journalled beside the event (DESIGN: the core).

Units: times are seconds; ``at`` and ``timestamp`` are Unix time on the sender's machine and are
shown, never compared. Names: ``trial`` is a trial's id, ``attempt`` the number of one run of it in
one trial process.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from tunemq_shared.base import message_encoding
from tunemq_shared.protocol import node_orders
from tunemq_shared.protocol.device_use import DeviceUse
from tunemq_shared.protocol.result_conditions import Horizon

#: Part of every batch, assignment and journal; a mismatch is rejected with both versions named.
PROTOCOL_VERSION = 1


class Message(msgspec.Struct, frozen=True, array_like=True):
    """The base of all messages."""


# --- events that nodes report ---------------------------------------------------------------------


class TrialStarted(Message, frozen=True, tag="started"):
    """A trial process exists and begins to run the trial's code.

    ``printed``: sizes in bytes of stdout and stderr in the trial's folder, before it prints.
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

    ``metrics`` holds what the user reported, checked and plain (nested dicts of numbers, strings,
    booleans, None, lists). `tunemq_shared.trial.results.full_result` computes the automatic keys
    from the other fields, so that messages need not carry them. ``is_saved``: the checkpoint that
    contains it is saved next.
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
    is_saved: bool = False


class CheckpointWritten(Message, frozen=True, tag="written"):
    """A checkpoint is complete and hashed on its node's disk; its upload begins.

    It contains the result of ``step``. ``key`` is ``<trial's folder>/checkpoint_<attempt>-<n>``, on
    the disk and in the store; ``sha256`` is that of the manifest on the disk; ``size`` the bytes of
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

    If the trial process wrote into the store itself (a local folder), no CheckpointWritten comes
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
    """A written checkpoint will never be committed: the node gave up its upload."""

    trial: str
    attempt: int
    key: str
    reason: str
    at: float


class CheckpointDamaged(Message, frozen=True, tag="damaged"):
    """The node could not restore a trial from ``key`` and takes ``instead``; empty for none.

    ``attempt`` is the attempt that tried.
    """

    trial: str
    attempt: int
    key: str
    reason: str
    instead: str


class TrialWaits(Message, frozen=True, tag="waits"):
    """A trial waits for the store, or for a GPU.

    ``what`` is ``save`` or ``restore``; ``code`` or ``device`` before its process starts; empty
    when the wait ends.
    """

    trial: str
    attempt: int
    what: str
    reason: str


class TrialPaused(Message, frozen=True, tag="paused"):
    """The trainable ended because its trial is to pause; due checkpoints are saved."""

    trial: str
    attempt: int


class TrialFinished(Message, frozen=True, tag="finished"):
    """The trainable ended by itself or at a stop criterion; its last result is the final one."""

    trial: str
    attempt: int


#: `TrialFailed.kind` if a node lost its forkserver or has no process left: not the trial's fault.
FORKSERVER_LOST: Final = "forkserver"


class TrialFailed(Message, frozen=True, tag="failed"):
    """The trainable raised, or could not be loaded or restored.

    ``kind`` is one of ``user`` (its code), ``metric`` (what it reported, or what else its process
    sent), ``load`` (its code or parameters could not be loaded), ``fetch`` (its node could not read
    them from the store), ``disk`` (its node could not write them to its disk), ``start`` (its node
    could not start a process for it), ``restore`` (its checkpoints are damaged), ``storage`` (a
    checkpoint could not be saved, or its store is unavailable), ``memory`` (more than its limit, or
    the machine's), ``cuda_memory`` (a GPU's), ``processes`` (more than its limit), ``time_limit``
    (a step took too long), ``trial_limit`` (the trial's total time is used up), ``stalled`` (too
    long without a report), ``forkserver`` (its node lost the process that forks trial processes, or
    had no process or memory for another one).
    ``output`` is the end of what it printed, for people. ``is_shared``, of a ``forkserver``: other
    trials, of any experiment, were on that node.
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
    """The trial process ended without reporting the trial's end: by a signal or an exit code.

    ``cause`` comes from the last output: ``memory`` if the machine had none left, ``cuda_memory``
    if a GPU had none left, else empty. ``output`` is the end of the output, for people.
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
    """The slot is free: the whole process tree is gone, or the process waits to be reused."""

    trial: str
    attempt: int


class DevicesUsed(Message, frozen=True, tag="used"):
    """What an attempt used of each of its GPUs; sent before its SlotFreed."""

    trial: str
    attempt: int
    devices: tuple[DeviceUse, ...]


class LogMatched(Message, frozen=True, tag="logged"):
    """A line that the trial, or a child of it, printed matches a log policy's ``pattern``.

    Sent once per pattern and attempt, before the TrialFailed or TrialProcessDied of the attempt.
    ``line`` is the beginning of the line, without control characters.
    """

    trial: str
    attempt: int
    pattern: str
    line: str
    at: float


class NodeWarned(Message, frozen=True, tag="warned"):
    """A warning of the node, of no particular trial, for the person at the terminal.

    ``has_leftovers``: the store may now hold objects that nothing refers to.
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

# --- events that the scheduler makes --------------------------------------------------------------


class Tick(Message, frozen=True, tag="tick"):
    """Time passed: schedulers have run this experiment for ``elapsed`` seconds, over all runs."""

    elapsed: float


class Gpu(Message, frozen=True):
    """A GPU of a node; ``memory`` in bytes, 0 if unknown."""

    uuid: str
    model: str = ""
    memory: float = 0.0


class NodeJoined(Message, frozen=True, tag="joined"):
    """A node instance offers its resources (name to amount).

    ``gpus``: its devices, if they are known individually. ``is_shared``: other experiments use the
    node too, and this one may use nothing of it before an offer (`NodeOffered`). ``withheld``: the
    devices on which no trial may begin now; ``is_ending``: none may begin on it, see
    `DevicesWithheld`.
    """

    instance_id: str
    node: str
    hostname: str
    node_ip: str
    resources: dict[str, float]
    gpus: tuple[Gpu, ...] = ()
    is_shared: bool = False
    withheld: dict[str, str] = {}
    is_ending: bool = False


class NodeOffered(Message, frozen=True, tag="offered"):
    """The ``n``-th offer of a shared node: the total that this experiment may hold from now on.

    ``devices`` are the GPUs in it by UUID, and the share of each. While the experiment holds more
    than that, nothing is placed there; with ``preempt_grace_s`` its trials are preempted and have
    that many seconds to save.
    """

    instance_id: str
    n: int
    resources: dict[str, float]
    devices: dict[str, float] = {}
    preempt_grace_s: float | None = None


class NodeLost(Message, frozen=True, tag="lost"):
    """A node instance is silent for too long: its trials may start on other nodes.

    ``is_dead``: it will not come back (its node restarted, or it ended), so that the scheduler can
    forget it. ``is_shared``: trials of other experiments were on it, or may have been.
    """

    instance_id: str
    reason: str
    is_dead: bool = False
    is_shared: bool = False


class NodeReturned(Message, frozen=True, tag="returned"):
    """A lost node instance sends again: it keeps the trials that no other node took over."""

    instance_id: str


class DevicesWithheld(Message, frozen=True, tag="withheld"):
    """On these devices of a node no trial begins from now on; on all others it may (again).

    ``devices``: their UUIDs, and the reasons, for people. Trials that have one continue on it.
    ``is_ending``: the node was told to end, so no trial begins on it at all.
    """

    instance_id: str
    devices: dict[str, str]
    is_ending: bool = False


class ExperimentResumed(Message, frozen=True, tag="resumed"):
    """A scheduler continues this journal; ``run`` counts its schedulers, the first is 1.

    An interrupted or exhausted search continues; a stopped one too, if it is cold. ``unfinished``:
    trials that have not ended continue; else they end where they are. ``errored``: what happens to
    trials in ERROR: empty (they stay so), ``resume`` (from their last checkpoint) or ``restart``
    (from their beginning, a new lineage). ``is_cold``: no node of the run before is left, nor any
    of its trial processes. ``settings`` are the rules from now on, packed; empty if they are
    unchanged. ``also`` are further ended trials that continue from their last checkpoint.
    ``attempts_from``: trials start with higher attempts than this, because the run before may have
    started attempts that the journal does not contain (it is a copy).
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
    """Events ``first`` to ``last`` of a node instance follow; ``cursor`` is their stream entry."""

    instance_id: str
    first: int
    last: int
    cursor: str


class ConfigSuggested(Message, frozen=True, tag="suggested"):
    """The search algorithm suggested the ``n``-th configuration (from 0), for a new trial.

    `tunemq_shared.code.config_packing` packs ``config``; ``resources`` is what a trial of it needs.
    """

    n: int
    trial: str
    config: bytes
    tag: str
    resources: dict[str, float]


class SearchExhausted(Message, frozen=True, tag="exhausted"):
    """The search algorithm has no more configurations; no ConfigSuggested follows."""


class SearchStalled(Message, frozen=True, tag="stalled"):
    """No trial runs, and the trial scheduler let none of those that could start begin."""


class TrialChosen(Message, frozen=True, tag="chosen"):
    """The trial scheduler chose which waiting trial starts next."""

    trial: str


class ActionTaken(Message, frozen=True, tag="action"):
    """A trial scheduler acted on a trial, whichever event it was asked about.

    ``action`` is one of `ACTIONS`. An EXPLOIT lets the trial continue from the state of ``source``:
    from its checkpoint with the key ``checkpoint``, or if that is empty from the newest that its
    results so far announced. ``config`` is the trial's new configuration, packed; if it is empty
    the trial keeps its own. ``resources`` is the new request of a SET_RESOURCES.
    """

    trial: str
    action: str
    reason: str
    source: str = ""
    checkpoint: str = ""
    config: bytes = b""
    resources: dict[str, float] = {}


class StopRequested(Message, frozen=True, tag="stop"):
    """A user asked to stop a trial, or the whole experiment (``trial`` is None)."""

    trial: str | None
    reason: str


class CheckpointsForgotten(Message, frozen=True, tag="forgotten"):
    """A user asked that a trial start from its beginning the next time it starts."""

    trial: str


class RunInterrupted(Message, frozen=True, tag="interrupted"):
    """The scheduler was asked to end: trial processes stop, trials stay to be resumed."""

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
    | SearchStalled
    | TrialChosen
    | ActionTaken
    | StopRequested
    | CheckpointsForgotten
    | RunInterrupted
)

# --- answers of algorithms to an event ------------------------------------------------------------

#: No DecisionMade means CONTINUE.
CONTINUE, PAUSE, STOP = "CONTINUE", "PAUSE", "STOP"
#: What an `ActionTaken` may do beside STOP and PAUSE.
RESUME, EXPLOIT = "RESUME", "EXPLOIT"
SET_CONFIG, SET_RESOURCES = "SET_CONFIG", "SET_RESOURCES"
#: All actions.
ACTIONS = (STOP, PAUSE, RESUME, EXPLOIT, SET_CONFIG, SET_RESOURCES)


class DecisionMade(Message, frozen=True, tag="decided"):
    """A trial scheduler or stopper decided something other than CONTINUE about a result."""

    trial: str
    step: int
    decision: str
    reason: str


class HorizonSet(Message, frozen=True, tag="horizon"):
    """How far the trial may run before its next decision."""

    trial: str
    horizon: Horizon


AlgorithmAnswer = DecisionMade | HorizonSet


class JournalRecord(msgspec.Struct, frozen=True, array_like=True):
    """One record of the journal: an event and the algorithms' answers."""

    event: Event
    answers: tuple[AlgorithmAnswer, ...] = ()


# --- orders to a node (`tunemq_shared.protocol.node_orders`) --------------------------------------

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
