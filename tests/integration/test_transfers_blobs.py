"""Blobs that the transfers process fetches: files and bundles, from a store and from a folder."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.support.stores.object_servers import ObjectServer
from tests.support.waiting import eventually
from tunemq_shared.code.blob_store import open_blobs
from tunemq_shared.code.bundles import bundle
from tunemq_shared.protocol.messages import BlobRef
from tunemq_workers.runtime.transfer_messages import (
    BeginTransfer,
    FetchBlob,
    TransferAnswer,
    TransferDone,
    TransferFailed,
)
from tunemq_workers.transfers.transfer_performer import TransferPerformer

pytestmark = pytest.mark.integration


@pytest.fixture(params=["folder", "minio"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "store")
    server: ObjectServer = request.getfixturevalue("minio")
    return server.address(server.create_bucket(), "farm")


def perform(fetch: FetchBlob) -> TransferDone | TransferFailed:
    answers: list[TransferAnswer] = []
    performer = TransferPerformer(answers.append)
    performer.obey(BeginTransfer(1, fetch))

    def ends() -> list[TransferDone | TransferFailed]:  # it may have reported a problem first
        return [one for one in answers if isinstance(one, TransferDone | TransferFailed)]

    eventually(ends)
    for store in performer._stores.values():
        store.close()
    return ends()[0]


def test_a_blob_becomes_a_file_and_a_bundle_a_folder(store, tmp_path):
    (tmp_path / "train.py").write_text("VALUE = 1\n")
    with open_blobs(store) as blobs:
        code, project = blobs.put(b"code"), bundle(tmp_path / "train.py", blobs)
    here, there = str(tmp_path / "node/blobs"), str(tmp_path / "node/code")
    assert perform(FetchBlob(code, here, is_bundle=False, timeout_s=9.0)) == TransferDone(1)
    assert Path(here, code.sha256).read_bytes() == b"code"
    assert perform(FetchBlob(project, there, is_bundle=True, timeout_s=9.0)) == TransferDone(1)
    assert Path(there, project.sha256, "train.py").read_text() == "VALUE = 1\n"
    assert os.listdir(there) == [project.sha256], "the archive is not kept"


@pytest.mark.parametrize("is_bundle", [False, True])
def test_missing_blob_is_not_retried(store, tmp_path, is_bundle):
    with open_blobs(store) as blobs:
        place = blobs.put(b"other")
    missing = BlobRef("0" * 64, 4, "/nowhere", place.store)
    failed = perform(FetchBlob(missing, str(tmp_path / "node"), is_bundle, 9.0))
    assert isinstance(failed, TransferFailed)
    assert failed.is_corrupt
    assert os.listdir(tmp_path / "node") == []


@pytest.mark.parametrize("is_bundle", [False, True])
@pytest.mark.parametrize(
    ("number", "is_disk"),
    [
        (errno.ENOSPC, True),
        (errno.EDQUOT, True),
        (errno.EROFS, True),
        (errno.EACCES, True),
        (errno.EIO, False),
    ],
)
def test_disk_failure_is_told_from_a_store_failure(
    store, tmp_path, monkeypatch, is_bundle, number, is_disk
):
    (tmp_path / "train.py").write_text("VALUE = 1\n")
    with open_blobs(store) as blobs:
        ref = bundle(tmp_path / "train.py", blobs)
    make = Path.mkdir

    def refuse(path: Path, *how: object, **named: object) -> None:
        if path == tmp_path / "node":
            raise OSError(number, os.strerror(number))
        make(path, *how, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", refuse)
    failed = perform(FetchBlob(ref, str(tmp_path / "node"), is_bundle, 9.0))
    assert isinstance(failed, TransferFailed)
    assert (failed.is_disk, failed.is_corrupt) == (is_disk, False)
    assert os.strerror(number) in failed.reason


def test_malformed_bundle_is_refused(store, tmp_path):
    with open_blobs(store) as blobs:
        ref = blobs.put(b"code")
    failed = perform(FetchBlob(ref, str(tmp_path / "node"), is_bundle=True, timeout_s=9.0))
    assert isinstance(failed, TransferFailed)
    assert failed.is_corrupt
    assert "is no bundle" in failed.reason
