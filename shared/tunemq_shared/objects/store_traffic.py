"""Count a process's requests to its stores, their failures, and how long a store has failed.

TRAFFIC.so_far()        this process's counts
counted(store)          a context that counts as one request
CountedClient(connect)  counts each request in `TRAFFIC`, and reloads credentials when denied
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from tunemq_shared.base.errors import TuneError
from tunemq_shared.base.retrying import StoreUnavailable
from tunemq_shared.base.safe_text import encodable
from tunemq_shared.objects.multipart import PartBody
from tunemq_shared.objects.object_client import (
    IncompleteUpload,
    ObjectClient,
    ObjectContent,
    StoreRequestDenied,
)
from tunemq_shared.objects.object_store import ObjectInfo
from tunemq_shared.protocol.messages import Message

#: Seconds without a request after which a store no longer counts as failing: a try and its pause
#: are shorter.
_FORGOTTEN_S: Final = 120.0
#: Uploads of this size count separately: a nearly full disk still accepts small ones.
_LARGE_BYTES: Final = 2**20
#: The most characters of an error that are reported.
_PROBLEM_CHARS: Final = 500
#: Upper limits: larger counts in a message are forged.
_MOST: Final = 2**60
_MOST_S: Final = 1e10


class StoreTraffic(Message, frozen=True):
    """The requests of a process or node to stores since it began.

    ``failures`` of the ``requests`` were denied or not answered. ``queue_bytes`` wait to be sent.
    ``failing_s``: seconds for which no request to a store, or no large upload, has succeeded; 0
    while all succeed. ``problem`` is the store's last error.
    """

    requests: int = 0
    failures: int = 0
    queue_bytes: int = 0
    failing_s: float = 0.0
    problem: str = ""

    @property
    def is_possible(self) -> bool:
        """Whether a process can have counted this; values from messages must be checked."""
        return (
            0 <= self.failures <= self.requests <= _MOST
            and 0 <= self.queue_bytes <= _MOST
            and 0.0 <= self.failing_s <= _MOST_S
            and len(self.problem) <= _PROBLEM_CHARS
        )

    def plus(self, other: StoreTraffic) -> StoreTraffic:
        """Add two counts, with the problem of the store that has failed longest."""
        longest = max(self, other, key=lambda one: one.failing_s)
        return StoreTraffic(
            self.requests + other.requests,
            self.failures + other.failures,
            self.queue_bytes + other.queue_bytes,
            longest.failing_s,
            longest.problem,
        )

    def shown(self, who: str) -> str:
        """Describe a failing store for people; empty if all work."""
        if not self.failing_s:
            return ""
        return (
            f"store requests of {who} have been failing for {self.failing_s:.0f} s: {self.problem}"
        )

    @property
    def ended(self) -> StoreTraffic:
        """The counts that remain when the process has ended."""
        return msgspec.structs.replace(self, queue_bytes=0, failing_s=0.0, problem="")


class _Failing(NamedTuple):
    """A store's first failure since its last success, and the latest one; monotonic times."""

    since: float
    last: float
    problem: str


