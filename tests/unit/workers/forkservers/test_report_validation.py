"""How a node handles forged reports of its forkserver.

The tests write them to the real socket of a real forkserver, as a preloaded module could.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tunemq_shared.code.blob_folder import BlobFolder
from tunemq_shared.code.config_packing import pack_config
from tunemq_shared.protocol.messages import Environment, TrialOrder, TrialSpec
from tunemq_shared.protocol.result_conditions import TO_THE_END
from tunemq_shared.trainable.trainable_blobs import ship
from tunemq_workers.forkservers.forkserver_client import ForkserverClient
from tunemq_workers.forkservers.forkserver_pool import ForkserverPool
from tunemq_workers.forkservers.report_validation import InvalidReport, ReportedProcesses
from tunemq_workers.processes.forkserver_messages import (
    MAX_PACKET_BYTES,
    MAX_TEXT,
    ForkserverReady,
    ForkserverWarned,
    PreloadBegan,
    ProcessExited,
    ProcessForked,
    ProcessTreeGone,
    ProcessTreeStuck,
    encode,
)
from tunemq_workers.processes.memory_groups import MemoryCgroups
from tunemq_workers.runtime.frame_connection import FrameConnection
from tunemq_workers.runtime.reactor import Reactor

_PIDFD_GETFD = 438
#: Linux 6.16 and newer refuse descriptors for a socket that does not want them.
REFUSES_DESCRIPTORS = tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 16)


def waits(config):
    import time

    while True:
        time.sleep(600)


class Heard:
    """A listener that records its calls as ``(what, trial_process, more)``."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, object]] = []

    def forked(self, name: str, pid: int) -> None:
        self.told.append(("forked", name, pid))

    def exited(self, name: str, signal: int | None, exit_code: int | None) -> None:
        self.told.append(("exited", name, (signal, exit_code)))

    def lost(self, name: str, reason: str) -> None:
        self.told.append(("lost", name, reason))

    def not_started(self, name: str, reason: str) -> None:
        self.told.append(("not_started", name, reason))

    def gone(self, name: str) -> None:
        self.told.append(("gone", name, None))

    def said(self, name: str, kind: int, payload: bytes) -> None:
        pass

    def closed(self, name: str) -> None:
        pass

    def of(self, what: str, trial_process: str) -> list[object]:
        return [more for one, name, more in self.told if (one, name) == (what, trial_process)]


class Node:
    """A pool of forkservers, in a loop that a test runs."""

    def __init__(self, folder: Path) -> None:
        (folder / "logs").mkdir()
        self.folder, self.reactor, self.heard = folder, Reactor(), Heard()
        self.pool = ForkserverPool(
            self.reactor,
            set(),
            folder=str(folder),
            hostname="trial_process",
            node_ip="127.0.0.1",
            groups=MemoryCgroups("x"),
        )
        self.connections: list[FrameConnection] = []
        self._code = ship(waits, BlobFolder(folder / "blobs"))

    def until(self, condition: Callable[[], object], within: float = 60.0) -> None:
        """Run the loop until the condition holds."""
        deadline = time.monotonic() + within

        def look() -> None:
            if condition() or time.monotonic() > deadline:
                self.reactor.stop()
            else:
                self.reactor.after(0.01, lambda: None)

        self.reactor.after(0.0, lambda: None)
        self.reactor.run(look)
        assert condition(), self.heard.told

    def ask(self, trial_process: str, number: int = 0, **variables: str) -> ForkserverClient:
        """Request a trial process and return its forkserver."""
        path = {"PATH": os.environ.get("PATH", "")}
        environment = Environment(sys.executable, (), {**path, **variables}, tuple(sys.path))
        start = TrialSpec(
            experiment="e",
            events_key="events",
            trial_name="t",
            trial_number=number,
            folder=str(self.folder / trial_process),
            code=self._code,
            config=pack_config({}),
            resources={"cpu": 1.0},
            environment=environment,
            store=str(self.folder),
        )
        order = TrialOrder("t", 1, TO_THE_END, stop=False, start=start)
        self.connections.append(self.pool.start(trial_process, order, self.heard))
        return self.pool._running[trial_process].server

    def forked(self, trial_process: str) -> int:
        """Wait for a trial process and return its pid."""
        self.until(lambda: self.heard.of("forked", trial_process))
        pid = self.heard.of("forked", trial_process)[0]
        assert isinstance(pid, int)
        return pid


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.pool.close()
    for connection in node.connections:
        connection.close()


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that is unrelated to any forkserver."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def end_of(server: ForkserverClient) -> socket.socket:
    """Return the forkserver's end of its socket to the node."""
    number = int(Path(f"/proc/{server.pid}/cmdline").read_bytes().split(b"\0")[-3])
    pidfd = os.pidfd_open(server.pid)
    try:
        stolen = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, number, 0)
        assert stolen >= 0, os.strerror(ctypes.get_errno())
        return socket.socket(fileno=stolen)
    finally:
        os.close(pidfd)


