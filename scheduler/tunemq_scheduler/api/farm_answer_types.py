"""The answers of a farm's scheduler to its users: one struct for each kind of answer.

Times are Unix times on the scheduler's machine. ``--json`` prints these structs as JSON.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

import msgspec

from tunemq_shared.base.depth_and_integer_limits import beyond_limits
from tunemq_shared.protocol.farm_requests import REQUESTS_VERSION

#: How the reason of an experiment begins that waits for a scheduler that can run it.
WAITS: Final = "waits: "


class ExperimentState(StrEnum):
    """The states of an experiment on a farm."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    STOPPING = "STOPPING"
    FINISHED = "FINISHED"
    STOPPED = "STOPPED"
    FAILED = "FAILED"

    @property
    def is_over(self) -> bool:
        """Whether the experiment has ended: its state changes only on a user's request."""
        return self in _OVER


_OVER = frozenset({ExperimentState.FINISHED, ExperimentState.STOPPED, ExperimentState.FAILED})


class FarmAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of all answers."""


class ExperimentSubmitted(FarmAnswer, frozen=True, kw_only=True):
    """Confirms that an experiment is in the queue.

    Attributes:
        name: the experiment's name from now on.
        ahead: how many experiments wait before it.
    """

    name: str
    id: str
    ahead: int = 0


class ExperimentRow(FarmAnswer, frozen=True, kw_only=True):
    """One experiment in a list.

    Attributes:
        reason: why it is in its state, in words.
        trouble: why its process restarts, if one has failed and no other has started since; or for
            how long its process has not answered.
        trials: the number of trials in each state (PENDING, RUNNING, PAUSED, TERMINATED, ERROR).
        total: the final number of trials; None if it is unlimited or unknown.
        position: how many experiments wait before it, while it is queued.
    """

    name: str
    id: str
    owner: str
    priority: int
    state: ExperimentState
    reason: str = ""
    trouble: str = ""
    submitted: float
    started: float | None = None
    ended: float | None = None
    trials: dict[str, int] = {}
    total: int | None = None
    position: int | None = None


class ExperimentList(FarmAnswer, frozen=True, kw_only=True):
    """Answer to `ListExperiments`: running experiments, then queued ones in order, then others."""

    experiments: tuple[ExperimentRow, ...]


class DeviceUseRow(FarmAnswer, frozen=True, kw_only=True):
    """A trial's use of one GPU; see `tunemq_shared.protocol.device_use.DeviceUse`."""

    uuid: str
    model: str = ""
    seconds: float = 0.0
    share: float = 1.0
    utilisation: float | None = None
    memory_peak: float | None = None
    energy_j: float | None = None


class TrialRow(FarmAnswer, frozen=True, kw_only=True):
    """One trial in a table.

    Attributes:
        step: the number of finished iterations.
        metric: the newest value of the search's metric.
        preemptions: how often it was paused to free slots for another experiment.
        repeated: how many steps it ran again because it was stopped or lost after them.
        note: why it waits, or the last line of its error.
        decision: the newest decision about it, in words.
        devices_used: its use of each GPU, without the current attempt.

    Raises:
        ValueError: the configuration is nested too deeply to be sent on.
    """

    trial: str
    name: str
    status: str
    node: str = ""
    step: int = 0
    metric: float | None = None
    config: dict[str, Any] = {}
    time_total_s: float = 0.0
    failures: int = 0
    preemptions: int = 0
    repeated: int = 0
    note: str = ""
    decision: str = ""
    devices_used: tuple[DeviceUseRow, ...] = ()

    def __post_init__(self) -> None:
        if problem := beyond_limits(self.config, "the configuration"):
            raise ValueError(problem)


class ExperimentDetail(FarmAnswer, frozen=True, kw_only=True):
    """Answer to `ShowExperiment`.

    Attributes:
        metric: the metric to optimise; empty if there is none.
        best: the best trial so far.
        trials: the requested number of trials.
        hidden: how many more trials there are.
        folder: the results folder, on the scheduler's machine.
        store: the address of the checkpoint store.
        notes: messages for the user, such as why the experiment waits.
    """

    experiment: ExperimentRow
    metric: str = ""
    mode: str = ""
    best: TrialRow | None = None
    trials: tuple[TrialRow, ...] = ()
    hidden: int = 0
    folder: str = ""
    store: str = ""
    resources: dict[str, float] = {}
    notes: tuple[str, ...] = ()


class LogPage(FarmAnswer, frozen=True, kw_only=True):
    """Answer to `ReadLog`.

    Attributes:
        data: the bytes from ``offset`` on, without an incomplete character at the end.
        offset: the actual start of the page; larger than requested if that part was deleted.
        end: the start of the next page.
        size: the current size of the log.
        is_over: whether the log is complete once ``end`` equals ``size``.
        state: the experiment's state.
        reason: why it is in that state.
    """

    data: bytes
    offset: int
    end: int
    size: int
    is_over: bool
    state: ExperimentState
    reason: str = ""