class TrafficCount:
    """Counts the requests of a process. **Threads.** Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests = self._failures = 0
        self._failing: dict[str, _Failing] = {}

    def answered(self, store: str) -> None:
        """Count a request that succeeded."""
        with self._lock:
            self._requests += 1
            self._failing.pop(store, None)

    def failed(self, store: str, problem: str) -> None:
        """Count a request that a store denied or did not answer."""
        now = time.monotonic()
        with self._lock:
            self._requests += 1
            self._failures += 1
            before = self._failing.get(store)
            since = before.since if before is not None and self._is_new(before, now) else now
            self._failing[store] = _Failing(since, now, encodable(_shortened(problem)))

    def so_far(self) -> StoreTraffic:
        """The counts of all stores together."""
        now = time.monotonic()
        with self._lock:
            self._failing = {
                store: one for store, one in self._failing.items() if self._is_new(one, now)
            }
            said = StoreTraffic(self._requests, self._failures)
            for one in self._failing.values():
                said = said.plus(StoreTraffic(failing_s=now - one.since, problem=one.problem))
            return said

    @staticmethod
    def _is_new(failing: _Failing, now: float) -> bool:
        return now - failing.last < _FORGOTTEN_S


#: The counts of this process.
TRAFFIC: Final = TrafficCount()


def _shortened(problem: str) -> str:
    """Shorten a text between words to the limit."""
    if len(problem) <= _PROBLEM_CHARS:
        return problem
    return problem[: _PROBLEM_CHARS - 4].rsplit(" ", 1)[0] + " ..."


@contextlib.contextmanager
def counted(store: str) -> Iterator[None]:
    """Count the enclosed work as one request to a store.

    Other errors than a denial or no answer, such as a missing object, count as success: the store
    answered, or is not at fault.
    """
    try:
        yield
    except (StoreUnavailable, StoreRequestDenied) as error:
        TRAFFIC.failed(store, str(error))
        raise
    except Exception:
        TRAFFIC.answered(store)
        raise
    else:
        TRAFFIC.answered(store)


class CountedClient:
    """An `ObjectClient` that counts requests, and reloads the credentials after a denied one.

    The denied request fails; later requests use the new credentials.

    Args:
        connect: Reads the credentials and makes a client.
        store: The store's name.
    """

    def __init__(self, connect: Callable[[], ObjectClient], store: str) -> None:
        self._connect, self._client, self._store = connect, connect(), store

    def put(self, name: str, data: bytes | PartBody, action: str) -> None:
        """See `ObjectClient.put`."""
        with self._counted(len(data)) as client:
            client.put(name, data, action)

    @contextlib.contextmanager
    def get(
        self, name: str, action: str, *, offset: int = 0, length: int = 0
    ) -> Iterator[ObjectContent]:
        """See `ObjectClient.get`."""
        with (
            self._counted() as client,
            client.get(name, action, offset=offset, length=length) as found,
        ):
            yield found

    def remove(self, name: str, action: str) -> None:
        """See `ObjectClient.remove`."""
        with self._counted() as client:
            client.remove(name, action)

    def listed(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `ObjectClient.listed`."""
        with self._counted() as client:
            yield from client.listed(prefix)

    def create_upload(self, name: str, action: str) -> str:
        """See `ObjectClient.create_upload`."""
        with self._counted() as client:
            return client.create_upload(name, action)

    def put_part(self, name: str, upload: str, number: int, body: PartBody, action: str) -> str:
        """See `ObjectClient.put_part`."""
        with self._counted(len(body)) as client:
            return client.put_part(name, upload, number, body, action)

    def complete_upload(self, name: str, upload: str, etags: Sequence[str], action: str) -> None:
        """See `ObjectClient.complete_upload`."""
        with self._counted() as client:
            client.complete_upload(name, upload, etags, action)

    def abort_upload(self, name: str, upload: str) -> None:
        """See `ObjectClient.abort_upload`."""
        with self._counted() as client:
            client.abort_upload(name, upload)

    def unfinished(self) -> Iterator[IncompleteUpload]:
        """See `ObjectClient.unfinished`."""
        with self._counted() as client:
            yield from client.unfinished()

    def close(self) -> None:
        """See `ObjectClient.close`."""
        self._client.close()

    @contextlib.contextmanager
    def _counted(self, sent_bytes: int = 0) -> Iterator[ObjectClient]:
        client = self._client
        is_large = sent_bytes >= _LARGE_BYTES
        try:
            with counted(f"{self._store} (large uploads)" if is_large else self._store):
                yield client
        except StoreRequestDenied:
            self._renew(client)
            raise

    def _renew(self, rejected: ObjectClient) -> None:
        # Other threads may still use the old client, and the credentials may be just changing.
        with contextlib.suppress(TuneError):
            if self._client is rejected:
                self._client = self._connect()
