"""Performs transfers in threads: for each store a few that send, and others that fetch.

A trial waits for what is fetched, so that is never behind what is sent; and a store that does not
answer holds up only its own transfers. A store that refuses is tried again like one that is away: a
search found it usable when it began, so somebody may mend the keys, the policy or the bucket.
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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from tunemq_shared.base.errors import BlobCorrupt, CheckpointCorrupt, TuneError
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
from tunemq_shared.objects.remote_objects import PROBE
from tunemq_shared.objects.store_traffic import TRAFFIC, counted
from tunemq_shared.protocol.node_orders import BlobRef
from tunemq_shared.system.plain_files import read_below
from tunemq_shared.trial.trial_folder_upload import send_folder
from tunemq_workers.runtime.transfer_messages import (
    AbandonTransfer,
    BeginTransfer,
    DownloadCheckpoint,
    FetchBlob,
    Transfer,
    TransferAnswer,
    TransferDone,
    TransferFailed,
    TransferOrder,
    TransferRetrying,
    TryStore,
    UploadCheckpoint,
    UploadResult,
    UploadTrialFiles,
)
from tunemq_workers.system.trial_user import own_files

#: How many transfers of a store go on at the same time.
_UPLOADS: Final = 3
_DOWNLOADS: Final = 3
#: Of how many stores without a transfer client and threads are kept.
_IDLE_STORES: Final = 8

#: A trouble is told at once, and then this often at most if it is another.
_TELL_EVERY_S: Final = 10.0

#: After these another try would end the same.
_OF_NO_USE: Final = (CheckpointCorrupt, BlobCorrupt, NoSuchObject)
#: What a disk says that is full, read-only or closed to us.
_DISK_REFUSES: Final = frozenset({errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EROFS})

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class _Store:
    """One store's client, made when it is first needed, and its threads."""

    def __init__(self, address: str) -> None:
        self.unfinished = 0
        self._address = address
        self._lock = threading.Lock()
        self._objects: ObjectStore | None = None
        self._senders = ThreadPoolExecutor(_UPLOADS, "upload")
        self._fetchers = ThreadPoolExecutor(_DOWNLOADS, "download")

    @property
    def objects(self) -> ObjectStore:
        """The client; for any thread."""
        with self._lock:
            if self._objects is None:
                with own_files():  # a certificate, perhaps
                    self._objects = open_objects(self._address, own_files)  # and keys
            return self._objects

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to do."""
        return not self.unfinished

    def submit(self, transfer: Transfer, perform: Callable[[], None]) -> Future[None]:
        """Have a thread of the kind that the transfer needs call ``perform``."""
        is_sent = isinstance(transfer, UploadCheckpoint | UploadTrialFiles)
        pool = self._senders if is_sent else self._fetchers
        return pool.submit(perform)

    def close(self) -> None:
        """Let go of the client, and of the threads, which are idle."""
        self._senders.shutdown(wait=False)
        self._fetchers.shutdown(wait=False)
        if self._objects is not None:
            self._objects.close()


@dataclass(slots=True, eq=False)
class _Running:
    """A transfer that was begun and is not answered."""

    order: BeginTransfer
    store: _Store
    cancel: CancelToken
    future: Future[None] | None = None
    trouble: str = ""
    told_at: float = -math.inf


class TransferPerformer:
    """Obeys orders, which come from one thread, and answers from any.

    Args:
        answer: takes answers; called in any thread.
    """

    def __init__(self, answer: Callable[[TransferAnswer], None]) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self._stores: dict[str, _Store] = {}
        self._running: dict[int, _Running] = {}

    def obey(self, order: TransferOrder) -> None:
        """Begin a transfer, or leave one; one that is not under way is ignored."""
        match order:
            case BeginTransfer():
                self._begin(order)
            case AbandonTransfer(number):
                with self._lock:
                    running = self._running.get(number)
                if running is not None:
                    self._abandon(running)

    def _begin(self, order: BeginTransfer) -> None:
        # The node looks after the time: it knows of those who came to wait later.
        running = _Running(order, self._store(order.transfer.store), CancelToken())
        with self._lock:
            self._running[order.id] = running
            running.store.unfinished += 1
        running.future = running.store.submit(order.transfer, partial(self._perform, running))

    def _abandon(self, running: _Running) -> None:
        running.cancel.cancel()
        assert running.future is not None  # orders come from one thread
        if running.future.cancel():  # it was waiting for a thread, and will not be performed
            self._end(
                running, TransferFailed(running.order.id, "it was called off before it began")
            )

    def _perform(self, running: _Running) -> None:
        number, transfer = running.order.id, running.order.transfer
        answer: TransferAnswer
        _log.info("transfer.begun id=%d transfer=%r", number, transfer)
        try:
            match transfer:
                case UploadCheckpoint():
                    answer = TransferDone(number, self._upload(running, transfer))
                case DownloadCheckpoint():
                    self._download(running, transfer)
                    answer = TransferDone(number)
                case UploadTrialFiles():
                    self._send_files(running, transfer)
                    answer = TransferDone(number)
                case FetchBlob():
                    self._fetch_blob(running, transfer)
                    answer = TransferDone(number)
                case TryStore():
                    self._try(running)
                    answer = TransferDone(number)
        except Exception as problem:  # noqa: BLE001 - the node is told, and this log
            is_expected = isinstance(problem, TuneError)
            _log.warning(
                "transfer.failed id=%d problem=%r",
                number,
                str(problem),
                exc_info=None if is_expected else problem,
            )
            reason = str(problem) if is_expected else f"{type(problem).__name__}: {problem}"
            answer = TransferFailed(
                number, encodable(reason), isinstance(problem, _OF_NO_USE), _is_of_disk(problem)
            )
        else:
            _log.info("transfer.done id=%d", number)
        self._end(running, answer)

    def _upload(self, running: _Running, upload: UploadCheckpoint) -> UploadResult:
        base = _whole_base(upload)
        in_trouble = partial(self._in_trouble, running)

        def send(objects: ObjectStore) -> object_checkpoints.UploadedCheckpoint:
            return object_checkpoints.upload(
                objects, upload.key, Path(upload.folder), base, running.cancel, in_trouble
            )

        done = self._patiently(running, send)
        return UploadResult(done.sha256, done.size, done.shared, done.sent)

    def _download(self, running: _Running, download: DownloadCheckpoint) -> None:
        folder, in_trouble = Path(download.folder), partial(self._in_trouble, running)

        def fetch(objects: ObjectStore) -> None:
            object_checkpoints.download(
                objects, download.key, download.sha256, folder, running.cancel, in_trouble
            )

        self._patiently(running, fetch)

    def _fetch_blob(self, running: _Running, fetch: FetchBlob) -> None:
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

    def _send_files(self, running: _Running, send: UploadTrialFiles) -> None:
        folder, in_trouble = Path(send.folder), partial(self._in_trouble, running)

        def put(objects: ObjectStore) -> None:
            send_folder(objects, folder, send.key, send.attempt, running.cancel, in_trouble)

        self._patiently(running, put)

    def _try(self, running: _Running) -> None:
        """Ask for an object until the store knows who asks; missing keys are counted, too."""
        store = running.order.transfer.store

        def attempt() -> None:
            try:
                _ask(running.store.objects)
            except StoreUnavailable:
                raise
            except StoreRequestDenied as rejection:  # counted
                raise StoreUnavailable(str(rejection)) from rejection
            except TuneError as error:  # no keys, no certificate
                TRAFFIC.failed(store, str(error))
                raise StoreUnavailable(str(error)) from error

        retried(attempt, running.cancel, partial(self._in_trouble, running))
        TRAFFIC.answered(store)

    def _patiently(self, running: _Running, work: Callable[[ObjectStore], _T]) -> _T:
        """What ``work`` makes of the store, tried again, all of it, while that is refused."""

        def attempt() -> _T:
            try:
                return work(running.store.objects)
            except StoreRequestDenied as rejection:  # it looks for the keys anew
                raise StoreUnavailable(str(rejection)) from rejection

        return retried(attempt, running.cancel, partial(self._in_trouble, running))

    def _in_trouble(self, running: _Running, reason: str) -> None:
        now, reason = time.monotonic(), encodable(reason)
        with self._lock:
            # Files and parts of them that are tried again all say the same, in words of their own.
            is_notice = not reason or now >= running.told_at + _TELL_EVERY_S
            if reason == running.trouble or not is_notice:
                return
            running.trouble = reason
            running.told_at = now if reason else running.told_at
        _log.warning("transfer.trouble id=%d reason=%r", running.order.id, reason)
        self._answer(TransferRetrying(running.order.id, reason))

    def _end(self, running: _Running, answer: TransferAnswer) -> None:
        with self._lock:
            del self._running[running.order.id]
            running.store.unfinished -= 1
        self._answer(answer)

    def _store(self, address: str) -> _Store:
        """The store; clients of others that have been idle longest are let go."""
        store = self._stores.pop(address, None) or _Store(address)
        self._stores[address] = store  # the newest is the last
        with self._lock:
            idle = [at for at, one in self._stores.items() if one is not store and one.is_idle]
        for at in idle[:-_IDLE_STORES]:
            self._stores.pop(at).close()
        return store


def _ask(objects: ObjectStore) -> None:
    """Ask for an object that is not there, as any role may.

    Who may not list is told of such an object that access is denied, by a server that knows the
    keys; so that is an answer, too.
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
    """A blob of a folder that all machines share, unless this one does not have it now."""
    source = Path(ref.path)
    with counted(str(source.parent)):
        return folder.take_in(ref, partial(copy_file, source))


def _whole_base(upload: UploadCheckpoint) -> Path | None:
    """The base, unless it was damaged on the disk: it would name objects that are nowhere."""
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
    """Whether this machine's own disk refused; a store that fails is `StoreUnavailable`."""
    cause = problem.__cause__
    is_store = isinstance(problem, StoreUnavailable)
    return not is_store and isinstance(cause, OSError) and cause.errno in _DISK_REFUSES
