"""Disk jobs that take long."""

from __future__ import annotations

import threading

import pytest

from tests.support.refused_threads import threads_refused
from tunemq_workers.runtime import disk_jobs
from tunemq_workers.runtime.disk_jobs import DiskJobs
from tunemq_workers.runtime.reactor import Reactor, do_nothing


def test_late_disk_jobs_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_jobs, "_LATE_S", 0.05)
    reactor, is_over = Reactor(), threading.Event()
    warnings: list[str] = []
    jobs = DiskJobs(reactor)
    jobs.on_late = warnings.append
    jobs.run("/cache/a", is_over.wait, do_nothing)
    jobs.run("/cache/a", lambda: "result", lambda _: reactor.stop())
    reactor.after(0.5, is_over.set)
    reactor.run(do_nothing)
    assert len(warnings) == 1
    assert "at /cache/a take longer" in warnings[0]
    assert "a trial makes very many files" in warnings[0]


def test_job_that_hangs_holds_up_its_own_place_only() -> None:
    reactor, is_over = Reactor(), threading.Event()
    done: list[str] = []
    jobs = DiskJobs(reactor)
    jobs.run("/cache/a", is_over.wait, lambda _: done.append("hung"))
    jobs.run("/cache/a", lambda: "a", done.append)
    jobs.run("/cache/b", lambda: "b", lambda told: (done.append(told), is_over.set()))
    jobs.run("/cache/a", lambda: "last", lambda _: reactor.stop())
    reactor.run(do_nothing)
    assert done == ["b", "hung", "a"]


def test_jobs_that_follow_a_result_run_at_a_place_whose_jobs_were_done() -> None:
    reactor = Reactor()
    jobs = DiskJobs(reactor)
    results: list[int] = []

    def again(result: int) -> None:
        results.append(result)
        if result == 3:
            reactor.stop()
        else:
            jobs.run("/cache", lambda: result + 1, again)

    jobs.run("/cache", lambda: 1, again)
    reactor.run(do_nothing)
    assert results == [1, 2, 3]
    before = threading.active_count()
    jobs.run("/cache", lambda: 1, lambda _: reactor.stop())
    reactor.run(do_nothing)
    assert threading.active_count() <= before + 1


def test_job_runs_once_the_system_permits_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_jobs, "_RETRY_S", 0.05)
    reactor = Reactor()
    jobs, results = DiskJobs(reactor), list[str]()
    with threads_refused():
        jobs.run("/cache", lambda: "first", results.append)
        jobs.run("/cache", lambda: "second", lambda _: reactor.stop())
        reactor.after(0.2, reactor.stop)
        reactor.run(do_nothing)
        assert not results
    reactor.run(do_nothing)
    assert results == ["first"]
