"""`TransferPerformer`: perform transfers in threads, with separate threads per store and direction.

Trials wait for downloads, so uploads must not delay them; and a store that does not answer delays
only its own transfers. A store that denies a request is tried again like one that is unreachable:
it was usable when the experiment began, so its owner may correct the keys, the policy or the
bucket.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from tunemq_shared.base.errors import BlobCorrupt, CheckpointCorrupt, TuneError
from tunemq_shared.base.failure_text import shortened
from tunemq_shared.base.retrying import CancelToken, StoreUnavailable, retried
from tunemq_shared.base.safe_text import encodable
from tunemq_shared.checkpoints import object_checkpoints
from tunemq_shared.checkpoints.manifest import MAX_MANIFEST
from tunemq_shared.checkpoints.open_store import open_objects
from tunemq_shared.code.blob_folder import BLOBS, BlobFolder
from tunemq_shared.code.blob_store import ObjectBlobStore, copy_file
from tunemq_shared.code.bundles import unpacked
from tunemq_shared.objects.object_client import StoreRequestDenied
from tunemq_shared.objects.object_store import NoSuchObject, ObjectSizeMismatch, ObjectStore
from tunemq_shared.objects.remote_object_store import PROBE
from tunemq_shared.objects.store_traffic import TRAFFIC, counted
from tunemq_shared.protocol.node_orders import BlobRef
from tunemq_shared.system.plain_files import read_below
from tunemq_shared.trial.trial_folder_upload import send_folder
from tunemq_workers.runtime import transfer_messages as messages
from tunemq_workers.system.trial_user import own_files

#: Parallel transfers per store.
_UPLOADS: Final = 3
_DOWNLOADS: Final = 3
#: Number of idle stores whose clients and threads are kept.
_IDLE_STORES: Final = 8

#: Seconds until a thread is tried again that the system refused.
_THREAD_RETRY_S: Final = 1.0
#: Seconds between two reports that a transfer is delayed, after the first.
_TELL_EVERY_S: Final = 10.0

#: Errors after which a retry would fail the same way.
_OF_NO_USE: Final = (CheckpointCorrupt, BlobCorrupt, NoSuchObject)
#: Errors of a local disk that is full, read-only or not accessible.
_DISK_REFUSES: Final = frozenset({errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EROFS})

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class _Store:
    """One store's threads and its client, which the first use opens."""

    def __init__(self, address: str) -> None:
        #: Transfers that are running or queued.
        self.unfinished = 0
        self._address = address
        self._lock = threading.Lock()
        self._objects: ObjectStore | None = None
        self._senders = _started_pool(_UPLOADS, "upload")
        self._fetchers = _started_pool(_DOWNLOADS, "download")

    @property
    def objects(self) -> ObjectStore:
        """The client; thread-safe."""
        with self._lock:
            if self._objects is None:
                with own_files():  # for a certificate
                    self._objects = open_objects(self._address, own_files)  # for keys
            return self._objects

    def submit(self, transfer: messages.Transfer, perform: Callable[[], None]) -> Future[None]:
        """Call ``perform`` in an upload or download thread, depending on the transfer."""
        is_sent = isinstance(transfer, messages.UploadCheckpoint | messages.UploadTrialFiles)
        pool = self._senders if is_sent else self._fetchers
        return pool.submit(perform)

    def close(self) -> None:
        """Close the client and end the threads, which are idle."""
        self._senders.shutdown(wait=False)
        self._fetchers.shutdown(wait=False)
        if self._objects is not None:
            self._objects.close()


class _Running(msgspec.Struct, eq=False):
    """A transfer that is begun and not answered."""

    order: messages.BeginTransfer
    store: _Store
    cancel: CancelToken
    future: Future[None] | None = None
    trouble: str = ""
    told_at: float = -math.inf


