"""`RemoteObjects`: an `ObjectStore` on a server, built from the operations of `ObjectClient`.

Files are transferred in parts, several at a time, each retried separately.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from hashlib import sha256 as new_sha256
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from tunemq_shared.base.errors import StoreError
from tunemq_shared.base.failpoints import failpoint
from tunemq_shared.base.retrying import CancelToken, StoreUnavailable, ignore, in_parallel, retried
from tunemq_shared.base.safe_names import is_safe_name
from tunemq_shared.objects.multipart import PartBody, check_end, check_hash, part_length, write_at
from tunemq_shared.objects.object_client import (
    NoSuchUpload,
    ObjectClient,
    StoreInternalError,
    StoreRequestDenied,
)
from tunemq_shared.objects.object_store import (
    InvalidObjectName,
    NoSuchObject,
    ObjectInfo,
    ObjectSizeMismatch,
    ObjectStore,
)
from tunemq_shared.objects.store_traffic import CountedClient

#: Seconds to connect or to send a block, and until the next bytes of an answer. A server with a
#: busy disk is slow at both.
CONNECT_S: Final = 10.0
READ_S: Final = 30.0
#: Seconds for `RemoteObjects.probe` with all retries, and until the next bytes of an answer.
PROBE_S: Final = 5.0
PROBE_ANSWER_S: Final = 3.0
#: Seconds after which `RemoteObjects.probe` fails although each byte of an answer came in time.
PROBE_TOTAL_S: Final = 40.0
#: Prefix of the names of test objects.
PROBE: Final = ".tunemq-probe-"
#: How many parts of a file are transferred at once.
PARALLEL: Final = 3
#: After this many internal errors to one request, a multipart upload starts again.
MOST_INTERNAL_ERRORS: Final = 4
#: How many idle connections are kept, for all transfers together.
CONNECTIONS: Final = 32
#: S3's limit for a whole key, in UTF-8.
MOST_KEY_BYTES: Final = 1024
#: The name of an object that holds a file.
_HASH: Final = re.compile(r"[0-9a-f]{64}")

#: A context in which the process reads its own files, whatever user its thread opens files as.
Reading = Callable[[], contextlib.AbstractContextManager[None]]
#: Reads the credentials and makes a client with these timeouts, in seconds, for connecting and
#: for an answer.
Connect = Callable[[float, float], ObjectClient]

_T = TypeVar("_T")


class RemoteObjects(ObjectStore):
    """See `ObjectStore`.

    Args:
        address: The store's name in messages.
        prefix: The prefix of all keys.
        connect: Makes clients: one at once, and another after each denied request.
    """

    def __init__(self, address: str, prefix: str, connect: Connect) -> None:
        self.address = address
        self._prefix = f"{prefix}/" if prefix else ""
        self._connect = connect
        self._client: ObjectClient = CountedClient(lambda: connect(CONNECT_S, READ_S), address)

    def probe(self, *, is_read_only: bool = False) -> None:
        """See `ObjectStore.probe`."""
        # A socket's timeout does not end an answer that comes byte by byte, so a thread waits.
        done: Future[None] = Future()

        def probe() -> None:
            try:
                self._probe(is_read_only=is_read_only)
            except BaseException as error:  # noqa: BLE001  raised by the caller, below
                done.set_exception(error)
            else:
                done.set_result(None)

        threading.Thread(target=probe, name="store probe", daemon=True).start()
        try:
            done.result(PROBE_TOTAL_S)
        except FutureTimeout:
            if done.done():
                raise
            raise StoreUnavailable(
                f"{self.address} answers too slowly: a test object was not written, read and "
                f"removed within {PROBE_TOTAL_S:g} s. Check the network and the store's load."
            ) from None

    def _probe(self, *, is_read_only: bool) -> None:
        client, cancel = self._connect(PROBE_ANSWER_S, PROBE_ANSWER_S), CancelToken(PROBE_S)

        def attempt() -> None:
            self._try_out(client, is_read_only=is_read_only)

        try:
            retried(attempt, cancel)
        except StoreRequestDenied as error:
            if not self._prepare(error, client, cancel):
                raise
            retried(attempt, cancel)
        finally:
            client.close()

    def _prepare(
        self, rejection: StoreRequestDenied, client: ObjectClient, cancel: CancelToken
    ) -> bool:
        """Create what the place lacks; returns whether a retry makes sense."""
        del rejection, client, cancel
        return False

    def _try_out(self, client: ObjectClient, *, is_read_only: bool) -> None:
        name = self._name(f"{PROBE}{os.urandom(6).hex()}")
        next(client.listed(name), None)
        if is_read_only:
            return
        client.put(name, b"probe", "it cannot be written")
        with client.get(name, "it cannot be read") as answer:
            b"".join(answer.blocks())
        client.remove(name, "objects there cannot be removed")

    def put_bytes(self, key: str, data: bytes) -> None:
        """See `ObjectStore.put_bytes`."""
        self._client.put(self._name(key), data, _unwritten(key))

    def put_file(
        self,
        key: str,
        path: Path,
        *,
        size: int,
        sha256: str,
        is_unchanged: bool = False,
        cancel: CancelToken,
        on_trouble: Callable[[str], None] = ignore,
    ) -> None:
        """See `ObjectStore.put_file`."""
        name = self._name(key)
        if size > part_length(size):
            upload = _Upload(self._client, key, name, cancel, on_trouble)
            # If the server cannot continue an upload, the whole file is sent again.
            checked = "" if is_unchanged else sha256
            retried(lambda: upload.send(path, size, checked), cancel, on_trouble)
            return
        body = PartBody(size)
        with path.open("rb", buffering=0) as file:
            body.fill(file)
            check_end(file)
        # The signature computes the hash anyway: hashing twice would cost a tenth of the speed.
        body.cancel, body.sha256 = cancel, sha256
        retried(lambda: self._client.put(name, body, _unwritten(key)), cancel, on_trouble)

    def has(self, key: str, size: int) -> bool:
        """See `ObjectStore.has`."""
        # A role of the shipped policies may read objects, but not list them. An empty object has
        # no ranges.
        with (
            contextlib.suppress(NoSuchObject, ObjectSizeMismatch),
            self._client.get(
                self._name(key), f"{_shown(key)} cannot be read", length=min(size, 1)
            ) as answer,
        ):
            if answer.total != size:
                raise ObjectSizeMismatch(f"{key} has another size.", str(answer.total))
            for _ in answer.blocks():
                pass  # so that the connection can be used again
            return True
        return False

    def get_bytes(self, key: str, *, limit: int) -> bytes:
        """See `ObjectStore.get_bytes`."""
        with self._client.get(self._name(key), f"{_shown(key)} cannot be read") as answer:
            if answer.total > limit:
                raise ObjectSizeMismatch(
                    f"{self.address}: {key} is damaged: "
                    f"expected at most {limit} bytes, got {answer.total}.",
                    str(answer.total),
                )
            return b"".join(answer.blocks())

    def get_file(
        self,
        key: str,
        path: Path,
        *,
        size: int,
        cancel: CancelToken,
        on_trouble: Callable[[str], None] = ignore,
    ) -> None:
        """See `ObjectStore.get_file`."""
        self._name(key)
        length = part_length(size)
        starts = range(0, max(size, 1), length)
        with path.open("xb", buffering=0) as file:

            def get(start: int, cancel: CancelToken) -> None:
                # A single part is requested as the whole object: an empty object has no ranges.
                expected = min(length, size - start) if len(starts) > 1 else 0
                retried(lambda: get_part(start, expected, cancel), cancel, on_trouble)

            def get_part(start: int, expected: int, cancel: CancelToken) -> None:
                self._get_part(key, file.fileno(), start, expected, size, cancel)

            in_parallel(get, starts, cancel, at_once=PARALLEL)

    def delete(self, keys: Iterable[str]) -> None:
        """See `ObjectStore.delete`."""

        def remove(key: str, _cancel: CancelToken) -> None:
            self._client.remove(self._name(key), f"{_shown(key)} cannot be removed")

        in_parallel(remove, keys, CancelToken(), at_once=PARALLEL)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        for found in self._client.listed(self._prefix + prefix):
            yield found._replace(key=found.key.removeprefix(self._prefix))

    def abort_uploads(self, is_over: Callable[[str], bool]) -> int:
        """See `ObjectStore.abort_uploads`."""
        aborted = 0
        try:
            for name, upload in tuple(self._client.unfinished()):
                if name.startswith(self._prefix) and is_over(name.removeprefix(self._prefix)):
                    self._client.abort_upload(name, upload)
                    aborted += 1
        except StoreRequestDenied as error:
            # Such a server keeps no unfinished uploads, or removes them itself.
            if error.code not in ("NotImplemented", "MethodNotAllowed"):
                raise
        return aborted

    def close(self) -> None:
        """See `ObjectStore.close`."""
        self._client.close()

    def _name(self, key: str) -> str:
        """The whole key in the bucket."""
        if not is_safe_name(key):
            raise InvalidObjectName(f"{key!r} is not the key of an object.")
        name = self._prefix + key
        if len(name.encode()) > MOST_KEY_BYTES:
            raise InvalidObjectName(
                f"{self.address}: the key {key[:100]}... is longer than {MOST_KEY_BYTES} bytes,"
                " which S3 does not allow; give shorter names."
            )
        return name

    def _get_part(
        self, key: str, fd: int, start: int, expected: int, size: int, cancel: CancelToken
    ) -> None:
        """Write a part of the object to its place in the file; ``expected=0`` means all of it."""
        end = start + expected if expected else size

        with self._client.get(
            self._name(key), f"{_shown(key)} cannot be read", offset=start, length=expected
        ) as answer:
            if answer.total != size:
                raise ObjectSizeMismatch(
                    f"{self.address}: the object {key} is damaged: "
                    f"expected {size} bytes, got {answer.total}.",
                    str(answer.total),
                )
            at = start
            for block in answer.blocks():
                cancel.check()
                if at + len(block) > end:
                    raise StoreError(f"{self.address}: {key}: more came than was asked for.")
                write_at(fd, block, at)
                at += len(block)
        if at != end:
            raise StoreUnavailable(f"{self.address}: {key}: {end - at} bytes did not come.")


class _UploadBroken(StoreError):
    """The server cannot continue an upload: send all parts again, in a new upload."""


class _UploadPart(NamedTuple):
    """A part of a file: its number, from 1, and its content."""

    number: int
    body: PartBody


class _Upload:
    """A multipart upload of a large file; holds memory for `PARALLEL` parts and one more."""

    def __init__(
        self,
        client: ObjectClient,
        key: str,
        name: str,
        cancel: CancelToken,
        on_trouble: Callable[[str], None],
    ) -> None:
        self._client = client
        self._name = name
        self._action = _unwritten(key)
        self._cancel = cancel
        self._on_trouble = on_trouble
        self._id = ""
        self._free: queue.SimpleQueue[PartBody] = queue.SimpleQueue()

    def send(self, path: Path, size: int, sha256: str) -> None:
        """Send the whole file; aborts the upload on failure."""
        self._id = retried(self._create, self._cancel, self._on_trouble)
        try:
            # One more than are sent at once, to be filled meanwhile.
            self._free = queue.SimpleQueue()
            for _ in range(PARALLEL + 1):
                self._free.put(PartBody(part_length(size)))
            parts = self._parts(path, size, sha256)
            etags = in_parallel(self._send_part, parts, self._cancel, at_once=PARALLEL)
            self._retried(lambda: self._complete(etags), self._cancel)
        except BaseException as error:
            with contextlib.suppress(StoreError):
                self._client.abort_upload(self._name, self._id)
            if isinstance(error, _UploadBroken | NoSuchUpload):
                raise StoreUnavailable(str(error)) from error
            raise

    def _parts(self, path: Path, size: int, sha256: str) -> Iterator[_UploadPart]:
        """Iterate over the parts; with ``sha256``, the last only if the file's hash matches."""
        length, digest = part_length(size), new_sha256()
        with path.open("rb", buffering=0) as file:
            for number, start in enumerate(range(0, size, length), 1):
                if start:
                    failpoint("upload.within_object")
                body = self._free.get()
                self._cancel.check()
                if len(body) > size - start:
                    body = PartBody(size - start)
                body.fill(file)
                if sha256:
                    digest.update(body)
                if start + length >= size:
                    check_end(file)
                    if sha256:
                        check_hash(str(path), sha256, digest.hexdigest())
                yield _UploadPart(number, body)

    def _create(self) -> str:
        return self._client.create_upload(self._name, self._action)

    def _send_part(self, part: _UploadPart, cancel: CancelToken) -> str:
        number, body = part
        body.cancel = cancel

        def put() -> str:
            return self._client.put_part(self._name, self._id, number, body, self._action)

        try:
            return self._retried(put, cancel)
        finally:
            self._free.put(body)

    def _complete(self, etags: Sequence[str]) -> None:
        self._client.complete_upload(self._name, self._id, etags, self._action)

    def _retried(self, call: Callable[[], _T], cancel: CancelToken) -> _T:
        """Retry ``call`` while the server may still continue the upload.

        rclone writes an upload as its parts arrive: after an error of its disk, each later request
        of that upload fails, even when there is space again.

        Raises:
            _UploadBroken: The server answered with too many internal errors.
        """
        errors = 0

        def attempt() -> _T:
            nonlocal errors
            try:
                return call()
            except StoreInternalError as error:
                errors += 1
                if errors == MOST_INTERNAL_ERRORS:
                    raise _UploadBroken(str(error)) from error
                raise

        return retried(attempt, cancel, self._on_trouble)


def _unwritten(key: str) -> str:
    return f"{_shown(key)} cannot be written"


def _shown(key: str) -> str:
    """Shorten an object's key for people: a hash to its beginning."""
    folder, slash, name = key.rpartition("/")
    return f"{folder}{slash}{name[:8]}..." if _HASH.fullmatch(name) else key