def write(server: ForkserverClient, *packets: bytes) -> None:
    with end_of(server) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_PACKET_BYTES)
        for packet in packets:
            end.send(packet)


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}


def raw(*fields: object) -> bytes:
    return msgspec.msgpack.encode(fields)


#: Invalid reports of a forkserver with one trial process, h1; ``{pid}`` is the pid of h1.
LIES: dict[str, Callable[[int], bytes]] = {
    "no msgpack": lambda pid: b"\xc1garbage",
    "a text": lambda pid: msgspec.msgpack.encode("forked"),
    "an unknown tag": lambda pid: raw("boo", "h1"),
    "half a report": lambda pid: encode(ProcessForked("h1", pid))[:-1],
    "two reports in one": lambda pid: 2 * encode(ForkserverWarned("registration")),
    "a wrong type": lambda pid: raw("exited", "h1", "pid", None, None),
    "a text that is no UTF-8": lambda pid: b"\x92\xa7warning\xa2\xff\xfe",
    "deep nesting": lambda pid: b"\x92\xa7warning" + b"\x91" * 60_000,
    "a packet that is too long": lambda pid: encode(
        ForkserverWarned("w" * (MAX_PACKET_BYTES + 100))
    ),
    "a text that is too long": lambda pid: encode(ForkserverWarned("w" * (MAX_TEXT + 1))),
    "a process that was not requested": lambda pid: encode(ProcessForked("h7", pid)),
    "the same process twice": lambda pid: encode(ProcessForked("h1", pid)),
    "an end of an unknown process": lambda pid: encode(ProcessExited("h7", pid, 9, None)),
    "an end of a process that runs": lambda pid: encode(ProcessExited("h1", pid, 9, None)),
    "an end with another pid": lambda pid: encode(ProcessExited("h1", pid + 1, 9, None)),
    "an end without a pid": lambda pid: encode(ProcessExited("h1", None, None, None)),
    "a signal that there is not": lambda pid: encode(ProcessExited("h1", pid, -9, None)),
    "an exit code that there is not": lambda pid: encode(ProcessExited("h1", pid, None, 2**60)),
    "a process tree that is gone before its process": lambda pid: encode(ProcessTreeGone("h1")),
    "a process tree of an unknown process": lambda pid: encode(ProcessTreeGone("h7")),
    "a stuck tree of an unknown process": lambda pid: encode(ProcessTreeStuck("h7", False, ())),
    "a stuck tree before its process": lambda pid: encode(ProcessTreeStuck("h2", False, ())),
    "a stuck tree of an ended process": lambda pid: encode(ProcessTreeStuck("h1", True, ())),
    "a process twice": lambda pid: encode(ProcessForked("h2", pid)),
    "init": lambda pid: encode(ProcessForked("h2", 1)),
    "this process": lambda pid: encode(ProcessForked("h2", os.getpid())),
    "process 0": lambda pid: raw("forked", "h2", 0),
    "a negative pid": lambda pid: raw("forked", "h2", -pid),
    "the lowest pid": lambda pid: raw("forked", "h2", -(2**63)),
    "the highest pid": lambda pid: raw("forked", "h2", 2**64 - 1),
    "preloading when ready": lambda pid: encode(PreloadBegan("module")),
    "ready again": lambda pid: encode(ForkserverReady(())),
}


