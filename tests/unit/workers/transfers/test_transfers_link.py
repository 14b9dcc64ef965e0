"""The node's side of transfers, with a process that acts as a checkpoint's name says."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.transfers import Waiting, run_until
from tunemq_workers.processes import child_supervisor
from tunemq_workers.processes.child_process import ChildProcess
from tunemq_workers.processes.child_supervisor import ChildSupervisor
from tunemq_workers.runtime.reactor import Reactor, Timer
from tunemq_workers.runtime.transfer_messages import (
    DownloadCheckpoint,
    UploadCheckpoint,
    UploadResult,
    UploadTrialFiles,
)
from tunemq_workers.transfers import transfer_client
from tunemq_workers.transfers.transfer_client import TransferClient

#: Records every order and carries out those whose keys it knows.
PROCESS = """
import os, socket, sys
from tunemq_workers.runtime.frames import ANSWER, FrameDecoder, frame
from tunemq_workers.runtime.transfer_messages import *
node, notes = socket.socket(fileno=int(sys.argv[1])), open(sys.argv[2], "a")
def answer(*answers):
    node.sendall(b"".join(frame(ANSWER, encode(one)) for one in answers))
done = UploadResult("sha", 7, ("t/c/a",), 3)
decoder = FrameDecoder()
while data := node.recv(2**16):
    for _, payload in decoder.feed(data):
        order = decode_order(payload)
        is_begin = isinstance(order, BeginTransfer)
        word = order.transfer.key if is_begin else "abandon"
        print(word, order.id, file=notes, flush=True)
        match word.partition("/")[2]:
            case "good": answer(TransferDone(order.id, done))
            case "fetched": answer(TransferDone(order.id))
            case "bad": answer(TransferFailed(order.id, "the disk is full"))
            case "damaged": answer(TransferFailed(order.id, "the hash is wrong", True))
            case "troubled": answer(TransferRetrying(order.id, "no answer"))
            case "goes-on":
                answer(TransferRetrying(order.id, "no answer"), TransferRetrying(order.id, ""))
                answer(TransferDone(order.id))
            case "deadly": os._exit(3)
            case "garbage": node.sendall(frame(ANSWER, b"\\xc1") + frame(ANSWER, b""))
            case "foreign": node.sendall(frame(7, encode(TransferDone(order.id))))
            case "long": node.sendall((2**31).to_bytes(4, "big") + b"A")
        if word == "abandon" and "stuck" not in sys.argv:
            is_done = "quick" in sys.argv
            failed = TransferFailed(order.id, "called off")
            answer(TransferDone(order.id, done) if is_done else failed)
"""

#: See `time_ends`.
SHORT_S = 0.3


class Processes:
    """Starts processes and records their orders."""

    def __init__(self, folder: Path) -> None:
        self.notes = folder / "notes"
        self.notes.touch()
        self.started: list[int] = []
        self.arguments: list[str] = []
        self.rejections = 0

    def start(self) -> ChildProcess:
        if self.rejections:
            self.rejections -= 1
            raise OSError("no more processes")
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.set_inheritable(True)
            arguments = [str(theirs.fileno()), str(self.notes), *self.arguments]
            command = [sys.executable, "-c", PROCESS, *arguments]
            pid = os.posix_spawn(sys.executable, command, os.environ)
        self.started.append(pid)
        return ChildProcess(pid, ours)

    def told(self) -> list[str]:
        """Return the keys of the transfers that began, and each "abandon"."""
        return [line.split()[0] for line in self.notes.read_text().splitlines()]


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Processes:
    monkeypatch.setattr(child_supervisor, "_CLOSE_S", 60.0)  # killing takes time if busy
    return Processes(tmp_path)


@pytest.fixture
def reactor() -> Reactor:
    return Reactor()


@pytest.fixture
def children() -> set[int]:
    return set()


@pytest.fixture
def time_ends(reactor: Reactor, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let the time of all who wait for `SHORT_S` run out; it does not by itself."""
    after, ends = reactor.after, []

    def held(delay_s: float, call: Callable[[], None]) -> Timer:
        if delay_s != SHORT_S:
            return after(delay_s, call)
        ends.append(call)
        return after(1e6, call)

    def end() -> None:
        for call in ends:
            after(0.0, call)

    monkeypatch.setattr(reactor, "after", held)
    return end


