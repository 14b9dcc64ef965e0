"""When `RemoteObjects` retries a part, and when it restarts the whole upload."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from tunemq_shared.base import retrying
from tunemq_shared.base.retrying import CancelToken, StoreUnavailable, TransferTimedOut
from tunemq_shared.objects import remote_object_store
from tunemq_shared.objects.multipart import PART, PartBody
from tunemq_shared.objects.object_client import StoreInternalError
from tunemq_shared.objects.remote_object_store import MOST_INTERNAL_ERRORS, RemoteObjects


class Client:
    """A server of multipart uploads that fails as the test says."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.aborted: list[str] = []
        self.parts: dict[str, dict[int, bytes]] = {}
        self.objects: dict[str, bytes] = {}

    def create_upload(self, name: str, doing: str) -> str:
        self.begun.append(f"upload-{len(self.begun) + 1}")
        self.parts[self.begun[-1]] = {}
        return self.begun[-1]

    def put_part(self, name: str, upload: str, number: int, body: PartBody, doing: str) -> str:
        self.parts[upload][number] = bytes(body)
        return str(number)

    def complete_upload(self, name: str, upload: str, etags: Sequence[str], doing: str) -> None:
        parts = self.parts[upload]
        self.objects[name] = b"".join(parts[number] for number in sorted(parts))

    def abort_upload(self, name: str, upload: str) -> None:
        self.aborted.append(upload)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "LONGEST_PAUSE_S", 0.001)


def send(client: Any, folder: Path, cancel: CancelToken | None = None) -> bytes:
    """Upload a file in two parts and return the stored content."""
    data = b"a" * PART + b"b"
    path = folder / "file"
    path.write_bytes(data)
    RemoteObjects("s3://bucket", "", lambda _connect, _read: client).put_file(
        "key",
        path,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        cancel=cancel or CancelToken(20),
    )
    return data


@pytest.mark.parametrize("verb", ["put_part", "complete_upload"])
def test_upload_that_the_server_always_fails_restarts_as_another(verb, tmp_path):
    class Broken(Client):
        """A server whose disk was full during the first upload."""

    def fail_first(self: Client, name: str, upload: str, *how: Any) -> Any:
        if upload == "upload-1":
            raise StoreInternalError("io: read/write on closed pipe")
        return getattr(Client, verb)(self, name, upload, *how)

    setattr(Broken, verb, fail_first)
    client = Broken()
    data = send(client, tmp_path)
    assert client.objects == {"key": data}
    assert (client.begun, client.aborted) == (["upload-1", "upload-2"], ["upload-1"])


@pytest.mark.parametrize(
    ("kind", "failures"),
    [(StoreInternalError, MOST_INTERNAL_ERRORS - 1), (StoreUnavailable, MOST_INTERNAL_ERRORS * 3)],
)
def test_upload_with_passing_failures_keeps_its_parts(kind, failures, tmp_path):
    class Busy(Client):
        """A server that rejects the second part a number of times."""

        left = failures

        def put_part(self, name: str, upload: str, number: int, body: PartBody, doing: str) -> str:
            if number == 2 and self.left:
                self.left -= 1
                raise kind("not now")
            return super().put_part(name, upload, number, body, doing)

    client = Busy()
    data = send(client, tmp_path)
    assert client.objects == {"key": data}
    assert (client.begun, client.aborted) == (["upload-1"], [])


def test_upload_that_always_fails_ends_at_its_timeout_and_leaves_no_parts(tmp_path):
    class Dead(Client):
        """A server on which all uploads fail."""

        def put_part(self, *how: Any) -> str:
            raise StoreInternalError("no")

    client = Dead()
    with pytest.raises(TransferTimedOut, match="no Gave up after 3 s"):
        send(client, tmp_path, CancelToken(3))
    assert client.aborted == client.begun
    assert len(client.begun) > 1


def test_probe_of_a_store_that_answers_byte_by_byte_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_object_store, "PROBE_TOTAL_S", 1.0)
    answers = threading.Event()

    class SlowClient:
        def listed(self, _prefix: str) -> Iterator[object]:
            answers.wait(60)
            return iter(())

        def close(self) -> None:
            """Check that no upload is open."""

    store = RemoteObjects("s3://bucket", "", lambda _connect, _read: cast("Any", SlowClient()))
    with pytest.raises(StoreUnavailable, match=r"s3://bucket answers too slowly: .* within 1 s"):
        store.probe(is_read_only=True)
    answers.set()
