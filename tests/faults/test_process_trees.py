"""Real forkservers and trial processes: whatever dies, the whole process tree ends soon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.forkserver_driver import alive, serve
from tests.support.waiting import eventually
from tunemq_shared.protocol.messages import TrialFailed, TrialFinished, TrialStarted
from tunemq_workers.forkservers.forkserver_client import ForkserverLost
from tunemq_workers.processes.forkserver_messages import ProcessExited, ProcessTreeGone

__all__ = ["serve"]

pytestmark = pytest.mark.faults

#: A killed process tree is gone within a second; on a busy machine, within this time. Its members
#: sleep for longer.
SOON = 40.0


def start_a_process_tree(config):
    """Fork two children that hold all pipes, and a grandchild in a separate session."""
    import os
    import time

    from tunemq_shared.trial.session import report

    process_tree = []
    for _ in range(2):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            grandchild = os.fork()
            if grandchild:
                os.write(writing, b"%d" % grandchild)
            while True:
                time.sleep(600)
        process_tree += [pid, int(os.read(reading, 20))]
    report({"process_tree": process_tree})
    while True:
        time.sleep(600)


def test_f02_killed_trial_process_ends_its_process_tree(serve):
    process = serve().start(start_a_process_tree)
    process_tree = process.result()["process_tree"]
    assert all(map(alive, process_tree))

    os.kill(process.pid, signal.SIGKILL)
    process.gone(within=SOON)

    assert process.exited().signal == signal.SIGKILL
    assert not any(map(alive, [process.pid, *process_tree]))


def test_trial_process_killed_on_order_ends_only_its_process_tree(serve):
    server = serve()
    one, other = server.start(start_a_process_tree, 1), server.start(start_a_process_tree, 2)
    process_tree, others = one.result()["process_tree"], other.result()["process_tree"]

    server.client.kill(one.name)
    one.gone(within=SOON)

    assert not any(map(alive, process_tree))
    assert all(map(alive, others))
    assert not server.said(ProcessExited, other.name)


def hold_shared_memory(config):
    """Create a block in shared memory, and fork a process of the same group that has it, too."""
    import fcntl
    import os
    import struct
    import termios
    import time
    from multiprocessing import resource_tracker
    from multiprocessing.shared_memory import SharedMemory

    from tunemq_shared.trial.session import report

    block = SharedMemory(create=True, size=1 << 20)
    # A separate interpreter removes the block, and starts slowly on a busy machine. It runs once it
    # has read its first message.
    told = resource_tracker._resource_tracker._fd
    while struct.unpack("i", fcntl.ioctl(told, termios.FIONREAD, bytes(4))) != (0,):
        time.sleep(0.001)
    os.fork()
    if os.getpid() == os.getpgrp():
        report({"block": block.name})
    while True:
        time.sleep(600)


@pytest.mark.parametrize("is_ours", [True, False])
def test_shared_memory_of_a_killed_trial_is_removed(serve, is_ours):
    server = serve()
    process = server.start(hold_shared_memory)
    block = Path("/dev/shm", process.result()["block"])  # where Python has it
    assert block.exists()

    if is_ours:
        server.client.kill(process.name)
    else:
        os.kill(process.pid, signal.SIGKILL)
    process.gone(within=SOON)

    assert not block.exists()


def pretend_to_clean_up(config):
    """Fork a child that looks like a cleaner of shared memory, and does not end."""
    import subprocess
    import sys
    import time

    from tunemq_shared.trial.session import report

    child = subprocess.Popen(
        [sys.executable, "-c", "while True: pass", "multiprocessing.resource_tracker"]
    )
    report({"child": child.pid})
    time.sleep(600)


def test_child_that_only_seems_to_clean_up_is_killed_soon(serve):
    process = serve().start(pretend_to_clean_up)
    child = process.result()["child"]

    os.kill(process.pid, signal.SIGKILL)
    process.gone(within=SOON)

    assert not alive(child)


def leave_a_daemon(config):
    """Daemonise: fork twice, start a session, close every descriptor, and drop the mark."""
    import os
    import time

    from tunemq_shared.trial.session import report

    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(writing, b"%d" % os.getpid())
            os.closerange(0, 64)
            os.execve("/bin/sleep", ["sleep", "60"], {})
        os._exit(0)
    daemon = int(os.read(reading, 20))
    while os.path.basename(os.readlink(f"/proc/{daemon}/exe")).startswith("python"):
        time.sleep(0.001)
    report({"daemon": daemon, "step": 1})


@pytest.mark.parity(128)
def test_a_trial_that_ends_by_itself_leaves_no_daemon_behind(serve):
    process = serve().start(leave_a_daemon)
    daemon = process.result()["daemon"]

    process.gone()

    assert process.exited().exit_code == 0
    assert isinstance(process.events[-1], TrialFinished)
    assert not alive(daemon)


def test_trial_processes_that_die_at_once_are_all_reported(serve):
    server = serve()
    processes = [server.start(start_a_process_tree, number) for number in range(4)]
    pids = [
        pid for process in processes for pid in [process.pid, *process.result()["process_tree"]]
    ]

    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        process.gone(within=2 * SOON)

    assert not any(map(alive, pids))


def test_closed_control_socket_ends_the_forkserver_and_every_process_tree(serve):
    server = serve()
    process = server.start(start_a_process_tree)
    pids = [server.client.pid, process.pid, *process.result()["process_tree"]]

    server.client.close(within_s=SOON)

    assert not any(map(alive, pids))


NODE = """
    import sys, time
    from pathlib import Path
    from tests.support.forkserver_driver import Server
    from tests.faults.test_process_trees import start_a_process_tree

    server = Server(Path(sys.argv[1]))
    host = server.start(start_a_process_tree)
    print(server.client.pid, host.pid, *host.result()["process_tree"], flush=True)
    time.sleep(600)
