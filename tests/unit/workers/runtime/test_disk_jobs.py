"""Disk jobs that take long."""

from __future__ import annotations

import threading

import pytest

from tunemq_workers.runtime import disk_jobs
from tunemq_workers.runtime.disk_jobs import DiskJobs
from tunemq_workers.runtime.reactor import Reactor, do_nothing


def test_late_disk_jobs_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_jobs, "_LATE_S", 0.05)
    monkeypatch.setattr(DiskJobs, "_work", lambda jobs: [jobs._jobs.get()() for _ in range(2)])
    reactor, is_over = Reactor(), threading.Event()
    warnings: list[str] = []
    jobs = DiskJobs(reactor)
    jobs.on_late = warnings.append
    jobs.run(is_over.wait, do_nothing)
    jobs.run(lambda: "result", lambda _: reactor.stop())
    reactor.after(0.5, is_over.set)
    reactor.run(do_nothing)
    assert len(warnings) == 1
    assert "a trial makes very many files" in warnings[0]
