"""`NodeOrders`: an experiment's orders to one node, each as a message to the supervisor."""

from __future__ import annotations

from collections.abc import Callable

from tunemq_scheduler.farm.relay import messages as r
from tunemq_shared.conditions import Horizon
from tunemq_shared.messages import HostStart


class NodeOrders:
    """Has the methods of a mailbox that an experiment uses.

    Args:
        incarnation: of the node.
        add: takes each order.
    """

    def __init__(self, incarnation: str, add: Callable[[r.Order], None]) -> None:
        self._incarnation, self._add = incarnation, add

    def start(self, trial: str, epoch: int, run_until: Horizon, start: HostStart) -> None:
        """Host a trial."""
        self._add(r.Start(self._incarnation, trial, epoch, run_until, start))

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
        how = (run_until, start, pause, stop, at_checkpoint)
        self._add(r.Reattach(self._incarnation, trial, epoch, *how))

    def kill(self, trial: str, epoch: int, start: HostStart) -> None:
        """Have an incarnation killed."""
        self._add(r.Kill(self._incarnation, trial, epoch, start))

    def move_horizon(self, trial: str, epoch: int, run_until: Horizon) -> None:
        """Let a trial run further."""
        self._add(r.MoveHorizon(self._incarnation, trial, epoch, run_until))

    def stop(self, trial: str, epoch: int) -> None:
        """Have a trial ended."""
        self._add(r.Stop(self._incarnation, trial, epoch))

    def pause(self, trial: str, epoch: int, *, at_checkpoint: bool = False) -> None:
        """Have a trial saved and ended."""
        self._add(r.Pause(self._incarnation, trial, epoch, at_checkpoint))

    def release(self, trial: str, epoch: int) -> None:
        """Forget a trial whose host is gone."""
        self._add(r.Release(self._incarnation, trial, epoch))