"""


def test_killed_node_ends_all_its_processes(tmp_path):
    path = os.pathsep.join(entry for entry in sys.path if entry)
    node = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(NODE), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
    )
    with node:
        pids = [int(word) for word in node.stdout.readline().split()]
        assert len(pids) == 6
        assert all(map(alive, pids))
        node.kill()

    eventually(lambda: not any(map(alive, pids)), within=SOON)


def test_trial_processes_die_with_a_killed_forkserver_and_each_is_reported(serve):
    server = serve()
    processes = [server.start(wait_for_ever, number) for number in range(2)]
    pids = [process.pid for process in processes]
    for process in processes:
        process.result()

    os.kill(server.client.pid, signal.SIGKILL)
    with pytest.raises(ForkserverLost, match="was killed by SIGKILL") as lost:
        eventually(server.listen, within=SOON)

    assert not any(map(alive, pids))
    assert not [
        one for one in lost.value.reports if isinstance(one, ProcessExited | ProcessTreeGone)
    ]
    assert lost.value.unended == lost.value.processes == ["h0", "h1"]
    assert not lost.value.is_unusable


def wait_for_ever(config):
    import time

    from tunemq_shared.trial.session import report

    report({"loss": 1.0})
    while True:
        time.sleep(600)


def hold_the_gil(config):
    import ctypes
    import signal

    from tunemq_shared.trial.session import report

    if config["stubborn"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    report({"loss": 1.0})
    ctypes.PyDLL(None).sleep(600)


@pytest.mark.parity(18, 74)
def test_a_step_that_holds_the_gil_ends_when_it_is_asked_by_signal(serve):
    server = serve()
    process = server.start(hold_the_gil, config={"stubborn": False})
    process.result()

    server.client.term(process.name)

    assert process.exited(within=SOON).signal == signal.SIGTERM
    process.gone(within=SOON)


def test_a_step_that_holds_the_gil_and_ignores_the_signal_is_killed(serve):
    server = serve()
    other = server.start(wait_for_ever, 1)
    process = server.start(hold_the_gil, config={"stubborn": True})
    process.result()

    server.client.term(process.name)
    # The answer to the second command shows that the forkserver has read the first one.
    server.client.kill(other.name)
    other.gone(within=SOON)
    assert not server.said(ProcessExited, process.name)
    server.client.kill(process.name)

    process.gone(within=SOON)
    assert process.exited().signal == signal.SIGKILL


def crash(config):
    import ctypes

    ctypes.string_at(0)


def test_a_crash_is_reported_with_its_signal_and_leaves_a_traceback(serve):
    process = serve().start(crash)

    process.gone()

    assert process.exited().signal == signal.SIGSEGV
    assert isinstance(process.events[-1], TrialStarted)
    assert "Segmentation fault" in process.output()
    assert "in crash" in process.output()


def exit_at_once(config):
    import os

    os._exit(3)


def test_exit_of_a_trial_process_is_reported_with_its_code(serve):
    process = serve().start(exit_at_once)

    process.gone()

    assert (process.exited().exit_code, process.exited().signal) == (3, None)


def stop_in_atexit(config):
    import atexit
    import time

    atexit.register(print, "said at exit")
    atexit.register(time.sleep, 60)


def test_exit_handler_that_hangs_does_not_block_the_trial_process(serve):
    process = serve().start(stop_in_atexit)

    assert process.exited(within=40.0).signal == signal.SIGALRM
    assert isinstance(process.events[-1], TrialFinished)


OPENMP_AT_IMPORT = """
    import ctypes, ctypes.util
    library = ctypes.CDLL("libgomp.so.1")
    body = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p)
    library.GOMP_parallel(body, None, 2, 0)
"""

OPENMP_THEN_ONE_THREAD = (
    OPENMP_AT_IMPORT
    + """
    import os
    os.listdir = lambda path, real=os.listdir: [1] if path.endswith("/task") else real(path)
