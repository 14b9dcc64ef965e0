"""`FarmExecutor`: the backend of a farm's scheduler: nodes that come and go, a lease to hold."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from tunemq_scheduler.core.runner import TrialRunner
from tunemq_scheduler.core.trial import PAUSED, PENDING
from tunemq_scheduler.executors.celery_executor import CeleryTrialExecutor
from tunemq_scheduler.experiment_view import ExperimentView
from tunemq_scheduler.farm.backend import FarmBackend
from tunemq_scheduler.farm.lease import SchedulerLease
from tunemq_scheduler.search_run import SearchRun
from tunemq_shared.live_keys import LiveKeys
from tunemq_shared.messages import Event

#: Workers that are there are known within so long; only then is it said that there are none.
_PATIENCE_S: Final = 2.0


class FarmExecutor(FarmBackend, CeleryTrialExecutor):
    """Runs trials on whatever workers there are, and says so while there are none.

    What it writes to Redis it writes only as long as there is no newer term.

    Args:
        url: where Redis is.
        lease: held by this process.
        address: where Redis is, without its password, for people.
        keys: of the farm; none where nothing is signed.
    """

    def __init__(
        self, url: str, lease: SchedulerLease, *, address: str, keys: LiveKeys | None = None
    ) -> None:
        FarmBackend.__init__(self)
        CeleryTrialExecutor.__init__(self, url, term=lease.term, guard=lease, keys=keys)
        self._address = address
        self._began = time.monotonic()
        #: What runs on it, once it does.
        self._runner: TrialRunner | None = None
        self._told: set[str] = set()
        #: Whether nodes were left to themselves, for another scheduler.
        self.is_left = False

    def release_now(self, accepted: dict[str, int]) -> None:
        """Tell nodes how far their events are kept, and trim the stream."""
        CeleryTrialExecutor.release(self, accepted)

    def poll(self, timeout: float) -> list[Event]:
        """What nodes stated and what became of them; see `TrialExecutor.poll`.

        Raises:
            SchedulerSuperseded: another scheduler took our place.
        """
        self.do_copied()  # the copy wakes us when it has more
        return super().poll(timeout)

    # --- the end ----------------------------------------------------------------------------------

    @property
    def is_away(self) -> bool:
        """Whether nobody can be told anything."""
        return self._wire.is_away

    def close(self, *, now: bool = False) -> None:
        """End what still runs, once the journal's copy has all; see `TrialExecutor.close`."""
        if not now:
            self.end_copy()
        super().close(now=now)

    def leave(self) -> None:
        """Close the connections and tell nobody: nodes go on, for whoever comes next."""
        self.is_left = True
        self._client = None  # there is nobody to say goodbye for
        super().close(now=True)

    def watch(self, search: SearchRun, view: ExperimentView) -> None:
        """Say what its trials wait for."""
        del view
        self._runner = search.loop.runner

    # --- for the person at the terminal -----------------------------------------------------------

    def notes(self) -> list[str]:
        """What holds now: also that there is no worker, or none that is big enough."""
        return [*super().notes(), *self._waits()]

    def news(self) -> list[str]:
        """What happened: also, once, what trials begin to wait for."""
        waits = self._waits()
        new = [text for text in waits if text not in self._told]
        self._told = set(waits)
        return [*super().news(), *self.copy_news(), *new]

    def _waits(self) -> list[str]:
        if time.monotonic() < self._began + _PATIENCE_S:
            return []
        if not self._wire.has_nodes:
            return [f"There is no worker; start some: tunemq worker --redis {self._address}"]
        return list(_waiting(self._runner)) if self._runner is not None else []


def _waiting(runner: TrialRunner) -> Iterator[str]:
    """Which trial no node can hold, or only those that it is not to be placed on."""
    for trial in runner.live.values():
        if trial.status not in {PENDING, PAUSED}:
            continue
        if why := runner.placement.why_never(trial.resources):
            yield f"Trial {trial.trial_id} waits for a bigger worker: {why}."
            return
        if runner.shuns_all(trial):
            nodes = ", ".join(trial.excluded)
            yield (
                f"Trial {trial.trial_id} waits for another worker: it is not placed on {nodes} any "
                "more, for what it printed there (log policies)."
            )
            return