@pytest.fixture
def transfers(
    reactor: Reactor, processes: Processes, children: set[int]
) -> Iterator[TransferClient]:
    transfers = TransferClient(reactor, start=processes.start, children=children)
    yield transfers
    transfers.close()
    assert not children


def upload(name: str, timeout_s: float = 300) -> UploadCheckpoint:
    return UploadCheckpoint("s3://b/x", f"t/{name}", "/cache/t/c", "", timeout_s)


def download(name: str, timeout_s: float = 300) -> DownloadCheckpoint:
    return DownloadCheckpoint("s3://b/x", f"t/{name}", "sha", "/cache/t/c", timeout_s)


def files(name: str) -> UploadTrialFiles:
    return UploadTrialFiles("s3://b/x", f"t/{name}", "/trials/t", 1, 300)


def test_no_process_exists_before_the_first_transfer(transfers, processes, reactor):
    run_until(reactor, lambda: True)
    assert (transfers.pid, len(transfers), processes.started) == (None, 0, [])


def test_upload_returns_the_committed_checkpoint(transfers, reactor, children):
    it = Waiting()
    transfers.start(upload("good"), *it.callbacks)
    assert len(transfers) == 1
    run_until(reactor, lambda: it.is_over)
    assert it.done == [UploadResult("sha", 7, ("t/c/a",), 3)]
    assert len(transfers) == 0
    assert children == {transfers.pid}


def test_failure_names_the_reason_and_whether_data_is_damaged(transfers, reactor):
    bad, damaged = Waiting(), Waiting()
    transfers.start(download("bad"), *bad.callbacks)
    transfers.start(download("damaged"), *damaged.callbacks)
    run_until(reactor, lambda: bad.is_over and damaged.is_over)
    assert bad.failed == [("the disk is full", False)]
    assert damaged.failed == [("the hash is wrong", True)]


@pytest.mark.parametrize("key", ["garbage", "foreign", "long"])
def test_process_that_sends_what_cannot_be_read_is_replaced(transfers, processes, reactor, key):
    """What a trial wrote may have made it do so; the node serves others."""
    hostile, other, why = Waiting(), Waiting(), []
    transfers.on_death = why.append
    number = transfers.start(upload(key), *hostile.callbacks)
    run_until(reactor, lambda: why)
    assert "sent what cannot be read" in why[0]
    assert not hostile.is_over
    transfers.cancel(number)
    transfers.start(upload("good"), *other.callbacks)
    run_until(reactor, lambda: other.is_over)
    assert other.done
    assert len(processes.started) >= 2


def test_one_process_does_all_transfers(transfers, processes, reactor):
    waiting = [Waiting() for _ in range(20)]
    for it in waiting:
        transfers.start(upload("good"), *it.callbacks)
    run_until(reactor, lambda: all(it.is_over for it in waiting))
    assert len(processes.started) == 1


def test_problem_and_its_end_are_reported(transfers, reactor):
    it = Waiting()
    transfers.start(download("goes-on"), *it.callbacks)
    run_until(reactor, lambda: it.is_over)
    assert it.troubles == ["no answer", ""]
    assert it.done


def test_ten_requests_for_one_checkpoint_are_one_download(transfers, processes, reactor):
    waiting = [Waiting() for _ in range(10)]
    for it in waiting:
        transfers.start(download("fetched"), *it.callbacks)
    assert len(transfers) == 1
    run_until(reactor, lambda: all(it.is_over for it in waiting))
    assert all(it.done for it in waiting)
    assert processes.told() == ["t/fetched"]


