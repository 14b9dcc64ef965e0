"""The scheduler checks its disks, its certificates and the note of the last backup."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificate_server import showing
from tests.support.small_disk import with_small_disk
from tests.support.stores.object_servers import Certificate
from tests.support.waiting import eventually
from tunemq_scheduler.farm.monitoring import head_metrics
from tunemq_scheduler.farm.monitoring.head_metrics import HeadWatch
from tunemq_scheduler.farm.monitoring.metrics_snapshot import DiskState
from tunemq_scheduler.storage.folders import BACKUP_NOTE

pytestmark = pytest.mark.integration


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return Certificate(tmp_path / "certificate")


@pytest.fixture
def port(certificate: Certificate) -> Iterator[int]:
    """Yield the port of a server that presents the certificate, and sends nothing more."""
    with showing(certificate) as port:
        yield port


def ended(watch: HeadWatch) -> None:
    """Close the watch, and wait for its threads."""
    watch.close()
    for thread in threading.enumerate():
        if thread.name in {"disk watch", "certificate watch"}:
            thread.join()


def test_head_watch_sees_disks_and_the_note_of_the_last_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(head_metrics, "_DISKS_EVERY_S", 0.01)
    watch = HeadWatch("redis://127.0.0.1:1", str(tmp_path), str(tmp_path), tmp_path, {})
    try:
        eventually(lambda: watch.seen().disks.keys() == {"results", "store"})
        disk = watch.seen().disks["results"]
        assert disk.is_writable
        assert disk.free is not None
        assert disk.size is not None
        assert 0 < disk.free <= disk.size
        assert not list(tmp_path.iterdir())
        assert watch.seen().backup_at is None
        note = tmp_path / BACKUP_NOTE
        note.touch()
        os.utime(note, (5.0, 5.0))
        eventually(lambda: watch.seen().backup_at == 5.0)
    finally:
        ended(watch)


def test_head_watch_without_space_or_permission_reports_an_unwritable_folder(
    tmp_path: Path,
):
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from tunemq_scheduler.farm.monitoring.head_metrics import HeadWatch\n"
        "from tests.support.waiting import eventually\n"
        "place = sys.argv[1]\n"
        "watch = HeadWatch('redis://127.0.0.1:1', place, place, Path(place), {})\n"
        "eventually(lambda: 'results' in watch.seen().disks)\n"
        "print(watch.seen().disks['results'])\n"
    )
    line = [sys.executable, "-c", program, str(tmp_path / "disk")]
    for options, inodes in (("size=1g,nr_inodes=1", "0.0"), ("size=1g,ro", r"[1-9]\d*\.0")):
        done = with_small_disk(tmp_path / "disk", line, options=options)
        assert re.search(f"free_inodes={inodes}, is_writable=False", done.stdout), done


def test_head_watch_of_a_missing_folder_says_that_it_cannot_be_written(tmp_path: Path):
    gone = str(tmp_path / "gone")
    watch = HeadWatch("redis://127.0.0.1:1", gone, gone, tmp_path, {})
    try:
        eventually(lambda: "results" in watch.seen().disks)
        assert watch.seen().disks["results"] == DiskState(is_writable=False)
    finally:
        ended(watch)


def test_head_watch_sees_when_certificates_of_redis_and_the_store_expire(
    tmp_path: Path, certificate: Certificate, port: int
):
    redis = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate.file}"
    store = f"s3://bucket/farm?endpoint=https://127.0.0.1:{port}&ca_file={certificate.file}"
    watch = HeadWatch(redis, str(tmp_path), store, tmp_path, {})
    try:
        wanted = {"redis", "redis_ca", "store", "store_ca"}
        eventually(lambda: watch.seen().certificates.keys() == wanted, message=watch.seen)
        assert len(set(watch.seen().certificates.values())) == 1
    finally:
        ended(watch)
