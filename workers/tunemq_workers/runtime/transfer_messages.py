"""Orders of a node to its transfers process, and the answers; payloads of frames.

Store addresses contain no secrets: the process finds credentials where every program on this
machine does.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from tunemq_shared.base import message_encoding
from tunemq_shared.objects.store_traffic import StoreTraffic
from tunemq_shared.protocol.node_orders import BlobRef


class UploadCheckpoint(msgspec.Struct, frozen=True, tag="upload"):
    """Upload the cached checkpoint in ``folder`` to ``store`` under ``key``.

    ``base`` is the path of an older checkpoint's ``committed.json``, whose objects the new manifest
    may refer to instead of sending unchanged files again, and ``base_sha256`` its hash; both are ""
    if there is none. The node gives the transfer up ``timeout_s`` seconds after ordering it.
    """

    store: str
    key: str
    folder: str
    base: str
    timeout_s: float
    base_sha256: str = ""


class DownloadCheckpoint(msgspec.Struct, frozen=True, tag="download"):
    """Download checkpoint ``key``, with manifest hash ``sha256``, into a new ``folder``."""

    store: str
    key: str
    sha256: str
    folder: str
    timeout_s: float


class FetchBlob(msgspec.Struct, frozen=True, tag="blob"):
    """Fetch a blob into ``folder``, created if needed, under its hash; unpack bundles."""

    blob: BlobRef
    folder: str
    is_bundle: bool
    timeout_s: float

    @property
    def store(self) -> str:
        """The store to fetch from; "" for a file on this machine."""
        return self.blob.store


class UploadTrialFiles(msgspec.Struct, frozen=True, tag="files"):
    """Upload the files in the trial's folder ``folder`` to ``store``, below ``key``."""

    store: str
    key: str
    folder: str
    attempt: int
    timeout_s: float


class TryStore(msgspec.Struct, frozen=True, tag="try"):
    """Request an object from the store, so that wrong keys are noticed before a trial needs it."""

    store: str
    timeout_s: float


Transfer: TypeAlias = (
    UploadCheckpoint | DownloadCheckpoint | FetchBlob | UploadTrialFiles | TryStore
)


class BeginTransfer(msgspec.Struct, frozen=True, tag="begin"):
    """Order: begin this transfer. An ``id`` is ordered again only after it failed."""

    id: int
    transfer: Transfer


class AbandonTransfer(msgspec.Struct, frozen=True, tag="abandon"):
    """Order: abandon this transfer, which has no listener any more; it is answered all the same."""

    id: int


TransferOrder: TypeAlias = BeginTransfer | AbandonTransfer


class UploadResult(msgspec.Struct, frozen=True, tag="uploaded"):
    """The result of an upload: the checkpoint is committed.

    Attributes:
        sha256: hash of its manifest in the store.
        size: bytes of its files.
        shared: objects of other checkpoints to which it refers, ``<that checkpoint's key>/<name>``.
        sent: bytes that this upload sent.
    """

    sha256: str
    size: int
    shared: tuple[str, ...]
    sent: int


class TransferDone(msgspec.Struct, frozen=True, tag="done"):
    """Answer: the transfer is complete; ``uploaded`` is set for uploads of checkpoints."""

    id: int
    uploaded: UploadResult | None = None


class TransferFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Answer: the transfer failed and is no longer active.

    ``is_corrupt``: the source is damaged or missing, so a retry cannot succeed. ``is_disk``: the
    local disk rejected the data; the store is not at fault.
    """

    id: int
    reason: str
    is_corrupt: bool = False
    is_disk: bool = False


class TransferRetrying(msgspec.Struct, frozen=True, tag="trouble"):
    """Answer: the transfer is being retried for this reason; "" when it continues."""

    id: int
    reason: str


class TransferTraffic(msgspec.Struct, frozen=True, tag="counted"):
    """Report without an order: the requests to stores since the process began."""

    traffic: StoreTraffic


TransferAnswer: TypeAlias = TransferDone | TransferFailed | TransferRetrying | TransferTraffic

encode = message_encoding.encode
decode_order = msgspec.msgpack.Decoder(TransferOrder).decode
decode_answer = msgspec.msgpack.Decoder(TransferAnswer).decode
