"""`DirectFarm`: a farm whose one search runs in the process that has its lease."""

from __future__ import annotations

from tunemq_scheduler.executors.redis_line import RedisLine
from tunemq_scheduler.farm.executor import FarmExecutor
from tunemq_scheduler.farm.holder import Holder
from tunemq_scheduler.farm.lease import SchedulerLease
from tunemq_shared import wire
from tunemq_shared.live_keys import LiveKeys
from tunemq_shared.redis_address import parse_address


class DirectFarm:
    """See `tunemq_scheduler.farm.backend.Farm`.

    Args:
        url: where Redis is.
        lease: held by this process, who is ``me``.
        keys: of the farm; none where nothing is signed.
    """

    def __init__(
        self, url: str, lease: SchedulerLease, me: Holder, keys: LiveKeys | None = None
    ) -> None:
        self.me = me
        self._url, self._lease, self._keys = url, lease, keys

    @property
    def term(self) -> int:
        """Ours."""
        return self._lease.term

    def check(self) -> None:
        """Return if we may act; see `SchedulerLease.check`."""
        self._lease.check()

    def executor(self) -> FarmExecutor:
        """A backend for one run."""
        address = parse_address(self._url).without_credentials()
        return FarmExecutor(self._url, self._lease, address=address, keys=self._keys)

    def is_forgotten(self, events_key: str, *, is_copy: bool) -> bool:
        """Whether nodes know no more of what the run before had them host."""
        return is_forgotten(self._url, events_key, is_copy=is_copy)

    def close(self) -> None:
        """Give the lease back."""
        self._lease.close()


def is_forgotten(url: str, events_key: str, *, is_copy: bool) -> bool:
    """Whether nodes know no more of what a run with this stream had them host.

    If others had the farm meanwhile, they gave all of it up for those. If they were told to forget
    it, its stream expires; the record says so, too, but not that of a copy.
    """
    line = RedisLine(url)
    line.connect()
    try:
        newest, ttl = line.ask([("GET", wire.STREAMS), ("TTL", events_key)])
    finally:
        line.close()
    known = None if newest is None else wire.unlisted(newest.decode(errors="replace"))
    is_anothers = known is not None and events_key not in known
    return is_anothers or (is_copy and int(ttl) >= 0)