class TransferPerformer:
    """Carry out orders, which come from one thread, and answer from any thread.

    Args:
        answer: takes answers; called in any thread.
    """

    def __init__(self, answer: Callable[[messages.TransferAnswer], None]) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self._stores: dict[str, _Store] = {}
        self._running: dict[int, _Running] = {}

    def obey(self, order: messages.TransferOrder) -> None:
        """Begin or abandon a transfer; an order to abandon an unknown one is ignored."""
        match order:
            case messages.BeginTransfer():
                self._begin(order)
            case messages.AbandonTransfer(number):
                with self._lock:
                    running = self._running.get(number)
                if running is not None:
                    self._abandon(running)

    def _begin(self, order: messages.BeginTransfer) -> None:
        # The node handles timeouts, because it knows listeners that joined later.
        running = _Running(order, self._store(order.transfer.store), CancelToken())
        with self._lock:
            self._running[order.id] = running
            running.store.unfinished += 1
        running.future = running.store.submit(order.transfer, partial(self._perform, running))

    def _abandon(self, running: _Running) -> None:
        running.cancel.cancel()
        assert running.future is not None  # orders come from one thread
        if running.future.cancel():  # still queued, so no thread will perform it
            self._end(
                running,
                messages.TransferFailed(running.order.id, "it was called off before it began"),
            )

    def _perform(self, running: _Running) -> None:
        number, transfer = running.order.id, running.order.transfer
        answer: messages.TransferAnswer
        _log.info("transfer.begun id=%d transfer=%r", number, transfer)
        try:
            answer = messages.TransferDone(number, self._result(running, transfer))
        except Exception as problem:  # noqa: BLE001 - reported to the node and logged
            is_expected = isinstance(problem, TuneError)
            reason = str(problem) if is_expected else f"{type(problem).__name__}: {problem}"
            reason = encodable(shortened(reason))
            exc_info = None if is_expected else problem
            _log.warning("transfer.failed id=%d reason=%r", number, reason, exc_info=exc_info)
            answer = messages.TransferFailed(
                number, reason, isinstance(problem, _OF_NO_USE), _is_of_disk(problem)
            )
        else:
            _log.info("transfer.done id=%d", number)
        self._end(running, answer)

    def _result(
        self, running: _Running, transfer: messages.Transfer
    ) -> messages.UploadResult | None:
        """Perform a transfer, and return the result of a checkpoint's upload."""
        cancel, in_trouble = running.cancel, partial(self._in_trouble, running)
        match transfer:
            case messages.UploadCheckpoint(_, key, folder):
                base = _whole_base(transfer)
                done = self._patiently(
                    running,
                    lambda objects: object_checkpoints.upload(
                        objects, key, Path(folder), base, cancel, in_trouble
                    ),
                )
                return messages.UploadResult(done.sha256, done.size, done.shared, done.sent)
            case messages.DownloadCheckpoint(_, key, sha256, folder):
                self._patiently(
                    running,
                    lambda objects: object_checkpoints.download(
                        objects, key, sha256, Path(folder), cancel, in_trouble
                    ),
                )
            case messages.UploadTrialFiles(_, key, folder, attempt):
                self._patiently(
                    running,
                    lambda objects: send_folder(
                        objects, Path(folder), key, attempt, cancel, in_trouble
                    ),
                )
            case messages.FetchBlob():
                self._fetch_blob(running, transfer)
            case messages.TryStore(store):
                retried(partial(_try, running.store, store), cancel, in_trouble)
                TRAFFIC.answered(store)
        return None

    def _fetch_blob(self, running: _Running, fetch: messages.FetchBlob) -> None:
        in_trouble = partial(self._in_trouble, running)

        def get(ref: BlobRef, folder: BlobFolder) -> BlobRef:
            if not ref.store:
                return retried(partial(_copied, ref, folder), running.cancel, in_trouble)

            def from_store(objects: ObjectStore) -> BlobRef:
                blobs = ObjectBlobStore(objects, ref.store)
                return blobs.fetch(ref, folder, running.cancel, in_trouble)

            return self._patiently(running, from_store)

        if fetch.is_bundle:
            unpacked(fetch.blob, fetch.folder, get)
        else:
            get(fetch.blob, BlobFolder(fetch.folder))

    def _patiently(self, running: _Running, work: Callable[[ObjectStore], _T]) -> _T:
        """Return the result of ``work``, retried as a whole while the store denies requests."""

        def attempt() -> _T:
            try:
                return work(running.store.objects)
            except StoreRequestDenied as rejection:  # the next try reads the keys again
                raise StoreUnavailable(str(rejection)) from rejection

        return retried(attempt, running.cancel, partial(self._in_trouble, running))

    def _in_trouble(self, running: _Running, reason: str) -> None:
        now, reason = time.monotonic(), encodable(shortened(reason))
        with self._lock:
            # Retried files and parts of a transfer report the same problem in different words.
            is_notice = not reason or now >= running.told_at + _TELL_EVERY_S
            if reason == running.trouble or not is_notice:
                return
            running.trouble = reason
            running.told_at = now if reason else running.told_at
        _log.warning("transfer.trouble id=%d reason=%r", running.order.id, reason)
        self._answer(messages.TransferRetrying(running.order.id, reason))

    def _end(self, running: _Running, answer: messages.TransferAnswer) -> None:
        with self._lock:
            del self._running[running.order.id]
            running.store.unfinished -= 1
        self._answer(answer)

    def _store(self, address: str) -> _Store:
        """Return the store's threads and client; close those of stores that were idle longest."""
        store = self._stores.pop(address, None) or _Store(address)
        self._stores[address] = store  # most recently used last
        with self._lock:
            idle = [
                at for at, one in self._stores.items() if one is not store and not one.unfinished
            ]
        for at in idle[:-_IDLE_STORES]:
            self._stores.pop(at).close()
        return store


