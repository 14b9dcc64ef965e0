"""`MailedOrders`: orders about trials become what each node is to host."""

from __future__ import annotations

from abc import abstractmethod

from tunemq_scheduler.core.commands import (
    ContinueTrial,
    PauseTrial,
    ReattachTrial,
    ReleaseTrial,
    StartTrial,
    StopTrial,
)
from tunemq_scheduler.executors.executor import TrialExecutor
from tunemq_scheduler.executors.mailbox import Mailbox
from tunemq_scheduler.plan import ExperimentPlan
from tunemq_shared.errors import BugError


class MailedOrders(TrialExecutor):
    """Puts each order into the mailbox of its node; whoever is derived from it sends them.

    Those that are derived know the nodes (`_mailbox`) and forget them (`drop_node`), set ``_plan``
    when they are opened, and send what has changed at the end of a turn (`on_step_end`).
    """

    def __init__(self) -> None:
        self._plan: ExperimentPlan | None = None

    def start_trial(self, order: StartTrial) -> None:
        """Have a node host a trial."""
        mailbox = self._mailbox(order.incarnation)
        if mailbox is not None:
            start = self._opened_plan.host_start(order)
            mailbox.start(order.trial, order.epoch, order.run_until, start)

    def continue_training(self, order: ContinueTrial) -> None:
        """Let a hosted trial run on."""
        mailbox = self._mailbox(order.incarnation)
        if mailbox is not None:
            mailbox.move_horizon(order.trial, order.epoch, order.run_until)

    def stop_trial(self, order: StopTrial) -> None:
        """Have a hosted trial ended."""
        mailbox = self._mailbox(order.incarnation)
        if mailbox is not None:
            mailbox.stop(order.trial, order.epoch)

    def pause_trial(self, order: PauseTrial) -> None:
        """Have a hosted trial saved and ended, to go on later."""
        mailbox = self._mailbox(order.incarnation)
        if mailbox is not None:
            mailbox.pause(order.trial, order.epoch)

    def release_trial(self, order: ReleaseTrial) -> None:
        """Forget a trial whose host is gone; the node hears of it with its next orders."""
        mailbox = self._mailbox(order.incarnation)
        if mailbox is not None:
            mailbox.release(order.trial, order.epoch)

    def reattach_trial(self, order: ReattachTrial) -> None:
        """Have a node that is heard again host what it hosted, or end it."""
        start = order.start
        mailbox = self._mailbox(start.incarnation)
        if mailbox is None:
            return
        how = self._opened_plan.host_start(start)
        if not order.is_wanted:
            mailbox.kill(start.trial, start.epoch, how)
            return
        mailbox.reattach(
            start.trial,
            start.epoch,
            start.run_until,
            how,
            pause=order.pause,
            stop=order.stop,
        )

    @abstractmethod
    def _mailbox(self, incarnation: str) -> Mailbox | None:
        """The mailbox of a node; None when it was lost since, which the runner is about to read."""

    @property
    def _opened_plan(self) -> ExperimentPlan:
        if self._plan is None:
            raise BugError("the executor was used before it was opened")
        return self._plan
