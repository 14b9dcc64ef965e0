"""`RelayedFarm`: a farm that is the supervisor's, as an experiment's process has it."""

from __future__ import annotations

from tunemq_scheduler.farm.holder import Holder
from tunemq_scheduler.farm.relay.executor import RelayedExecutor
from tunemq_scheduler.farm.relay.line import SupervisorLine


class RelayedFarm:
    """See `tunemq_scheduler.farm.backend.Farm`.

    Args:
        line: to the supervisor.
        me: this process.
        term: the supervisor's.
        events_key: of the run of which nodes still have what they hosted; empty if of none.
    """

    def __init__(self, line: SupervisorLine, me: Holder, term: int, events_key: str) -> None:
        self.me, self.term = me, term
        self._line, self._events_key = line, events_key

    def check(self) -> None:
        """Return if we may act; see `SupervisorLine.check`."""
        self._line.check()

    def executor(self) -> RelayedExecutor:
        """A backend for one run."""
        return RelayedExecutor(self._line)

    def is_forgotten(self, events_key: str, *, is_copy: bool) -> bool:
        """Whether nodes know no more of what the run before had them host."""
        del is_copy
        return events_key != self._events_key

    def close(self) -> None:
        """Nothing: the process closes the line when it has said how it ends."""