class Reported:
    """A node and a forkserver that this process plays; its trial process is ``h1``."""

    def __init__(self, trial_process: subprocess.Popen[bytes]) -> None:
        control, self.end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        self.end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_PACKET_BYTES)
        self.control, self.pid = control, trial_process.pid
        self.reported_processes = ReportedProcesses(control, os.getpid(), os.getuid())
        self.reported_processes.ask("h1")
        self.reported_processes.ask("h2")
        self.take(encode(ForkserverReady(())))
        self.take(encode(ProcessForked("h1", trial_process.pid)))

    def take(self, packet: bytes) -> object:
        self.end.send(packet)
        return self.reported_processes.receive()


@pytest.fixture
def reported(victim: subprocess.Popen[bytes]) -> Iterator[Reported]:
    reported = Reported(victim)
    yield reported
    reported.reported_processes.forget()
    reported.control.close()
    reported.end.close()


@pytest.mark.parametrize("lie", LIES)
def test_report_that_cannot_be_true_is_rejected(reported, lie):
    with pytest.raises(InvalidReport):
        reported.take(LIES[lie](reported.pid))


def test_report_of_a_process_with_the_number_of_a_thread_is_rejected(reported):
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    with pytest.raises(InvalidReport, match="is the number of no process"):
        reported.take(encode(ProcessForked("h2", thread.native_id or 0)))
    over.set()
    thread.join()


def test_report_of_a_process_that_runs_as_another_user_is_rejected(victim):
    control, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reported_processes = ReportedProcesses(control, os.getpid(), os.getuid() + 1)
    reported_processes.ask("h1")
    with control, end:
        end.send(encode(ProcessForked("h1", victim.pid)))
        with pytest.raises(InvalidReport, match="does not run as user"):
            reported_processes.receive()


def test_reports_of_a_process_that_ended_before_they_were_read_are_accepted(reported):
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    for report in (
        ProcessForked("h2", gone.pid),
        ProcessExited("h2", gone.pid, None, 0),
        ProcessTreeGone("h2"),
    ):
        assert reported.take(encode(report)) == report
    assert reported.reported_processes.names() == reported.reported_processes.unended() == ["h1"]


def looks(reported: Reported, number: int = 1000) -> tuple[int, str]:
    """Look until something is hidden; return how often, and what."""
    for n in range(1, number + 1):
        if hidden := reported.reported_processes.hidden():
            return n, hidden
    return number, ""


def test_forkserver_that_does_not_fork_is_found(reported):
    assert looks(reported) == (12, "of trial process h2 that it was forked")


@pytest.mark.parametrize("hides", ["its end", "that its tree is gone"])
def test_forkserver_that_hides_the_end_of_a_trial_process_is_found(reported, victim, hides):
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    reported.take(encode(ProcessForked("h2", gone.pid)))
    reported.take(encode(ProcessExited("h2", gone.pid, None, 0)))
    reported.take(encode(ProcessTreeGone("h2")))
    assert looks(reported) == (1000, "")
    victim.kill()
    victim.wait()
    if hides == "its end":
        assert looks(reported) == (12, "of trial process h1 that it has ended")
        return
    assert looks(reported, 11) == (11, "")
    reported.take(encode(ProcessExited("h1", reported.pid, signal.SIGKILL, None)))
    assert looks(reported) == (12, "of trial process h1 that all that it left has ended")


