"""`DesiredStateExecutor`: turns trial commands into each node's desired state."""

from __future__ import annotations

import re
from abc import abstractmethod

import msgspec

from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core.commands import (
    ContinueTrial,
    DropNode,
    PauseTrial,
    ReattachTrial,
    ReleaseTrial,
    StartTrial,
    StopTrial,
)
from tunemq_scheduler.transport.trial_executor import TrialExecutor
from tunemq_shared.base.errors import BugError, ConfigError
from tunemq_shared.protocol.message_limits import START_BYTES, check_size
from tunemq_shared.protocol.messages import TrialOrder, TrialSpec

_AboutHosted = ContinueTrial | StopTrial | PauseTrial | ReleaseTrial


class DesiredStateExecutor(TrialExecutor):
    """Turns each command into an order for the trial's node.

    Subclasses implement `_put` and `_release`, set ``_plan`` in `open`, and send changed orders at
    the end of a turn (`on_step_end`).
    """

    def __init__(self) -> None:
        self._plan: ExperimentPlan | None = None
        #: The current orders by node and trial, without start data.
        self._standing: dict[str, dict[str, TrialOrder]] = {}

    def start_trial(self, order: StartTrial) -> None:
        """Order a node to start a trial."""
        start = self._trial_spec(order)
        self._host(order, TrialOrder(order.trial, order.attempt, order.run_until, start=start))

    def continue_training(self, order: ContinueTrial) -> None:
        """Let a running trial continue to a new horizon."""
        if (standing := self._find(order)) is not None:
            self._host(order, msgspec.structs.replace(standing, run_until=order.run_until))

    def stop_trial(self, order: StopTrial) -> None:
        """Order the node to end a running trial."""
        if (standing := self._find(order)) is not None:
            self._host(order, msgspec.structs.replace(standing, stop=True))

    def pause_trial(self, order: PauseTrial) -> None:
        """Order the node to save a running trial and end its process, to resume later."""
        if (standing := self._find(order)) is not None:
            self._host(order, standing.paused(at_checkpoint=order.at_checkpoint))

    def release_trial(self, order: ReleaseTrial) -> None:
        """Forget a trial whose process has ended; the node learns of it with its next orders."""
        if self._find(order) is not None:
            del self._standing[order.instance_id][order.trial]
        self._release(order.instance_id, order.trial, order.attempt)

    def reattach_trial(self, order: ReattachTrial) -> None:
        """Order a returned node to keep running a trial, or to kill it."""
        start = order.start
        how = TrialOrder(start.trial, start.attempt, start.run_until, start=self._trial_spec(start))
        if not order.is_wanted:
            self._put(start.instance_id, msgspec.structs.replace(how, kill=True))
            return
        pause, at_checkpoint = order.pause, order.at_checkpoint
        self._host(
            start,
            msgspec.structs.replace(how, stop=order.stop, pause=pause, at_checkpoint=at_checkpoint),
        )

    def drop_node(self, order: DropNode) -> None:
        """Forget a node that is dead."""
        self._standing.pop(order.instance_id, None)

    @abstractmethod
    def _put(self, instance_id: str, order: TrialOrder) -> None:
        """Send an order to a node; ignore it if the node is lost, which the next events report."""

    @abstractmethod
    def _release(self, instance_id: str, trial: str, attempt: int) -> None:
        """Let a node forget a trial; ignore it if the node is lost."""

    def _find(self, order: _AboutHosted) -> TrialOrder | None:
        standing = self._standing.get(order.instance_id, {}).get(order.trial)
        return standing if standing is not None and standing.attempt == order.attempt else None

    def _host(self, about: StartTrial | _AboutHosted, order: TrialOrder) -> None:
        standing = msgspec.structs.replace(order, start=None)
        self._standing.setdefault(about.instance_id, {})[order.trial] = standing
        self._put(about.instance_id, order)

    def _trial_spec(self, order: StartTrial) -> TrialSpec:
        """Return the trial's start data as the node will decode it.

        Raises:
            ConfigError: it is too long, or the node could not decode it; names the field. If it
                were sent, the node would reject it repeatedly, and the trial would wait without a
                message.
        """
        start = msgspec.msgpack.encode(self._opened_plan.trial_spec(order))
        check_size(order.trial, len(start), START_BYTES)
        try:
            return msgspec.msgpack.decode(start, type=TrialSpec)
        except msgspec.ValidationError as problem:
            place = re.search(r"`\$\[(\d{1,3})\][^`]*`\Z", str(problem))
            field = TrialSpec.__struct_fields__[int(place[1])] if place else "a field"
            raise ConfigError(
                f"No node can start trial {order.trial}: {field}: {problem}. Give the setting that"
                " it comes from a value of the type that its documentation names."
            ) from problem

    @property
    def _opened_plan(self) -> ExperimentPlan:
        if self._plan is None:
            raise BugError("the executor was used before it was opened")
        return self._plan
