"""Requests for the stacks of any processes must not break a node."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest

from tunemq_workers.trial_process import stack_dumps
from tunemq_workers.trial_process.stack_dumps import have_stacks_written

HOST, CHILDREN = 100, [101, 102, 103]


@pytest.fixture
def asked(monkeypatch):
    """The processes that were asked; the pid stands for the descriptor, and no process is real."""
    asked = []
    monkeypatch.setattr(
        stack_dumps.signal, "pidfd_send_signal", lambda pidfd, _: asked.append(pidfd)
    )
    monkeypatch.setattr(stack_dumps, "open_claimed", lambda pid, *, user: pid)
    monkeypatch.setattr(stack_dumps, "os", SimpleNamespace(close=lambda pidfd: None))
    monkeypatch.setattr(stack_dumps, "process_tree_of", lambda process: [process, *CHILDREN])
    monkeypatch.setattr(stack_dumps, "_listens", lambda pid: True)
    monkeypatch.setattr(stack_dumps, "time", SimpleNamespace(sleep=lambda seconds: None))
    return asked


@pytest.fixture
def broken(monkeypatch):
    """Threads that died of an exception, which would end a node."""
    broken = []
    monkeypatch.setattr(threading, "excepthook", broken.append)
    return broken


def have_all_asked():
    have_stacks_written(HOST, HOST)
    for thread in threading.enumerate():
        if thread.name == "stacks":
            thread.join()


def reject(problem, *pids):
    """Return a replacement for a function that raises ``problem`` for these pids."""

    def call(pid, *_, **__):
        if pid in pids:
            raise problem
        return pid

    return call


def test_process_and_its_children_are_signalled(asked, broken):
    have_all_asked()
    assert asked == [HOST, *CHILDREN]
    assert broken == []


def test_process_that_may_not_be_signalled_is_left_out(asked, broken, monkeypatch):
    send, rejected = (
        stack_dumps.signal.pidfd_send_signal,
        reject(PermissionError(1, "not yours"), 102),
    )
    monkeypatch.setattr(
        stack_dumps.signal, "pidfd_send_signal", lambda pidfd, number: send(rejected(pidfd), number)
    )
    have_all_asked()
    assert asked == [HOST, 101, 103]
    assert broken == []


def test_process_without_a_free_descriptor_is_left_out(asked, broken, monkeypatch):
    problem = OSError(24, os.strerror(24))
    monkeypatch.setattr(stack_dumps, "open_claimed", reject(problem, 101))
    have_all_asked()
    assert asked == [HOST, 102, 103]
    assert broken == []


@pytest.mark.parametrize("problem", [ProcessLookupError(), PermissionError(1, "not yours")])
def test_process_that_cannot_be_signalled_is_no_problem(asked, monkeypatch, problem):
    monkeypatch.setattr(stack_dumps.signal, "pidfd_send_signal", reject(problem, HOST))
    have_all_asked()
    assert asked == []


def test_machine_without_room_for_a_thread_is_no_problem(asked, monkeypatch):
    class NoThread:
        def __init__(self, **_):
            pass

        def start(self):
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(stack_dumps, "threading", SimpleNamespace(Thread=NoThread))
    have_stacks_written(HOST, HOST)
    assert asked == [HOST]
