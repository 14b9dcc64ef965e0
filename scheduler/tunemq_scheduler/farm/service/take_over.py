"""`LostSearch`: a search whose scheduler's machine is lost, as its store describes it.

It continues here when it is submitted again. Until then its nodes keep running its trials.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import msgspec

from tunemq_scheduler.farm.service.farm_nodes import EVENTS_KEY
from tunemq_scheduler.farm.service.queue_entry import ID_DIGITS
from tunemq_scheduler.storage.last_run import stored_record
from tunemq_scheduler.transport.redis.redis_connection import RedisConnection
from tunemq_shared.base.errors import (
    ConfigError,
    JournalError,
    RedisUnavailable,
    TransportError,
)
from tunemq_shared.broker import redis_keys
from tunemq_shared.checkpoints.open_store import open_objects
from tunemq_shared.objects.s3_address import parse_address, parse_beside
from tunemq_shared.objects.store_address import (
    canonical_address,
    is_remote,
    name_in,
    without_settings,
)
from tunemq_shared.signing.key_files import journal_signer
from tunemq_shared.signing.live_keys import LiveKeys
from tunemq_shared.signing.message_signing import InvalidSignature


class LostSearch(msgspec.Struct, frozen=True, kw_only=True):
    """A search to take over from its store.

    Attributes:
        name: the name of its experiment.
        address: the address of its copy in the store.
        events_key: the stream of its events.
        term: the term of the scheduler that ran it last.
        has_ended: whether it had ended, or was paused, and its trials with it; see `RunRecord`.
    """

    name: str
    address: str
    events_key: str
    term: int
    has_ended: bool

    @property
    def id(self) -> str:
        """The first digits of the ids of all its trials; see `QueueEntry`."""
        return self.events_key.removeprefix(redis_keys.events(""))[:ID_DIGITS]


def find_lost_searches(
    addresses: Iterable[str], store: str, keys: LiveKeys, tell: Callable[[str], None]
) -> dict[str, LostSearch]:
    """Read the records of these searches from their stores.

    Args:
        addresses: the addresses of their experiments. One in the bucket of ``store`` inherits its
            missing settings.
        store: the farm's, as a canonical address.
        keys: the keys of the farm, with which the lost scheduler signed.
        tell: shows a line about each address without a search, or with a damaged or forged record.

    Returns:
        The searches by their names.

    Raises:
        ConfigError: an address cannot be that of a search.
        StoreError: a store cannot be reached.
    """
    found: dict[str, LostSearch] = {}
    for address in addresses:
        place = without_settings(address)
        try:
            one = _read(address, store, keys)
        except JournalError as error:  # no reason to serve none of the farm's searches
            fix = (
                "Find out who wrote it before anything of this search is used: code that it names"
                " would run here."
                if keys.is_signed and isinstance(error.__cause__, InvalidSignature)
                else f"Then `Tuner.restore({place!r})` in a script continues it; or restore the"
                " object, and restart the scheduler."
            )
            tell(f"--take-over {place} is skipped: {error} {fix}")
            continue
        if one is None:  # it may have been removed since, and a service keeps its command line
            tell(f"--take-over {place} is skipped: no farm's search is there.")
        else:
            found[one.name] = one
    return found


def _read(given: str, store: str, keys: LiveKeys) -> LostSearch | None:
    if not is_remote(given):
        raise ConfigError(
            f"--take-over {given}: pass the address of an experiment in a store, such as "
            "s3://bucket/prefix/name."
        )
    address = canonical_address(given)
    if is_remote(store):
        address = str(parse_beside(given, parse_address(store, {}), os.environ))
    name = name_in(address)
    with open_objects(address) as objects:
        record = stored_record(objects, journal_signer(keys.journal_keys(name)))
    if record is None or not record.events_key:
        return None
    return LostSearch(
        name=name,
        address=address,
        events_key=record.events_key,
        term=record.term,
        has_ended=record.is_over,
    )


def refuse_unknown_searches(url: str, results: str) -> None:
    """Refuse to begin in a folder that no scheduler used, while Redis serves searches of another.

    A scheduler ends all trials that its folder does not know, and perhaps the right folder is only
    not mounted.

    Args:
        url: the address of Redis.
        results: the folder of results.

    Raises:
        ConfigError: Redis has streams of running searches.
    """
    line = RedisConnection(url)
    line.connect()
    try:
        try:
            (listed,) = line.ask([("GET", redis_keys.STREAMS)])
        except RedisUnavailable:
            raise
        except TransportError:  # a key of another type, which the scheduler deletes
            return
        keys = redis_keys.unlisted(listed.decode(errors="replace")) if listed else []
        left = line.ask([("TTL", key) for key in keys if key != EVENTS_KEY])
    finally:
        line.close()
    running = sum(ttl == -1 for ttl in left)
    if running:
        raise ConfigError(
            f"--results {results} was never used by a scheduler, and {running} searches of another "
            "folder run on the nodes of this Redis; their trials would be ended. Is that folder "
            "mounted, and named by --results? If it is lost, add --take-over ADDRESS for each "
            "search that has a copy in a store, or remove them from Redis: redis-cli DEL "
            f"{redis_keys.STREAMS}."
        )


def is_running(url: str, lost: LostSearch) -> bool:
    """Return whether nodes of this Redis may still run trials of a search.

    They have given them up if another scheduler has had the farm meanwhile, or if the search has
    ended: then its stream expires, whether or not the copy of its record says so.
    """
    line = RedisConnection(url)
    line.connect()
    try:
        newest, ttl = line.ask([("GET", redis_keys.STREAMS), ("TTL", lost.events_key)])
    finally:
        line.close()
    known = None if newest is None else redis_keys.unlisted(newest.decode(errors="replace"))
    return (known is None or lost.events_key in known) and int(ttl) < 0
