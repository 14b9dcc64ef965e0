"""How transfers share threads, and how their failures are handled; with stores that only wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.support.refused_threads import threads_refused
from tests.support.waiting import eventually
from tunemq_shared.base.errors import CheckpointCorrupt, StoreError
from tunemq_shared.objects.object_store import NoSuchObject
from tunemq_workers.runtime.transfer_messages import (
    AbandonTransfer,
    BeginTransfer,
    DownloadCheckpoint,
    TransferDone,
    TransferFailed,
    TransferRetrying,
    UploadCheckpoint,
    UploadResult,
)
from tunemq_workers.transfers import transfer_performer as performer_module
from tunemq_workers.transfers.transfer_performer import TransferPerformer


class Stores:
    """Replaces `object_checkpoints` and store clients with fakes."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.going_on: list[str] = []

    def open(self, address: str, _rights: object) -> SimpleNamespace:
        self.opened.append(address)
        return SimpleNamespace(close=lambda: self.closed.append(address))

    def upload(self, _objects, key, _folder, _base, cancel, on_trouble):
        self.work(key, cancel, on_trouble)
        return SimpleNamespace(sha256="sha", size=7, shared=("t/c/a",), sent=3, manifest=b"{}")

    def download(self, _objects, key, _sha256, _folder, cancel, on_trouble):
        self.work(key, cancel, on_trouble)

    def work(self, key, cancel, on_trouble):
        self.going_on.append(key)
        match key:
            case "slow":
                while not self.gate.wait(0.005):
                    cancel.check()
            case "broken":
                raise RuntimeError("unforeseen")
            case "damaged":
                raise CheckpointCorrupt("the hash is wrong")
            case "missing":
                raise NoSuchObject("there is no manifest")
            case "endless":
                on_trouble("x" * 10**8)
                raise StoreError("x" * 10**8)
            case "full":
                raise StoreError("the disk is full")
            case "troubled":
                for reason in ("no answer", "no answer", "busy", "", ""):
                    on_trouble(reason)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stores]:
    stores = Stores()
    monkeypatch.setattr(performer_module, "object_checkpoints", stores)
    monkeypatch.setattr(performer_module, "open_objects", stores.open)
    yield stores
    stores.gate.set()


class Performing:
    """A performer, orders for it, and its answers."""

    def __init__(self) -> None:
        self.answers: list[TransferDone | TransferFailed | TransferRetrying] = []
        self.performer = TransferPerformer(self.answers.append)
        self.orders = 0

    def upload(self, key: str, store: str = "s3://b/x") -> int:
        return self.begin(UploadCheckpoint(store, key, "/cache/t/c", "", 1))

    def download(self, key: str, store: str = "s3://b/x") -> int:
        return self.begin(DownloadCheckpoint(store, key, "sha", "/cache/t/c", 1))

    def begin(self, transfer: UploadCheckpoint | DownloadCheckpoint) -> int:
        self.orders += 1
        self.performer.obey(BeginTransfer(self.orders, transfer))
        return self.orders

    def answer(self, number: int) -> TransferDone | TransferFailed:
        """Return the last answer for this order."""
        eventually(lambda: any(a.id == number for a in self.ends()), message=str(self.answers))
        [end] = [a for a in self.ends() if a.id == number]
        return end

    def troubles(self) -> list[str]:
        return [answer.reason for answer in self.answers if isinstance(answer, TransferRetrying)]

    def ends(self) -> list[TransferDone | TransferFailed]:
        return [answer for answer in self.answers if not isinstance(answer, TransferRetrying)]


@pytest.fixture
def performing(stores: Stores) -> Iterator[Performing]:
    performing = Performing()
    yield performing
    stores.gate.set()
    eventually(lambda: not performing.performer._running)
    for store in performing.performer._stores.values():
        store.close()


def test_upload_is_answered_with_the_committed_checkpoint(performing):
    number = performing.upload("quick")
    assert performing.answer(number) == TransferDone(number, UploadResult("sha", 7, ("t/c/a",), 3))


def test_download_is_answered(performing):
    number = performing.download("quick")
    assert performing.answer(number) == TransferDone(number)


def test_download_never_waits_for_uploads(performing):
    for _ in range(20):
        performing.upload("slow")
    performing.answer(performing.download("quick"))
    assert not [end for end in performing.ends() if end.id <= 20]


