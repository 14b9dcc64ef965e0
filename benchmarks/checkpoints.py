"""The cost of checkpoints: to MinIO, to a local folder, beside Ray Tune and plain uploads."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.bench import Bench
from benchmarks.figures import Row
from benchmarks.peers import Peer
from tests.support.stores.object_servers import ObjectServer, running_minio

_MB = 10**6
_TRIALS, _SAVES = 4, 20


def checkpoints(bench: Bench) -> Iterator[Row]:
    """4 trials x 20 checkpoints of 10 and of 100 MB, of which 2 are kept."""
    with _server(bench) as (server, scratch):
        for mb in (10, 100):
            yield from _throughput(bench, server, scratch, mb)
        yield from _unchanged(bench, server, scratch)


def _throughput(bench: Bench, server: ObjectServer, scratch: str, mb: int) -> Iterator[Row]:
    what = f"{_TRIALS} x {_SAVES} x {mb} MB"
    stored = Row(f"{what}: saved to MinIO", "MB/s", more_is_better=True)
    ratio = Row("the same / bare put_object by one client", "", goal=0.75, more_is_better=True)
    at_once = Row("the same / bare put_object by four at once", "", more_is_better=True)
    local = Row(f"{what}: saved to a folder", "MB/s", more_is_better=True)
    waited = Row(f"{what}: a report to MinIO takes", "ms")
    waited_locally = Row(f"{what}: a report to a folder takes", "ms")
    volume = _TRIALS * _SAVES * mb
    for peer in bench.repeat():
        figures = _search(peer, peer.folder, scratch, mb)
        local.add(peer.name, volume / (figures["safe"] - figures["began"]))
        waited_locally.add(peer.name, 1_000 * mean(figures["reports"]))
        if peer is bench.ours:
            bare = _bare_puts(peer, server, scratch, mb, clients=1)
            stored.add("floor", volume / bare)
            bare_at_once = _bare_puts(peer, server, scratch, mb, clients=_TRIALS)
            figures = _search(peer, server.address(server.create_bucket()), scratch, mb)
            rate = volume / (figures["safe"] - figures["began"])
            stored.add(peer.name, rate)
            ratio.add(peer.name, rate * bare / volume)
            at_once.add(peer.name, rate * bare_at_once / volume)
            waited.add(peer.name, 1_000 * mean(figures["reports"]))
    yield from (stored, ratio, at_once, local, waited, waited_locally)


def _unchanged(bench: Bench, server: ObjectServer, scratch: str) -> Iterator[Row]:
    row = Row("saving the same 100 MB again", "ms")
    beyond = Row("the same, beyond hashing them once", "ms", goal=20)
    data = os.urandom(100 * _MB)
    for _ in range(bench.runs):
        hashing = []
        for _ in range(5):
            started = time.perf_counter()
            hashlib.sha256(data).digest()
            hashing.append(1_000 * (time.perf_counter() - started))
        address = server.address(server.create_bucket())
        options = ("--trials", 1, "--saves", 10, "--unchanged")
        figures = _search(bench.ours, address, scratch, 100, *options)
        again = 1_000 * median(figures["reports"][1:])
        row.add("tunemq", again)
        row.add("floor", median(hashing))
        beyond.add("tunemq", again - median(hashing))
    yield from (row, beyond)


def saving_beside(bench: Bench) -> Iterator[Row]:
    """A trial that computes on one core and saves 50 MB at every fourth step of 0.5 s to MinIO."""
    slower = Row("all steps / those without an upload beside", "", goal=1.05)
    report = Row("report(50 MB) / a copy of it to that disk", "", goal=1.3)
    bare = Row("report(50 MB) / a copy that is not synced", "")
    with _server(bench) as (server, scratch):
        _be_elsewhere(server)
        for _ in range(bench.runs):
            address = server.address(server.create_bucket())
            options = ("--trials", 1, "--saves", 64, "--every", 4, "--step-s", 0.5)
            figures = _search(bench.ours, address, scratch, 50, *options)
            steps = figures["steps"][4:]  # when things have settled
            # Compare within one run: the machine's other load varies more between two runs. The
            # upload ends before the second step after a save.
            alone = [step for number, step in enumerate(steps) if number % 4 != 1]
            slower.add("tunemq", mean(steps) / mean(alone))
            synced, unsynced = _copying(scratch, 50)
            report.add("tunemq", median(figures["reports"]) / synced)
            bare.add("tunemq", median(figures["reports"]) / unsynced)
    yield from (slower, report, bare)


def _be_elsewhere(server: ObjectServer) -> None:
    """Give the server the lowest CPU priority: on a farm it runs on another machine."""
    assert server.process is not None
    for thread in os.listdir(f"/proc/{server.process.pid}/task"):
        os.setpriority(os.PRIO_PROCESS, int(thread), 19)


def _copying(scratch: str, mb: int) -> tuple[float, float]:
    """Seconds to copy a file, with and without its bytes on the disk."""
    source, synced, unsynced = Path(scratch, "copied"), [], []
    source.write_bytes(os.urandom(mb * _MB))
    for number in range(7):
        for times, syncs in ((synced, True), (unsynced, False)):
            target = Path(scratch, f"copy-{number}-{syncs}")
            started = time.perf_counter()
            shutil.copyfile(source, target)
            if syncs:
                with target.open("rb") as file:
                    os.fdatasync(file.fileno())
            times.append(time.perf_counter() - started)
            target.unlink()
    source.unlink()
    return median(synced), median(unsynced)


def _search(peer: Peer, storage: str, scratch: str, mb: int, *options: object) -> dict[str, Any]:
    given = ("--peer", peer.name, "--storage", storage, "--scratch", scratch, "--mb", mb)
    sizes = () if "--trials" in options else ("--trials", _TRIALS, "--saves", _SAVES)
    return peer.measure("checkpoints.py", *given, *sizes, *options, until="end").figures


def _bare_puts(peer: Peer, server: ObjectServer, scratch: str, mb: int, *, clients: int) -> float:
    """Seconds that `clients` processes need together for plain uploads."""
    bucket = server.create_bucket()
    where = ("--endpoint", server.url, "--bucket", bucket, "--folder", scratch)
    sizes = ("--clients", clients, "--puts", _TRIALS * _SAVES // clients, "--mb", mb)
    seconds: float = peer.measure("raw_puts.py", *where, *sizes, until="seconds").figures["seconds"]
    shutil.rmtree(server.data / bucket)  # free the disk for later benchmarks
    return seconds


@contextmanager
def _server(bench: Bench) -> Iterator[tuple[ObjectServer, str]]:
    """A MinIO with its credentials in our environment, and a folder for trials on its disk."""
    before = dict(os.environ)
    with (
        tempfile.TemporaryDirectory(dir=bench.ours.folder) as scratch,
        running_minio(Path(scratch, "minio")) as server,
    ):
        os.environ |= server.environ | {"TUNEMQ_RESULTS": scratch}
        try:
            yield server, scratch
        finally:
            os.environ.clear()
            os.environ |= before
