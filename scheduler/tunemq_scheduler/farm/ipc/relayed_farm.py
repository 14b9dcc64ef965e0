"""`RelayedFarm`: the supervisor's farm, as an experiment's process sees it."""

from __future__ import annotations

from contextlib import AbstractContextManager

from tunemq_scheduler.base.lease_holder import LeaseHolder
from tunemq_scheduler.farm.ipc.relayed_executor import RelayedExecutor
from tunemq_scheduler.farm.ipc.supervisor_connection import SupervisorConnection


class RelayedFarm:
    """The supervisor's farm; this process may act on it as long as `check` returns.

    Args:
        connection: to the supervisor.
        me: this process.
        term: the supervisor's term.
        events_key: of the run whose trials nodes still have; empty if there is none.
    """

    def __init__(
        self, connection: SupervisorConnection, me: LeaseHolder, term: int, events_key: str
    ) -> None:
        self.me, self.term = me, term
        self.events_key = events_key
        self._connection = connection

    def check(self) -> None:
        """Return if this process may act; see `SupervisorConnection.check`.

        Raises:
            SchedulerSuperseded: another scheduler may have replaced the supervisor.
        """
        self._connection.check()

    def say_alive(self) -> None:
        """Report that nothing hangs; see `SupervisorConnection.say_alive`."""
        self._connection.say_alive()

    def alive(self) -> AbstractContextManager[None]:
        """Report meanwhile that nothing hangs; see `SupervisorConnection.alive`."""
        return self._connection.alive()

    def executor(self) -> RelayedExecutor:
        """Create a trial executor for one run."""
        return RelayedExecutor(self._connection)