def test_forkserver_that_does_not_say_that_a_killed_process_is_stuck_is_found(
    reported, monkeypatch
):
    reported.take(encode(ProcessExited("h2", None, None, None)))
    reported.take(encode(ProcessTreeGone("h2")))
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)
    reported.reported_processes.kill("h1")
    assert looks(reported) == (12, "of trial process h1 that it was killed and does not end")


def test_report_that_a_process_tree_is_stuck_has_its_processes_killed(reported, monkeypatch):
    send, sent = signal.pidfd_send_signal, []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *one: (sent.append(one[1]), send(*one)))
    with (
        subprocess.Popen(["sleep", "600"], process_group=0) as trial_process,
        subprocess.Popen(["sleep", "600"], process_group=trial_process.pid) as left,
    ):
        reported.take(encode(ProcessForked("h2", trial_process.pid)))
        reported.take(encode(ProcessTreeStuck("h2", False, (trial_process.pid,))))
        is_killed = sent == [signal.SIGKILL] * 2
        if not is_killed:
            os.killpg(trial_process.pid, signal.SIGKILL)
    assert is_killed
    assert trial_process.returncode == left.returncode == -signal.SIGKILL
    assert reported.reported_processes.names() == ["h1"]


def test_slot_of_a_stuck_process_tree_is_free_and_its_search_is_warned(node):
    warned: list[tuple[str, str]] = []
    node.pool.on_warning = lambda key, text: warned.append((key, text))
    server = node.ask("h1")
    pid = node.forked("h1")
    os.kill(server.pid, signal.SIGSTOP)
    write(server, encode(ProcessTreeStuck("h1", False, (pid,))))
    node.until(lambda: node.heard.of("gone", "h1"))
    assert node.heard.of("exited", "h1") == [(signal.SIGKILL, None)]
    ((key, text),) = warned
    assert key == "events"
    assert f"killed processes do not end: {pid} (state" in text


def test_report_that_a_process_tree_has_ended_is_rejected_while_one_of_it_runs(reported):
    with (
        subprocess.Popen(["sleep", "600"], process_group=0) as trial_process,
        subprocess.Popen(["sleep", "600"], process_group=trial_process.pid) as left,
    ):
        reported.take(encode(ProcessForked("h2", trial_process.pid)))
        trial_process.kill()
        trial_process.wait()
        reported.take(encode(ProcessExited("h2", trial_process.pid, signal.SIGKILL, None)))
        with pytest.raises(InvalidReport, match=f"process {left.pid} of that trial runs"):
            reported.take(encode(ProcessTreeGone("h2")))
        left.kill()


def test_reports_of_a_process_that_could_not_be_forked_are_accepted(reported):
    for report in (ProcessExited("h2", None, None, None), ProcessTreeGone("h2")):
        assert reported.take(encode(report)) == report
    assert reported.reported_processes.names() == ["h1"]


@pytest.mark.parametrize("lie", ["no msgpack", "a packet that is too long", "a strange process"])
def test_report_that_cannot_be_true_costs_only_the_processes_of_its_forkserver(node, victim, lie):
    server = node.ask("h1")
    pid = node.forked("h1")
    node.ask("h2", OTHER="1")
    other = node.forked("h2")
    # A stopped forkserver cannot fork before the forged report arrives.
    os.kill(server.pid, signal.SIGSTOP)
    node.ask("h3")
    forged = encode(ProcessForked("h3", victim.pid))
    write(server, forged if lie == "a strange process" else LIES[lie](pid))

    node.until(lambda: node.heard.of("gone", "h1") and node.heard.of("gone", "h3"))
    for trial_process in ("h1", "h3"):
        (reason,) = node.heard.of("lost", trial_process)
        assert f"the forkserver {server.pid} was killed, because it " in str(reason)
    assert not is_alive(pid)
    assert not is_alive(server.pid)
    assert victim.poll() is None
    assert is_alive(other)
    assert [what for what, trial_process, _ in node.heard.told if trial_process == "h2"] == [
        "forked"
    ]
    # The next trial process of that environment is forked from another forkserver.
    assert node.ask("h4").pid != server.pid
    assert is_alive(node.forked("h4"))


