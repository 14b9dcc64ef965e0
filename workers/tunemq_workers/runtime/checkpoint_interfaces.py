"""Interfaces between a node's checkpoint modules and the services that they use."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from tunemq_shared.objects.store_traffic import StoreTraffic
from tunemq_workers.runtime.reactor import Timer
from tunemq_workers.runtime.transfer_messages import Transfer, UploadResult
from tunemq_workers.runtime.trial_process_interfaces import TrialProcess

_T = TypeVar("_T")

#: Takes (events stream, encoded event).
Emit = Callable[[str, bytes], object]


class TrialKey(NamedTuple):
    """A trial of an experiment on this node, in any attempt."""

    events_key: str
    trial: str


def trial_of(process: TrialProcess) -> TrialKey:
    """Return the key of a process's trial."""
    return TrialKey(process.start.events_key, process.order.trial)


def is_leaving(process: TrialProcess) -> bool:
    """Return whether a process is ordered to stop or pause, so that nothing may delay it."""
    return process.order.stop or process.order.pause


class Timers(Protocol):
    """Schedules calls: `tunemq_workers.runtime.reactor.Reactor`."""

    def after(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Call once, ``delay_s`` seconds from now."""
        ...


class DiskJobs(Protocol):
    """Runs slow disk jobs in a thread: `tunemq_workers.checkpoints.cache_disk.CacheDisk`."""

    def run(
        self,
        job: Callable[[], _T],
        then: Callable[[_T], None],
        failed: Callable[[OSError], None] | None = None,
    ) -> None:
        """Queue ``job``; afterwards call ``then`` with its result, or ``failed``."""
        ...


class TransferService(Protocol):
    """Uploads and downloads: `tunemq_workers.transfers.transfer_client.TransferClient`.

    Never calls back before `start` has returned.
    """

    #: Takes the reason why the transfers process ended; another repeats the unfinished transfers.
    on_death: Callable[[str], object]

    @property
    def traffic(self) -> StoreTraffic:
        """Requests to stores and their results since the node began."""
        ...

    def start(
        self,
        transfer: Transfer,
        on_done: Callable[[UploadResult | None], None],
        on_failed: Callable[[str, bool], None],
        on_trouble: Callable[[str], None],
        on_disk_failed: Callable[[str], None] | None = None,
    ) -> int:
        """Begin a transfer, or join one that fetches the same; return a number for `cancel`."""
        ...

    def try_store(self, store: str) -> None:
        """Test a store until it answers; meanwhile `traffic` contains the problem."""
        ...

    def cancel(self, number: int) -> None:
        """Stop waiting, without a callback."""
        ...

    def close(self) -> None:
        """End all transfers without callbacks."""
        ...