def test_store_that_does_not_answer_delays_no_other(performing):
    for _ in range(20):
        performing.upload("slow")
        performing.download("slow")
    performing.answer(performing.upload("quick", "s3://b/other"))


def test_few_transfers_run_at_the_same_time(performing, stores):
    for _ in range(20):
        performing.upload("slow")
    eventually(lambda: stores.going_on)
    assert len(stores.going_on) <= 4


def test_running_transfer_can_be_cancelled(performing, stores):
    number = performing.upload("slow")
    eventually(lambda: stores.going_on)
    performing.performer.obey(AbandonTransfer(number))
    assert isinstance(performing.answer(number), TransferFailed)


def test_transfer_can_be_cancelled_before_it_begins(performing, stores):
    for _ in range(10):
        performing.upload("slow")
    number = performing.upload("never")
    performing.performer.obey(AbandonTransfer(number))
    assert isinstance(performing.answer(number), TransferFailed)
    assert "never" not in stores.going_on


def test_cancelling_an_ended_transfer_does_nothing(performing):
    number = performing.upload("quick")
    performing.answer(number)
    performing.performer.obey(AbandonTransfer(number))
    assert len(performing.answers) == 1


def test_number_may_be_ordered_again_after_it_failed(performing):
    number = performing.upload("full")
    performing.answer(number)
    performing.performer.obey(
        BeginTransfer(number, UploadCheckpoint("s3://b/x", "quick", "/c", "", 1))
    )
    eventually(lambda: len(performing.answers) == 2)
    assert isinstance(performing.answers[1], TransferDone)


@pytest.mark.parametrize(
    ("key", "reason", "is_corrupt"),
    [
        ("full", "the disk is full", False),
        ("damaged", "the hash is wrong", True),
        ("missing", "there is no manifest", True),
        ("broken", "RuntimeError: unforeseen", False),
    ],
)
def test_failure_is_answered_and_the_next_transfer_continues(performing, key, reason, is_corrupt):
    number = performing.download(key)
    assert performing.answer(number) == TransferFailed(number, reason, is_corrupt)
    assert isinstance(performing.answer(performing.download("quick")), TransferDone)


def test_s15_long_reasons_are_shortened(performing):
    number = performing.upload("endless")
    assert len(performing.answer(number).reason) <= 1000
    assert max(map(len, performing.troubles())) <= 1000


def test_problem_and_its_end_are_reported_once(performing):
    number = performing.upload("troubled")
    performing.answer(number)
    assert performing.troubles() == ["no answer", ""]


def test_another_problem_is_reported_in_time(performing, monkeypatch):
    monkeypatch.setattr(performer_module, "_TELL_EVERY_S", 0.0)
    number = performing.upload("troubled")
    performing.answer(number)
    assert performing.troubles() == ["no answer", "busy", ""]


def test_store_has_one_client(performing, stores):
    for number in [performing.upload("quick") for _ in range(9)] + [performing.download("quick")]:
        performing.answer(number)
    assert stores.opened == ["s3://b/x"]


def test_clients_of_idle_stores_are_closed_in_time(performing, stores):
    performing.upload("slow", "s3://b/busy")
    for store in range(20):
        performing.answer(performing.upload("quick", f"s3://b/{store}"))
    assert "s3://b/busy" not in stores.closed
    assert len(stores.opened) - len(stores.closed) <= 10
    assert stores.closed[:3] == ["s3://b/0", "s3://b/1", "s3://b/2"]


def test_invalid_address_fails_its_transfers(performing, monkeypatch):
    def reject(address, _rights):
        raise StoreError(f"{address} has no keys")

    monkeypatch.setattr(performer_module, "open_objects", reject)
    number = performing.upload("quick")
    assert performing.answer(number) == TransferFailed(number, "s3://b/x has no keys")


def test_transfer_begins_once_the_system_permits_threads(performing, monkeypatch):
    refused = threads_refused()
    monkeypatch.setattr(
        performer_module.time, "sleep", lambda _: refused.__exit__(None, None, None)
    )
    refused.__enter__()
    number = performing.upload("quick")
    assert isinstance(performing.answer(number), TransferDone)
    assert isinstance(performing.answer(performing.download("quick")), TransferDone)
