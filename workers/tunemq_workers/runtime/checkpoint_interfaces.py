"""What the parts that care for a node's checkpoints need of each other, and of what is around."""

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
    """A trial of one of the experiments on this node, whatever its epoch."""

    events_key: str
    trial: str


def trial_of(process: TrialProcess) -> TrialKey:
    """The trial that a host is there for."""
    return TrialKey(process.start.events_key, process.order.trial)


def is_leaving(process: TrialProcess) -> bool:
    """Whether a host was told to end, so that nothing holds it up."""
    return process.order.stop or process.order.pause


class Timers(Protocol):
    """Calls later: `tunemq_workers.runtime.reactor.Reactor`."""

    def after(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Call once, ``delay_s`` from now."""
        ...


class DiskJobs(Protocol):
    """Does what takes its time on the disk: `tunemq_workers.checkpoints.cache_disk.CacheDisk`."""

    def run(
        self,
        job: Callable[[], _T],
        then: Callable[[_T], None],
        failed: Callable[[OSError], None] | None = None,
    ) -> None:
        """Have ``job`` done, after those before it, then call ``then`` or ``failed``."""
        ...


class TransferService(Protocol):
    """Uploads and downloads: `tunemq_workers.transfers.transfer_client.TransferClient`.

    Never calls back before the call that ordered a transfer has returned.
    """

    #: Takes why the process that does them ended; another goes on with what is unfinished.
    on_death: Callable[[str], object]

    @property
    def traffic(self) -> StoreTraffic:
        """What was asked of stores since the node began."""
        ...

    def start(
        self,
        transfer: Transfer,
        on_done: Callable[[UploadResult | None], None],
        on_failed: Callable[[str, bool], None],
        on_trouble: Callable[[str], None],
        on_disk_failed: Callable[[str], None] | None = None,
    ) -> int:
        """Begin a transfer, or wait for one that fetches the same; a number for `cancel`."""
        ...

    def try_store(self, store: str) -> None:
        """Ask a store for something until it answers; `traffic` says what is wrong with it."""
        ...

    def cancel(self, number: int) -> None:
        """Wait no more."""
        ...

    def close(self) -> None:
        """End everything, telling nobody."""
        ...
