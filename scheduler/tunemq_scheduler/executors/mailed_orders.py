"""`MailedOrders`: orders about trials become what each node is to host."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Protocol

import msgspec

from tunemq_scheduler.core.commands import (
    ContinueTrial,
    PauseTrial,
    ReattachTrial,
    ReleaseTrial,
    StartTrial,
    StopTrial,
)
from tunemq_scheduler.executors.executor import TrialExecutor
from tunemq_scheduler.plan import ExperimentPlan
from tunemq_shared.conditions import Horizon
from tunemq_shared.errors import BugError, ConfigError
from tunemq_shared.messages import HostStart


class OrdersToNode(Protocol):
    """An experiment's orders to one node; see `tunemq_scheduler.executors.mailbox.Orders`."""

    def start(self, trial: str, epoch: int, run_until: Horizon, start: HostStart) -> None:
        """Host a trial."""

    def reattach(
        self,
        trial: str,
        epoch: int,
        run_until: Horizon,
        start: HostStart,
        *,
        pause: bool,
        stop: bool,
        at_checkpoint: bool = False,
    ) -> None:
        """Host a trial that the node may host already."""

    def kill(self, trial: str, epoch: int, start: HostStart) -> None:
        """Have an incarnation killed."""

    def move_horizon(self, trial: str, epoch: int, run_until: Horizon) -> None:
        """Let a trial run further."""

    def stop(self, trial: str, epoch: int) -> None:
        """Have a trial ended."""

    def pause(self, trial: str, epoch: int, *, at_checkpoint: bool = False) -> None:
        """Have a trial saved and ended."""

    def release(self, trial: str, epoch: int) -> None:
        """Forget a trial whose host is gone."""


class MailedOrders(TrialExecutor):
    """Puts each order into the mailbox of its node; whoever is derived from it sends them.

    Those that are derived know the nodes (`_orders`) and forget them (`drop_node`), set ``_plan``
    when they are opened, and send what has changed at the end of a turn (`on_step_end`).
    """

    def __init__(self) -> None:
        self._plan: ExperimentPlan | None = None

    def start_trial(self, order: StartTrial) -> None:
        """Have a node host a trial."""
        orders = self._orders(order.incarnation)
        if orders is not None:
            start = self._host_start(order)
            orders.start(order.trial, order.epoch, order.run_until, start)

    def continue_training(self, order: ContinueTrial) -> None:
        """Let a hosted trial run on."""
        orders = self._orders(order.incarnation)
        if orders is not None:
            orders.move_horizon(order.trial, order.epoch, order.run_until)

    def stop_trial(self, order: StopTrial) -> None:
        """Have a hosted trial ended."""
        orders = self._orders(order.incarnation)
        if orders is not None:
            orders.stop(order.trial, order.epoch)

    def pause_trial(self, order: PauseTrial) -> None:
        """Have a hosted trial saved and ended, to go on later."""
        orders = self._orders(order.incarnation)
        if orders is not None:
            orders.pause(order.trial, order.epoch, at_checkpoint=order.at_checkpoint)

    def release_trial(self, order: ReleaseTrial) -> None:
        """Forget a trial whose host is gone; the node hears of it with its next orders."""
        orders = self._orders(order.incarnation)
        if orders is not None:
            orders.release(order.trial, order.epoch)

    def reattach_trial(self, order: ReattachTrial) -> None:
        """Have a node that is heard again host what it hosted, or end it."""
        start = order.start
        orders = self._orders(start.incarnation)
        if orders is None:
            return
        how = self._host_start(start)
        if not order.is_wanted:
            orders.kill(start.trial, start.epoch, how)
            return
        orders.reattach(
            start.trial,
            start.epoch,
            start.run_until,
            how,
            pause=order.pause,
            stop=order.stop,
            at_checkpoint=order.at_checkpoint,
        )

    @abstractmethod
    def _orders(self, incarnation: str) -> OrdersToNode | None:
        """Ours for a node; None when it was lost since, which the runner is about to read."""

    def _host_start(self, order: StartTrial) -> HostStart:
        """Return what the node needs to start the trial, as the node will read it.

        Raises:
            ConfigError: the node could not read it; names the field. Sent all the same, the node
                would refuse it again and again, and the trial would wait without a word.
        """
        start = self._opened_plan.host_start(order)
        try:
            return msgspec.msgpack.decode(msgspec.msgpack.encode(start), type=HostStart)
        except msgspec.ValidationError as problem:
            place = re.search(r"\$\[(\d+)\]", str(problem))
            field = HostStart.__struct_fields__[int(place[1])] if place else "a field"
            raise ConfigError(
                f"No node can start trial {order.trial}: {field}: {problem}. Give the setting that"
                " it comes from a value of the type that its documentation names."
            ) from problem

    @property
    def _opened_plan(self) -> ExperimentPlan:
        if self._plan is None:
            raise BugError("the executor was used before it was opened")
        return self._plan
