"""`RelayedFarm`: a farm that is the supervisor's, as an experiment's process has it."""

from __future__ import annotations

from tunemq_scheduler.base.lease_holder import LeaseHolder
from tunemq_scheduler.farm.ipc.relayed_executor import RelayedExecutor
from tunemq_scheduler.farm.ipc.supervisor_connection import SupervisorConnection


class RelayedFarm:
    """The supervisor's farm; this process may act on it as long as `check` returns.

    Args:
        line: to the supervisor.
        me: this process.
        term: the supervisor's.
        events_key: of the run of which nodes still have what they hosted; empty if of none.
    """

    def __init__(
        self, connection: SupervisorConnection, me: LeaseHolder, term: int, events_key: str
    ) -> None:
        self.me, self.term = me, term
        self.events_key = events_key
        self._connection = connection

    def check(self) -> None:
        """Return if we may act; see `SupervisorConnection.check`.

        Raises:
            SchedulerSuperseded: another scheduler may have taken the supervisor's place.
        """
        self._connection.check()

    def executor(self) -> RelayedExecutor:
        """A backend for one run."""
        return RelayedExecutor(self._connection)