class RequestDone(FarmAnswer, frozen=True, kw_only=True):
    """Confirms a request: a message for the user, and the experiment's state after it."""

    text: str
    state: ExperimentState | None = None


class DecisionRow(FarmAnswer, frozen=True, kw_only=True):
    """A decision about a trial; see `tunemq_scheduler.core.trial_decisions.TrialDecision`."""

    step: int
    action: str
    reason: str = ""
    source: str = ""
    lineage: int = 0
    elapsed_s: float = 0.0


class Explanation(FarmAnswer, frozen=True, kw_only=True):
    """Answer to `ExplainState`: messages for the user, the most important one first.

    Attributes:
        decisions: the newest decisions about the trial, oldest first; ``lines`` has them, too.
    """

    lines: tuple[str, ...]
    decisions: tuple[DecisionRow, ...] = ()


class GpuRow(FarmAnswer, frozen=True, kw_only=True):
    """A GPU of a node.

    Attributes:
        used: the fraction of it that trials hold.
        memory: its memory, in bytes.
        withheld: why no trial starts on it now; None if it is in normal use.
        foreign: what processes outside the farm use of it.
    """

    uuid: str
    model: str = ""
    memory: int = 0
    used: float = 0.0
    withheld: str | None = None
    foreign: str = ""


class NodeRow(FarmAnswer, frozen=True, kw_only=True):
    """One node in a list.

    Attributes:
        state: ready, draining, drained, set aside (it accepts no trial), silent or gone.
        health: "ok", or the problem.
        total, used: cpu, gpu, memory and custom resources. A withheld GPU counts while a trial
            holds it.
        trials: the number of its trials.
        version: its version of TuneMQ.
        since: when this node instance registered.
        rejected: how many messages it rejected (bad signature, wrong version, repeated).
    """

    node: str
    instance_id: str
    state: str
    health: str = "ok"
    total: dict[str, float] = {}
    used: dict[str, float] = {}
    gpus: tuple[GpuRow, ...] = ()
    trials: int = 0
    version: str = ""
    since: float = 0.0
    rejected: int = 0


class RejectionRow(FarmAnswer, frozen=True, kw_only=True):
    """The number of rejected messages of one kind, for one reason.

    Attributes:
        node: the node that rejected them; empty for the scheduler.
    """

    node: str = ""
    kind: str
    reason: str
    times: int


class StoreTroubleRow(FarmAnswer, frozen=True, kw_only=True):
    """A process of the scheduler whose object store fails; see `store_traffic.StoreTraffic`.

    Attributes:
        experiment: the experiment whose process it is; empty for the scheduler itself.
        failing_s: seconds since the last successful request; 0 while all succeed.
        problem: the last error.
        copy_behind_s: seconds for which the journal's copy in the store has lacked turns.
    """

    experiment: str = ""
    failing_s: float = 0.0
    problem: str = ""
    copy_behind_s: float = 0.0


class NodeList(FarmAnswer, frozen=True, kw_only=True):
    """Answer to `ListNodes`.

    Attributes:
        rejected: the messages that the scheduler and its nodes rejected, since each of them
            started.
        stores: the scheduler processes whose object store fails now.
    """

    nodes: tuple[NodeRow, ...]
    rejected: tuple[RejectionRow, ...] = ()
    stores: tuple[StoreTroubleRow, ...] = ()


class FarmDescription(FarmAnswer, frozen=True, kw_only=True):
    """Answer to `DescribeFarm`.

    Attributes:
        store: the public address of the blob store.
        scheduler: a readable name of the scheduler.
        results: the folder of all experiments on the scheduler's machine.
        python, cloudpickle: the scheduler's versions, for pickling.
    """

    store: str
    scheduler: str
    results: str = ""
    python: str = ""
    cloudpickle: str = ""


_NOTHING: Final = msgspec.Raw(b"\xc0")  # msgpack's nil


class RequestRejection(msgspec.Struct, frozen=True, kw_only=True):
    """Says that the scheduler did not execute a request.

    Attributes:
        is_wrong_use: the request is invalid (an unknown name, an impossible value); otherwise it is
            impossible now, or failed.
    """

    text: str
    is_wrong_use: bool = False


class FarmReply(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `redis_keys.answer`: an answer, or the reason why there is none.

    Attributes:
        tunemq: the version of the scheduler's TuneMQ.
    """

    version: int = REQUESTS_VERSION
    tunemq: str = ""
    answer: msgspec.Raw = _NOTHING
    rejection: RequestRejection | None = None


class FarmAnnouncement(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `redis_keys.FARM`, as JSON: says that a scheduler accepts requests.

    It names the scheduler's version, and is not signed: clients use it only to decide whether to
    ask.

    Attributes:
        term: the term of the scheduler that wrote it.
    """

    version: int = REQUESTS_VERSION
    tunemq: str
    term: int
