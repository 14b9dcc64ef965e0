"""Requests of a farm's users to its scheduler: one struct per kind of request.

A request is an entry of the stream `redis_keys.REQUESTS`: the version, an id that the client made,
the submitter, the kind (the struct's tag), the time of sending, and the struct as msgpack, signed
with all of these as context (`tunemq_scheduler.api.request_signing`). Decoders ignore unknown
fields, so that a small addition needs no new version.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from tunemq_shared.protocol.message_limits import Name
from tunemq_shared.protocol.node_orders import BlobRef

#: Version of requests and answers; a mismatch is rejected with both versions named.
REQUESTS_VERSION: Final = 2
#: The most bytes of a request; larger data goes into a blob.
MAX_REQUEST_BYTES: Final = 2**18
#: The most bytes of a log in one answer.
MAX_PAGE_BYTES: Final = 2**18
#: The highest priority of an experiment; the lowest is its negative.
MAX_PRIORITY: Final = 1_000_000


class FarmRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The base of all requests."""


class ScriptCode(msgspec.Struct, frozen=True, kw_only=True, tag="script", tag_field="kind"):
    """A script that defines a Tuner.

    Attributes:
        bundle: The folder that holds the script.
        script: Its path in that folder, with ``/``.
        tuner: The name of its Tuner.
    """

    bundle: BlobRef
    script: str
    tuner: str = "tuner"


class PickledCode(msgspec.Struct, frozen=True, kw_only=True, tag="tuner", tag_field="kind"):
    """A Tuner that `Tuner.fit(address=...)` pickled.

    Attributes:
        tuner: The pickle.
        bundle: The user's modules that it imports; None if there are none.
    """

    tuner: BlobRef
    bundle: BlobRef | None = None


SubmittedCode = ScriptCode | PickledCode


class ExperimentEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """The environment in which an experiment and its trials run.

    Attributes:
        python: The interpreter, as nodes find it; empty for the farm's.
        variables: Environment variables, added to those of each node.
        preload: Modules that the forkserver imports; None for those that the code imports.
    """

    python: str = ""
    variables: dict[str, str] = {}
    preload: tuple[str, ...] | None = None


class SubmitExperiment(FarmRequest, frozen=True, kw_only=True, tag="submit"):
    """Queue an experiment.

    Attributes:
        name: A safe name; with ``is_made_up`` the scheduler appends a number if it is taken.
        code: The script or the pickled Tuner.
        priority: Higher ones run first; at most `MAX_PRIORITY`.
        settings: The environment of its processes.
    """

    name: Name
    code: SubmittedCode
    is_made_up: bool = False
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    settings: ExperimentEnvironment = ExperimentEnvironment()


class ListExperiments(FarmRequest, frozen=True, kw_only=True, tag="ls"):
    """List experiments.

    Attributes:
        owner: List only this owner's; empty for everyone's.
        is_all: Include ended experiments.
    """

    owner: Name = ""
    is_all: bool = True


class ExperimentRequest(FarmRequest, frozen=True, kw_only=True):
    """A request about one experiment.

    Attributes:
        id: Its id, which a later experiment of this name does not have; empty if unknown.
    """

    name: Name
    id: Name = ""


class ShowExperiment(ExperimentRequest, frozen=True, kw_only=True, tag="show"):
    """Show the state of an experiment and of its trials.

    Attributes:
        trials: The most rows of trials; running ones first, then the newest.
    """

    trials: int = 100


class ReadLog(ExperimentRequest, frozen=True, kw_only=True, tag="logs"):
    """Read a page of what an experiment, or one of its trials, printed.

    Attributes:
        trial: Its id or name; empty for the experiment's own progress lines.
        offset: In bytes; negative ones count from the end.
        limit: The most bytes; at most `MAX_PAGE_BYTES`.
    """

    trial: Name = ""
    offset: int = 0
    limit: int = MAX_PAGE_BYTES


class StopExperiment(ExperimentRequest, frozen=True, kw_only=True, tag="stop"):
    """Stop an experiment, or one trial of it; its state is saved."""

    trial: Name = ""


class PauseExperiment(ExperimentRequest, frozen=True, kw_only=True, tag="pause"):
    """Pause an experiment and free its slots."""


class ResumeExperiment(ExperimentRequest, frozen=True, kw_only=True, tag="resume"):
    """Continue an experiment that was paused, was stopped, or failed."""


class RetryTrials(FarmRequest, frozen=True, kw_only=True, tag="retry"):
    """Run trials in ERROR again, from their last checkpoints: one trial, or all of them."""

    name: Name
    trial: Name = ""


class RemoveExperiment(FarmRequest, frozen=True, kw_only=True, tag="rm"):
    """Forget an ended experiment.

    Attributes:
        with_files: Also remove its results and checkpoints.
    """

    name: Name
    with_files: bool = False


class ExplainState(FarmRequest, frozen=True, kw_only=True, tag="why"):
    """Explain why a trial (or, without one, the experiment) waits or ended."""

    name: Name
    trial: Name = ""


class DescribeFarm(FarmRequest, frozen=True, kw_only=True, tag="farm"):
    """Describe the farm to a submitter: what one needs to submit to it."""


class ListNodes(FarmRequest, frozen=True, kw_only=True, tag="nodes"):
    """List the farm's nodes."""


class DrainNode(FarmRequest, frozen=True, kw_only=True, tag="drain"):
    """Place nothing new on a node; its trials save and continue on other nodes."""

    node: Name


class ResumeNode(FarmRequest, frozen=True, kw_only=True, tag="resume-node"):
    """Place trials again on a node that was drained or set aside."""

    node: Name


class RetireNode(FarmRequest, frozen=True, kw_only=True, tag="retire"):
    """Drain a node and end it."""

    node: Name


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