def _started_pool(size: int, name: str) -> ThreadPoolExecutor:
    """Start a pool with all its threads, waiting while the system refuses more of them.

    A trial may have used up the processes of a container. A pool that starts a thread for a
    transfer would lose that transfer then.
    """
    pool, is_started = ThreadPoolExecutor(size, name), threading.Event()
    for _ in range(size):
        while True:
            try:
                pool.submit(is_started.wait)
                break
            except RuntimeError as problem:
                _log.warning("transfers.no_thread problem=%r", str(problem))
                time.sleep(_THREAD_RETRY_S)
    is_started.set()
    return pool


def _try(store: _Store, address: str) -> None:
    """Request an object; a store that rejects the keys, or for which there are none, has failed.

    Raises:
        StoreUnavailable: the store cannot be used now.
    """
    try:
        _ask(store.objects)
    except StoreUnavailable:
        raise
    except StoreRequestDenied as rejection:  # already counted
        raise StoreUnavailable(str(rejection)) from rejection
    except TuneError as error:  # missing keys or certificate
        TRAFFIC.failed(address, str(error))
        raise StoreUnavailable(str(error)) from error


def _ask(objects: ObjectStore) -> None:
    """Request an object that does not exist, which every role may do.

    A server answers "access denied" to a role without the right to list. This also proves that it
    knows the keys, so it counts as an answer.
    """
    try:
        objects.get_bytes(f"{BLOBS}/{PROBE}none", limit=1)
    except (NoSuchObject, ObjectSizeMismatch):
        pass
    except StoreRequestDenied as rejection:
        if rejection.code != "AccessDenied":
            raise
        TRAFFIC.answered(objects.address)


def _copied(ref: BlobRef, folder: BlobFolder) -> BlobRef:
    """Copy a blob from a shared folder, unless this machine has it already."""
    source = Path(ref.path)
    with counted(str(source.parent)):
        return folder.take_in(ref, partial(copy_file, source))


def _whole_base(upload: messages.UploadCheckpoint) -> Path | None:
    """Return the base's manifest, or None if it is damaged: it could name missing objects."""
    if not upload.base:
        return None
    base = Path(upload.base)
    try:
        found = hashlib.sha256(read_below(base.parent, base.name, MAX_MANIFEST)).hexdigest()
    except OSError as problem:
        found = str(problem)
    if found == upload.base_sha256:
        return base
    _log.warning("transfer.base_damaged path=%s found=%r", base, found)
    return None


def _is_of_disk(problem: Exception) -> bool:
    """Return whether the local disk caused the error; a store's failure is `StoreUnavailable`."""
    cause = problem.__cause__
    is_store = isinstance(problem, StoreUnavailable)
    return not is_store and isinstance(cause, OSError) and cause.errno in _DISK_REFUSES
