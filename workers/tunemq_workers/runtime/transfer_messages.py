"""What a node orders of its transfers process, and what that answers; payloads of frames.

Addresses of stores hold no secrets: the process finds credentials where every program on this
machine finds them.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from tunemq_shared.base import message_encoding
from tunemq_shared.objects.store_traffic import StoreTraffic
from tunemq_shared.protocol.node_orders import BlobRef

#: The kinds of frames: node to process, and process to node.
ORDER: Final = ord("O")
ANSWER: Final = ord("A")


class UploadCheckpoint(msgspec.Struct, frozen=True, tag="upload"):
    """Bring the cached checkpoint in ``folder`` into ``store`` under ``key``.

    ``base`` is the path of an older checkpoint's ``committed.json``, whose objects may be referred
    to instead of sending a file again, and ``base_sha256`` its hash; both are empty where there is
    none. Whoever waits for a transfer gives it up ``timeout_s`` after ordering it.
    """

    store: str
    key: str
    folder: str
    base: str
    timeout_s: float
    base_sha256: str = ""


class DownloadCheckpoint(msgspec.Struct, frozen=True, tag="download"):
    """Bring checkpoint ``key``, whose manifest has this hash, into the new folder ``folder``."""

    store: str
    key: str
    sha256: str
    folder: str
    timeout_s: float


class FetchBlob(msgspec.Struct, frozen=True, tag="blob"):
    """Bring a blob into ``folder``, which is made, under its hash; of a bundle, its folder."""

    blob: BlobRef
    folder: str
    is_bundle: bool
    timeout_s: float

    @property
    def store(self) -> str:
        """Where it is fetched from; empty for a file on this machine."""
        return self.blob.store


class UploadTrialFiles(msgspec.Struct, frozen=True, tag="files"):
    """Bring the files of the trial's folder ``folder`` into ``store``, below ``key``."""

    store: str
    key: str
    folder: str
    attempt: int
    timeout_s: float


class TryStore(msgspec.Struct, frozen=True, tag="try"):
    """Ask the store for something, so that wrong keys are known before a trial needs it."""

    store: str
    timeout_s: float


Transfer: TypeAlias = (
    UploadCheckpoint | DownloadCheckpoint | FetchBlob | UploadTrialFiles | TryStore
)


class BeginTransfer(msgspec.Struct, frozen=True, tag="begin"):
    """Order: do this. An ``id`` is ordered once more at most after it has failed."""

    id: int
    transfer: Transfer


class AbandonTransfer(msgspec.Struct, frozen=True, tag="abandon"):
    """Order: nobody waits for this transfer any more; it is answered all the same."""

    id: int


TransferOrder: TypeAlias = BeginTransfer | AbandonTransfer


class UploadResult(msgspec.Struct, frozen=True, tag="uploaded"):
    """A checkpoint is committed.

    ``sha256`` is its manifest's in the store, ``size`` the bytes of its files, ``sent`` those that
    were sent now; ``shared`` are objects of other checkpoints, ``<that checkpoint's key>/<name>``.
    """

    sha256: str
    size: int
    shared: tuple[str, ...]
    sent: int


class TransferDone(msgspec.Struct, frozen=True, tag="done"):
    """Answer: the transfer is complete; ``uploaded`` is there for uploads."""

    id: int
    uploaded: UploadResult | None = None


class TransferFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Answer: the transfer ended without success, and nothing of it goes on.

    ``is_corrupt``: what was to be read is damaged or missing there, so that trying again is of no
    use. ``is_disk``: this machine's own disk does not take it, and the store is not at fault.
    """

    id: int
    reason: str
    is_corrupt: bool = False
    is_disk: bool = False


class TransferRetrying(msgspec.Struct, frozen=True, tag="trouble"):
    """Answer: the transfer is being tried again, and why; without a reason when it goes on."""

    id: int
    reason: str


class TransferTraffic(msgspec.Struct, frozen=True, tag="counted"):
    """Unasked: what the process has asked of stores since it began."""

    traffic: StoreTraffic


TransferAnswer: TypeAlias = TransferDone | TransferFailed | TransferRetrying | TransferTraffic

encode = message_encoding.encode
decode_order = msgspec.msgpack.Decoder(TransferOrder).decode
decode_answer = msgspec.msgpack.Decoder(TransferAnswer).decode