def test_later_request_learns_of_the_problem(transfers, reactor):
    first, second = Waiting(), Waiting()
    transfers.start(download("troubled"), *first.callbacks)
    run_until(reactor, lambda: first.troubles)
    transfers.start(download("troubled"), *second.callbacks)
    assert not second.troubles
    run_until(reactor, lambda: second.troubles == ["no answer"])


def test_transfer_without_waiting_requests_is_cancelled(transfers, processes, reactor):
    first, second = Waiting(), Waiting()
    numbers = [transfers.start(download("slow"), *it.callbacks) for it in (first, second)]
    run_until(reactor, lambda: processes.told() == ["t/slow"])
    transfers.cancel(numbers[0])
    assert len(transfers) == 1
    transfers.cancel(numbers[1])
    transfers.cancel(numbers[1])
    assert len(transfers) == 0
    run_until(reactor, lambda: processes.told() == ["t/slow", "abandon"])
    assert not first.is_over
    assert not second.is_over


def test_request_during_a_cancellation_starts_the_transfer_anew(transfers, processes, reactor):
    first, second = Waiting(), Waiting()
    number = transfers.start(download("slow"), *first.callbacks)
    run_until(reactor, processes.told)
    transfers.cancel(number)
    number = transfers.start(download("slow"), *second.callbacks)
    run_until(reactor, lambda: processes.told() == ["t/slow", "abandon", "t/slow"])
    assert not second.is_over
    transfers.cancel(number)


def test_request_after_a_cancellation_does_not_get_its_result(transfers, processes, reactor):
    processes.arguments = ["quick"]
    first, second = Waiting(), Waiting()
    number = transfers.start(download("slow"), *first.callbacks)
    run_until(reactor, processes.told)
    transfers.cancel(number)
    number = transfers.start(download("slow"), *second.callbacks)
    run_until(reactor, lambda: processes.told() == ["t/slow", "abandon", "t/slow"])
    assert not second.is_over
    transfers.cancel(number)


def test_transfer_done_just_after_its_timeout_is_done(transfers, processes, reactor):
    processes.arguments = ["quick"]
    it = Waiting()
    transfers.start(upload("slow", timeout_s=0.3), *it.callbacks)
    run_until(reactor, lambda: it.is_over)
    assert it.done


def test_transfer_that_takes_too_long_is_cancelled_with_the_last_problem(
    transfers, processes, reactor, time_ends
):
    it = Waiting()
    transfers.start(upload("troubled", SHORT_S), *it.callbacks)
    run_until(reactor, lambda: it.troubles)
    time_ends()
    run_until(reactor, lambda: it.is_over)
    [(reason, is_corrupt)] = it.failed
    assert reason == "it was given up after 0.3 s: no answer"
    assert not is_corrupt
    assert processes.told() == ["t/troubled", "abandon"]


def test_each_request_has_its_timeout(transfers, processes, reactor, time_ends):
    short, long = Waiting(), Waiting()
    transfers.start(download("slow", SHORT_S), *short.callbacks)
    number = transfers.start(download("slow", timeout_s=300), *long.callbacks)
    run_until(reactor, processes.told)
    time_ends()
    run_until(reactor, lambda: short.is_over)
    assert short.failed
    assert not long.is_over
    assert processes.told() == ["t/slow"]
    transfers.cancel(number)


def test_process_that_dies_is_replaced_and_gets_unfinished_transfers(
    transfers, processes, reactor, children
):
    deaths: list[str] = []
    transfers.on_death = deaths.append
    slow, done, fetched = Waiting(), Waiting(), Waiting()
    transfers.start(upload("slow"), *slow.callbacks)
    transfers.start(upload("good"), *done.callbacks)
    transfers.start(download("slow"), *fetched.callbacks)
    run_until(reactor, lambda: len(processes.told()) == 3 and done.is_over)
    os.kill(transfers.pid, signal.SIGKILL)
    run_until(reactor, lambda: len(processes.told()) == 5)
    assert processes.told()[3:] == ["t/slow", "t/slow"]
    assert len(done.done) == 1
    assert children == {processes.started[1]}
    assert len(slow.troubles) == 2
    assert "ended with SIGKILL" in slow.troubles[0]
    assert not slow.troubles[1]
    assert deaths == slow.troubles[:1]


