"""What a farm's scheduler answers its users: one struct for each kind of answer.

Times are Unix times on the scheduler's machine. As JSON these structs are what ``--json`` prints.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

import msgspec

from tunemq_shared.protocol.farm_requests import REQUESTS_VERSION


class ExperimentState(StrEnum):
    """Where an experiment of a farm is in its life."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    STOPPING = "STOPPING"
    FINISHED = "FINISHED"
    STOPPED = "STOPPED"
    FAILED = "FAILED"

    @property
    def is_over(self) -> bool:
        """Whether nothing happens to it any more unless a person asks for it."""
        return self in _OVER


_OVER = frozenset({ExperimentState.FINISHED, ExperimentState.STOPPED, ExperimentState.FAILED})


class FarmAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The base of all answers."""


class ExperimentSubmitted(FarmAnswer, frozen=True, kw_only=True):
    """An experiment is in the queue.

    Attributes:
        name: as it is called from now on.
        ahead: how many wait before it.
    """

    name: str
    id: str
    ahead: int = 0


class ExperimentRow(FarmAnswer, frozen=True, kw_only=True):
    """An experiment in a list.

    Attributes:
        reason: why it is in its state, in words.
        trouble: why its process starts again, where one has failed and none has begun since; or
            for how long it has not answered.
        trials: how many are in each state (PENDING, RUNNING, PAUSED, TERMINATED, ERROR).
        total: how many there will be; None where that is open or not known yet.
        position: how many wait before it, while it is queued.
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
    """Answers `ListExperiments`: those that run, those that wait in their order, then the rest."""

    experiments: tuple[ExperimentRow, ...]


class DeviceUseRow(FarmAnswer, frozen=True, kw_only=True):
    """What a trial used of a GPU; see `tunemq_shared.protocol.device_use.DeviceUse`."""

    uuid: str
    model: str = ""
    seconds: float = 0.0
    share: float = 1.0
    utilisation: float | None = None
    memory_peak: float | None = None
    energy_j: float | None = None


class TrialRow(FarmAnswer, frozen=True, kw_only=True):
    """A trial in a table.

    Attributes:
        step: the iterations done.
        metric: the newest value of the search's metric.
        preemptions: how often it gave way to others that came first.
        repeated: how many steps it did again that were done before it was stopped or lost.
        note: why it waits, or the last line of its error.
        devices_used: what it used of each GPU, without what it does now.
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
    devices_used: tuple[DeviceUseRow, ...] = ()


class ExperimentDetail(FarmAnswer, frozen=True, kw_only=True):
    """Answers `ShowExperiment`.

    Attributes:
        metric: what is optimised; empty where nothing is.
        best: the best trial so far.
        trials: as many as were asked for.
        hidden: how many more there are.
        folder: of its results, on the scheduler's machine.
        store: of its checkpoints.
        notes: what a person should know, such as why it waits.
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
    """Answers `ReadLog`.

    Attributes:
        data: the bytes from ``offset`` on, without what is no whole character at its end.
        offset: where the page begins in fact; more than was asked for where the beginning is gone.
        end: where the next page begins.
        size: of the whole log now.
        is_over: whether nothing more will come once ``end`` is ``size``.
        state: of the experiment; and ``reason`` why.
    """

    data: bytes
    offset: int
    end: int
    size: int
    is_over: bool
    state: ExperimentState
    reason: str = ""


class RequestDone(FarmAnswer, frozen=True, kw_only=True):
    """It was done; says what, in a line for people, and the state that the experiment is in now."""

    text: str
    state: ExperimentState | None = None


class Explanation(FarmAnswer, frozen=True, kw_only=True):
    """Answers `ExplainState`, in lines for people, the most important one first."""

    lines: tuple[str, ...]


class GpuRow(FarmAnswer, frozen=True, kw_only=True):
    """A GPU of a node; ``used`` is the share of it that trials have, ``memory`` in bytes.

    ``withheld``: why no trial begins on it now; None where it is used as always. ``foreign``: what
    processes that are not of the farm hold of it.
    """

    uuid: str
    model: str = ""
    memory: int = 0
    used: float = 0.0
    withheld: str | None = None
    foreign: str = ""


class NodeRow(FarmAnswer, frozen=True, kw_only=True):
    """A node in a list.

    Attributes:
        state: ready, draining, drained, set aside (its disk takes no trial), silent or gone.
        health: "ok", or what is wrong with it.
        total, used: cpu, gpu, memory and custom resources; a GPU that is withheld counts while a
            trial has it.
        trials: how many it hosts.
        version: of TuneMQ there.
        since: when this attempt introduced itself.
        refused: how many messages it refused, because they were not what its scheduler said.
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
    """How many messages of a kind were refused, for a reason; see `refusals.Refused`.

    Attributes:
        node: who refused them; empty for the scheduler.
    """

    node: str = ""
    kind: str
    reason: str
    times: int


class StoreTroubleRow(FarmAnswer, frozen=True, kw_only=True):
    """A process of the scheduler that an object store fails; see `store_traffic.StoreTraffic`.

    Attributes:
        experiment: whose process it is; empty for the scheduler itself.
        failing_s: for so long no request has succeeded; 0 while all do.
        problem: the last error.
        copy_behind_s: for so long the copy of the journal in the store has lacked turns.
    """

    experiment: str = ""
    failing_s: float = 0.0
    problem: str = ""
    copy_behind_s: float = 0.0


class NodeList(FarmAnswer, frozen=True, kw_only=True):
    """Answers `ListNodes`.

    Attributes:
        refused: what the scheduler and its nodes did not believe, since each began.
        stores: which processes of the scheduler an object store fails now.
    """

    nodes: tuple[NodeRow, ...]
    rejected: tuple[RejectionRow, ...] = ()
    stores: tuple[StoreTroubleRow, ...] = ()


class FarmDescription(FarmAnswer, frozen=True, kw_only=True):
    """Answers `DescribeFarm`.

    Attributes:
        store: where blobs go, as its address is for everybody.
        scheduler: who it is, for people.
        results: the folder of all experiments on the scheduler's machine.
        python, cloudpickle: of the scheduler, for what is pickled.
    """

    store: str
    scheduler: str
    results: str = ""
    python: str = ""
    cloudpickle: str = ""


_NOTHING: Final = msgspec.Raw(b"\xc0")  # msgpack's nil


class RequestRejection(msgspec.Struct, frozen=True, kw_only=True):
    """A request was not done.

    Attributes:
        is_wrong_use: what was asked for is of no use (an unknown name, a value that cannot be);
            else it is not possible now, or went wrong.
    """

    text: str
    is_wrong_use: bool = False


class FarmReply(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in `wire.answer`: an answer, or why there is none.

    Attributes:
        tunemq: the version of the scheduler's TuneMQ.
    """

    version: int = REQUESTS_VERSION
    tunemq: str = ""
    answer: msgspec.Raw = _NOTHING
    rejection: RequestRejection | None = None


class FarmAnnouncement(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in `wire.FARM`, as JSON: that somebody takes requests, and of which version.

    It is not sealed, since it says nothing on which anybody acts but to ask.

    Attributes:
        term: of the scheduler that wrote it.
    """

    version: int = REQUESTS_VERSION
    tunemq: str
    term: int
