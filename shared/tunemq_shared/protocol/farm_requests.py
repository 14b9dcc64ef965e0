"""What a farm's users ask of its scheduler: one struct for each kind of request.

A request travels as an entry of the stream `wire.REQUESTS`: the version, an id that the client
made, who asks, the kind (the struct's tag), when it was sent, and the struct as msgpack, sealed
with all of these as its context (`tunemq_scheduler.api.request_signing`). Fields of a later version
are ignored, so that a small addition needs no new version.
"""

from __future__ import annotations

from typing import Final

import msgspec

from tunemq_shared.protocol.node_orders import BlobRef

#: Of requests and of their answers; a difference is refused, both versions named.
REQUESTS_VERSION: Final = 2
#: So many bytes has a request at most; what is larger is a blob.
MAX_REQUEST_BYTES: Final = 2**18
#: So many bytes of a log are in one answer at most.
MAX_PAGE_BYTES: Final = 2**18


class FarmRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The base of all requests."""


class ScriptCode(msgspec.Struct, frozen=True, kw_only=True, tag="script", tag_field="kind"):
    """A script that defines a Tuner.

    Attributes:
        bundle: the folder in which it lies.
        script: its path in there, with ``/``.
        tuner: the name of its Tuner.
    """

    bundle: BlobRef
    script: str
    tuner: str = "tuner"


class PickledCode(msgspec.Struct, frozen=True, kw_only=True, tag="tuner", tag_field="kind"):
    """A Tuner that was pickled by `Tuner.fit(address=...)`.

    Attributes:
        tuner: the pickle.
        bundle: the modules that it imports; None where there are none of the user's own.
    """

    tuner: BlobRef
    bundle: BlobRef | None = None


SubmittedCode = ScriptCode | PickledCode


class ExperimentEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """In what surroundings an experiment and its trials run.

    Attributes:
        python: the interpreter, as nodes find it; empty for that of the farm.
        variables: of the environment, beside what each node has.
        preload: modules that trial hosts are forked with; None for those that its code imports.
    """

    python: str = ""
    variables: dict[str, str] = {}
    preload: tuple[str, ...] | None = None


class SubmitExperiment(FarmRequest, frozen=True, kw_only=True, tag="submit"):
    """Queue an experiment.

    Attributes:
        name: safe; where ``is_made_up``, a number is put behind it if it is taken.
        priority: higher ones first.
    """

    name: str
    code: SubmittedCode
    is_made_up: bool = False
    priority: int = 0
    settings: ExperimentEnvironment = ExperimentEnvironment()


class ListExperiments(FarmRequest, frozen=True, kw_only=True, tag="ls"):
    """Which experiments are there?

    Attributes:
        owner: only this one's; empty for everybody's.
        is_all: those that are over, too.
    """

    owner: str = ""
    is_all: bool = True


class ShowExperiment(FarmRequest, frozen=True, kw_only=True, tag="show"):
    """How is this experiment, and how are its trials?

    Attributes:
        trials: how many rows of trials at most; those that run first, then the newest.
    """

    name: str
    trials: int = 100


class ReadLog(FarmRequest, frozen=True, kw_only=True, tag="logs"):
    """A page of what an experiment, or one of its trials, has printed.

    Attributes:
        trial: its id or name; empty for the experiment's own progress lines.
        offset: in bytes; negative ones count from the end.
        limit: bytes at most; never more than `MAX_PAGE_BYTES`.
    """

    name: str
    trial: str = ""
    offset: int = 0
    limit: int = MAX_PAGE_BYTES


class StopExperiment(FarmRequest, frozen=True, kw_only=True, tag="stop"):
    """Stop an experiment, or one trial of it; what it has is saved."""

    name: str
    trial: str = ""


class PauseExperiment(FarmRequest, frozen=True, kw_only=True, tag="pause"):
    """Have an experiment give its slots back until it is resumed."""

    name: str


class ResumeExperiment(FarmRequest, frozen=True, kw_only=True, tag="resume"):
    """Go on with an experiment that was paused, stopped, or failed."""

    name: str


class RetryTrials(FarmRequest, frozen=True, kw_only=True, tag="retry"):
    """Run trials in ERROR again, from their last checkpoints: one trial, or all of them."""

    name: str
    trial: str = ""


class RemoveExperiment(FarmRequest, frozen=True, kw_only=True, tag="rm"):
    """Forget an experiment that is over.

    Attributes:
        with_files: remove its results and checkpoints, too.
    """

    name: str
    with_files: bool = False


class ExplainState(FarmRequest, frozen=True, kw_only=True, tag="why"):
    """Why does this wait, or why did it end? Without a trial: the experiment."""

    name: str
    trial: str = ""


class DescribeFarm(FarmRequest, frozen=True, kw_only=True, tag="farm"):
    """What does one have to know who submits to this farm?"""


class ListNodes(FarmRequest, frozen=True, kw_only=True, tag="nodes"):
    """Which nodes are there?"""


class DrainNode(FarmRequest, frozen=True, kw_only=True, tag="drain"):
    """Place nothing new on a node; what runs there is saved and goes on elsewhere."""

    node: str


class ResumeNode(FarmRequest, frozen=True, kw_only=True, tag="resume-node"):
    """Place trials on a node again that was drained or set aside."""

    node: str


class RetireNode(FarmRequest, frozen=True, kw_only=True, tag="retire"):
    """Drain a node, and have it end."""

    node: str


ReadRequest = ListExperiments | ShowExperiment | ReadLog | ExplainState | ListNodes | DescribeFarm
ChangeRequest = (
    SubmitExperiment
    | StopExperiment
    | PauseExperiment
    | ResumeExperiment
    | RetryTrials
    | RemoveExperiment
    | DrainNode
    | ResumeNode
    | RetireNode
)
AnyRequest = ReadRequest | ChangeRequest