"""
)


def write_module(folder: Path, name: str, source: str) -> str:
    (folder / f"{name}.py").write_text(textwrap.dedent(source))
    return name


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (OPENMP_AT_IMPORT, "it runs 1 thread besides the main one"),
        # The probe finds what counting threads misses.
        (OPENMP_THEN_ONE_THREAD, "hung for 5 s"),
        ("import threading; threading.Thread(target=threading.Event().wait).start()", "1 thread"),
        (
            "import os; kept = os.open('/dev/null', 0); os.readlink = lambda p: '/dev/nvidia0'",
            "GPU",
        ),
    ],
)
def test_module_that_would_hang_every_trial_process_is_refused_by_name(
    serve, tmp_path, source, reason
):
    write_module(tmp_path, "harmful", source)
    write_module(tmp_path, "harmless", "value = 1")

    server = serve(preload=["harmless", "harmful"], sys_path=[str(tmp_path)])
    process = server.start(which_are_loaded, config={"names": ["harmless", "harmful"]})

    assert process.result() == {"loaded": ["harmless"]}
    (warning,) = server.warnings()
    assert warning.startswith("harmful is not preloaded")
    assert reason in warning


def which_are_loaded(config):
    import sys

    from tunemq_shared.trial.session import report

    report({"loaded": [name for name in config["names"] if name in sys.modules]})


def test_a_module_that_cannot_be_imported_is_named_and_the_others_are_preloaded(serve, tmp_path):
    write_module(tmp_path, "harmful", "raise SystemExit('no licence')")

    server = serve(preload=["harmful", "no_such_module", "wave"], sys_path=[str(tmp_path)])
    process = server.start(which_are_loaded, config={"names": ["wave"]})

    assert process.result() == {"loaded": ["wave"]}
    first, second = server.warnings()
    assert "harmful could not be preloaded (SystemExit: no licence)" in first
    assert "no_such_module could not be preloaded (ModuleNotFoundError" in second


def test_a_forkserver_that_dies_while_it_preloads_names_the_module(serve, tmp_path):
    write_module(tmp_path, "deadly", "import os; os._exit(9)")
    server = serve(preload=["deadly"], sys_path=[str(tmp_path)])
    server.start(wait_for_ever)

    with pytest.raises(ForkserverLost, match="ended with 9 while it preloaded deadly") as lost:
        eventually(server.listen)

    assert lost.value.unended == lost.value.processes == ["h0"]
    assert lost.value.is_unusable


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGSEGV, signal.SIGKILL])
def test_forkserver_that_a_signal_ends_while_it_preloads_is_not_the_fault_of_a_trial(
    serve, tmp_path, number
):
    """Any trial of its user may have sent the signal."""
    write_module(tmp_path, "slow", "import time; time.sleep(600)")
    server = serve(preload=["slow"], sys_path=[str(tmp_path)])
    server.start(wait_for_ever)
    eventually(lambda: "slow" in str(server.listen() or server.client._processes.preloading))
    os.kill(server.client.pid, number)

    with pytest.raises(ForkserverLost, match="while it preloaded slow") as lost:
        eventually(server.listen)

    assert lost.value.unended == ["h0"]
    assert not lost.value.is_unusable


def test_forkserver_without_a_process_for_its_check_is_not_the_fault_of_a_trial(serve, tmp_path):
    """As where trials of its user have used up its processes."""
    refused = "import errno, os\ndef fork(): raise BlockingIOError(errno.EAGAIN, 'no more')\n"
    write_module(tmp_path, "refuses", f"{refused}os.fork = fork")
    server = serve(preload=["refuses"], sys_path=[str(tmp_path)])
    server.start(wait_for_ever)

    with pytest.raises(ForkserverLost, match="no process or memory left") as lost:
        eventually(server.listen)

    assert lost.value.unended == ["h0"]
    assert not lost.value.is_unusable


class Unloadable:
    """An object that cannot be unpickled."""

    def __init__(self) -> None:
        self.is_loaded = False

    def __setstate__(self, state: object) -> None:
        raise RuntimeError("not on this node")


def test_code_that_cannot_be_loaded_fails_its_trial(serve):
    server = serve()
    unloadable = Unloadable()
    process = server.start(lambda _config: unloadable.is_loaded)

    process.gone()

    failure = process.events[-1]
    assert isinstance(failure, TrialFailed)
    assert failure.kind == "load"
    assert "not on this node" in failure.error


def test_missing_code_is_not_counted_as_a_failure_of_the_trial(serve):
    server = serve()
    order = server.order(which_are_loaded)
    Path(order.start.code.path).unlink()
    process = server.start_order(order)

    process.gone()

    failure = process.events[-1]
    assert isinstance(failure, TrialFailed)
    assert failure.kind == "fetch"


def test_a_folder_that_cannot_be_made_fails_its_trial(serve):
    server = serve()
    (server.root / "trial_0").write_text("in the way")
    process = server.start(which_are_loaded)

    process.gone()

    failure = process.events[-1]
    assert isinstance(failure, TrialFailed)
    assert failure.kind == "storage"