def test_stopped_transfer_process_is_replaced_long_before_its_transfers_time_out(
    transfers, processes, reactor
):
    it = Waiting()
    transfers.start(upload("slow"), *it.callbacks)
    run_until(reactor, processes.told)
    os.kill(transfers.pid, signal.SIGSTOP)
    run_until(reactor, lambda: processes.told() == ["t/slow", "t/slow"])
    assert "was stopped" in it.troubles[0]


def test_killed_process_that_does_not_end_is_replaced(
    transfers, processes, reactor, children, monkeypatch, caplog
):
    monkeypatch.setattr(child_supervisor, "_STUCK_S", 0.01)
    it = Waiting()
    number = transfers.start(upload("slow"), *it.callbacks)
    run_until(reactor, processes.told)
    stuck = transfers.pid
    os.kill(stuck, signal.SIGSTOP)
    os.waitid(os.P_PID, stuck, os.WSTOPPED)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", lambda *_: None)  # as if it waited for a lost file system
            transfers._child.end("it was stopped")
            run_until(reactor, lambda: len(processes.told()) == 2)
        assert children == {transfers.pid}
        assert f"killed processes do not end: {stuck} (state T)" in caplog.text
        transfers.cancel(number)
    finally:
        os.kill(stuck, signal.SIGKILL)
        os.waitpid(stuck, 0)


def test_transfer_that_no_request_waits_for_is_not_restarted(transfers, processes, reactor):
    it = Waiting()
    number = transfers.start(upload("slow"), *Waiting().callbacks)
    transfers.start(upload("slower"), *it.callbacks)
    run_until(reactor, lambda: len(processes.told()) == 2)
    os.kill(transfers.pid, signal.SIGKILL)
    transfers.cancel(number)
    run_until(reactor, lambda: processes.told()[2:] == ["t/slower"])


def test_process_that_always_dies_does_not_block_requests_for_ever(
    transfers, processes, reactor, time_ends
):
    it = Waiting()
    transfers.start(upload("deadly", SHORT_S), *it.callbacks)
    run_until(reactor, lambda: len(processes.started) == 3)
    time_ends()
    run_until(reactor, lambda: it.is_over)
    [(reason, _)] = it.failed
    assert "ended with exit code 3" in reason
    assert len(processes.started) <= 4


def test_files_of_a_trial_during_which_the_process_died_twice_are_given_up(
    transfers, processes, reactor
):
    """After the first death one trial's files are sent at a time, to find whose are deadly."""
    slow, checkpoint, deadly = Waiting(), Waiting(), Waiting()
    number = transfers.start(files("slow"), *slow.callbacks)
    transfers.start(upload("slower"), *checkpoint.callbacks)
    transfers.start(files("deadly"), *deadly.callbacks)
    before = ["t/slow", "t/slower", "t/deadly"]
    run_until(reactor, lambda: processes.told() == [*before, "t/slow", "t/slower"])
    assert not deadly.is_over
    transfers.cancel(number)
    run_until(reactor, lambda: deadly.is_over)
    [(reason, is_corrupt)] = deadly.failed
    assert "died 2 times while it sent them" in reason
    assert "ended with exit code 3" in reason
    assert not is_corrupt
    run_until(reactor, lambda: processes.told().count("t/slower") == 3)
    assert processes.told().count("t/deadly") == 2
    assert not checkpoint.is_over
    later = Waiting()
    transfers.start(files("good"), *later.callbacks)
    run_until(reactor, lambda: later.is_over)
    assert later.done