def test_process_that_is_no_child_of_a_dead_forkserver_is_not_killed(node, victim):
    """The node reads the reports of a forkserver after its death."""
    server = node.ask("h1")
    node.until(lambda: server.is_ready)
    os.kill(server.pid, signal.SIGSTOP)
    node.ask("h2", 1)
    write(server, encode(ProcessForked("h2", victim.pid)))
    os.kill(server.pid, signal.SIGKILL)
    node.until(lambda: node.heard.of("gone", "h2"))
    assert victim.poll() is None


def test_report_with_descriptors_is_rejected(reported):
    socket.send_fds(reported.end, [encode(ForkserverWarned("registration"))], [0])
    with pytest.raises(InvalidReport, match="it sent descriptors"):
        reported.reported_processes.receive()


def test_forkserver_cannot_send_descriptors(node):
    server = node.ask("h1")
    node.forked("h1")
    with end_of(server) as end:
        try:
            socket.send_fds(end, [encode(ForkserverWarned("registration"))], [0])
        except PermissionError:
            return
    assert not REFUSES_DESCRIPTORS
    node.until(lambda: node.heard.of("gone", "h1"))
    (reason,) = node.heard.of("lost", "h1")
    assert "was killed, because it sent descriptors" in str(reason)


def test_forkserver_that_reports_without_end_does_not_block_the_node(node):
    server = node.ask("h1")
    node.forked("h1")
    with end_of(server) as end:
        end.setblocking(False)
        rounds = []

        def flood() -> None:
            """Send reports as fast as the node reads: after each round there are more to read."""
            rounds.append(len(rounds))
            try:
                while True:
                    end.send(encode(ForkserverWarned(f"warning {len(rounds)}")))
            except BlockingIOError:
                pass

        receive = server._processes.receive

        def receive_and_flood():
            report = receive()
            flood()
            return report

        server._processes.receive = receive_and_flood
        flood()
        assert 0 < len(server.read()) <= 64
    del server._processes.receive


def test_process_that_sends_invalid_frames_when_its_forkserver_dies_is_no_problem(node):
    heard = node.heard

    def said(name: str, kind: int, payload: bytes) -> None:
        node.pool.kill(name)

    heard.lost = lambda name, reason: (
        said(name, 0, b""),
        heard.told.append(("lost", name, reason)),
    )
    server = node.ask("h1")
    node.forked("h1")
    os.kill(server.pid, signal.SIGKILL)
    node.until(lambda: heard.of("gone", "h1"))
    (reason,) = heard.of("lost", "h1")
    assert f"the forkserver {server.pid} was killed by SIGKILL" in str(reason)


def test_process_requested_when_a_dead_forkserver_is_found_is_forked_from_another(node):
    heard, servers = node.heard, []
    server = node.ask("h1")
    node.forked("h1")

    def lost(name: str, reason: str) -> None:
        heard.told.append(("lost", name, reason))
        servers.append(node.ask("h2", 1))

    heard.lost = lost
    os.kill(server.pid, signal.SIGKILL)
    node.until(lambda: heard.of("gone", "h1") and heard.of("forked", "h2"))
    assert servers[0] is not server


def test_warning_with_long_or_invalid_unicode_reaches_the_node(tmp_path, node):
    (tmp_path / "loud.py").write_text("raise ValueError('\\udc80' + 'x' * 200_000)")
    environment = Environment(sys.executable, ("loud",), {}, (str(tmp_path), *sys.path))
    warned: list[str] = []
    node.pool.on_warning = lambda _key, text: warned.append(text)
    node.pool.prewarm(environment)
    (server,) = node.pool._servers
    node.until(lambda: server.is_ready)
    (texts,) = node.pool._servers.values()
    (text,) = texts._texts
    assert text.startswith("loud could not be preloaded (ValueError: ?xxx")
    assert len(text) == MAX_TEXT