def test_process_that_cannot_be_started_is_tried_again(transfers, processes, reactor):
    processes.rejections = 2
    it = Waiting()
    transfers.start(upload("good"), *it.callbacks)
    run_until(reactor, lambda: it.is_over)
    assert it.done
    assert "no more processes" in it.troubles[0]


def test_process_that_does_not_cancel_a_transfer_is_killed(
    transfers, processes, reactor, monkeypatch, time_ends
):
    monkeypatch.setattr(transfer_client, "_LEAVING_S", 0.2)
    processes.arguments = ["stuck"]
    late, other = Waiting(), Waiting()
    transfers.start(upload("slow", SHORT_S), *late.callbacks)
    transfers.start(upload("slower"), *other.callbacks)
    run_until(reactor, lambda: processes.told() == ["t/slow", "t/slower"])
    time_ends()
    run_until(reactor, lambda: late.is_over)
    assert "given up after 0.3 s" in late.failed[0][0]
    run_until(reactor, lambda: processes.told().count("t/slower") == 2)
    assert len(processes.started) == 2
    assert not other.is_over


def test_idle_process_is_ended_and_another_starts_with_new_work(
    transfers, processes, reactor, children, monkeypatch
):
    monkeypatch.setattr(transfer_client, "_IDLE_S", 0.05)
    first, second = Waiting(), Waiting()
    transfers.start(upload("good"), *first.callbacks)
    run_until(reactor, lambda: first.is_over and not children)
    assert transfers.pid is None
    transfers.start(upload("good"), *second.callbacks)
    run_until(reactor, lambda: second.is_over)
    assert second.troubles == []
    assert len(processes.started) == 2


def test_work_may_arrive_while_an_idle_process_ends(transfers, reactor):
    first, second = Waiting(), Waiting()
    transfers.start(upload("good"), *first.callbacks)
    run_until(reactor, lambda: first.is_over)
    transfers._rest()
    transfers.start(upload("good"), *second.callbacks)
    run_until(reactor, lambda: second.is_over)
    assert second.troubles == []


def test_callbacks_may_order_and_cancel_transfers(transfers, processes, reactor):
    waiting = [Waiting() for _ in range(4)]
    numbers = []

    def told(*_):
        transfers.cancel(numbers[1])
        transfers.start(download("fetched"), *waiting[2].callbacks)

    callbacks = told, waiting[0].on_failed, waiting[0].on_trouble
    numbers.append(transfers.start(download("fetched"), *callbacks))
    numbers.append(transfers.start(download("fetched"), *waiting[1].callbacks))
    run_until(reactor, lambda: waiting[2].is_over)
    assert waiting[2].done
    assert not waiting[1].is_over


def test_nothing_is_left_after_the_end(processes, reactor):
    children: set[int] = set()
    transfers = TransferClient(reactor, start=processes.start, children=children)
    it = Waiting()
    transfers.start(upload("slow"), *it.callbacks)
    run_until(reactor, processes.told)
    [pid] = children
    transfers.close()
    assert (len(transfers), transfers.pid, children) == (0, None, set())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not it.is_over


def test_pauses_between_deaths_grow(reactor, processes, children, monkeypatch):
    pauses: list[float] = []
    after = reactor.after

    def at_once(delay_s, call):
        if getattr(call, "__name__", "") == "_start_now":
            pauses.append(delay_s)
            delay_s = 0
        return after(delay_s, call)

    monkeypatch.setattr(reactor, "after", at_once)
    processes.rejections = 12
    ends: list[str] = []
    held = ChildSupervisor(
        reactor,
        "transfers",
        processes.start,
        children,
        on_up=lambda: None,
        decode=bytes,
        on_answer=lambda _: None,
        on_end=lambda why: (ends.append(why), held.start_if_none()),
    )
    held.start_if_none()
    run_until(reactor, lambda: held.is_up)
    held.close()
    assert pauses[:4] == [0.0, 0.1, 0.2, 0.4]
    assert max(pauses) == 10
    assert len(ends) == 12
