"""The forkserver program: it imports what trials need and forks trial processes.

    python -P -m tunemq_workers.forkservers.forkserver FD BOOT

FD is a SEQPACKET socket to the node, BOOT the JSON of a `ForkserverOptions`. The forkserver
preloads the modules that the experiment names. Then it forks trial processes on command, reports
their exits, and kills the processes that they leave behind. It has one thread, imports no client of
any service, and runs no trial code, so it survives whatever a trial process does. When the node
closes its end of the socket, the forkserver kills all process trees and exits.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import Final

import msgspec

from tunemq_shared.system import process_attributes
from tunemq_shared.system.processes import children_of
from tunemq_workers.logs import output_files
from tunemq_workers.processes import forkserver_messages as messages
from tunemq_workers.processes.process_tree import ProcessTrees
from tunemq_workers.trial_process import trial_process_main
from tunemq_workers.trial_process.preload import PreloadFailed, preload
from tunemq_workers.trial_process.thread_limits import LoadedLibraries
from tunemq_workers.trial_process.trial_process_setup import TrialEnvironment, changed_variables

#: How long the last process trees may take to exit after the node's end; the rest dies with this
#: process.
_FAREWELL_S: Final = 5.0
#: Between two looks at what was killed.
_LOOK_MS: Final = 100


class Forkserver:
    """Serves one node over ``control`` until that is closed.

    Args:
        control: The socket to the node.
        node: The node's pid.
        process_trees: Tracks trial processes and what they start.
        trial_environment: Sets up the environment of each trial.
    """

    def __init__(
        self,
        control: socket.socket,
        node: int,
        process_trees: ProcessTrees,
        trial_environment: TrialEnvironment,
    ) -> None:
        self._control = control
        self._node = node
        self._process_trees = process_trees
        self._trial_environment = trial_environment
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._deadline: float | None = None
        self._is_alone = False

    def serve(self) -> trial_process_main.ForkContext | None:
        """Serve until the node is gone and return None; in a forked child, return its context."""
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _only_wake)
        # Only the node handles a signal to all processes: it may let its trials save first.
        signal.signal(signal.SIGTERM, _only_wake)
        # From now on the node's death sends SIGCONT, which has a handler, instead of SIGKILL: only
        # this process can kill its process trees. No other signal with a handler reaches a stopped
        # process.
        signal.signal(signal.SIGCONT, self._continue)
        process_attributes.die_with_parent(self._node, signal.SIGCONT)
        poller = select.poll()
        poller.register(self._woken, select.POLLIN)
        poller.register(self._control, select.POLLIN)
        while not self._is_over():
            is_waiting = self._deadline is not None or self._process_trees.is_waiting
            for fd, _ in poller.poll(_LOOK_MS if is_waiting else None):
                if fd == self._woken.fileno():
                    self._woken.recv(4096)
                elif self._deadline is not None:
                    poller.unregister(self._control)
                elif (task := self._obey_next()) is not None:
                    return task
            if self._is_alone:
                self._end()
            _tell(self._control, *self._process_trees.reap())
        return None

    def _is_over(self) -> bool:
        return self._deadline is not None and (
            not self._process_trees or time.monotonic() > self._deadline
        )

    def _continue(self, _signal: int, _frame: FrameType | None) -> None:
        self._is_alone |= os.getppid() != self._node

    def _end(self) -> None:
        """Kill all process trees; `serve` returns when they are gone."""
        if self._deadline is None:
            self._deadline = time.monotonic() + _FAREWELL_S
            self._process_trees.kill_all()

    def _obey_next(self) -> trial_process_main.ForkContext | None:
        """Read and execute one command; in a forked child, return its context."""
        try:
            data, fds, _, _ = socket.recv_fds(
                self._control, messages.MAX_PACKET_BYTES, 3, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            data, fds = b"", []
        if not data:
            self._end()
            return None
        command = messages.decode_command(data)
        if isinstance(command, messages.StartProcess):
            return self._fork(command.process, *fds)
        if isinstance(command, messages.TerminateProcess):
            self._process_trees.term(command.process)
        elif isinstance(command, messages.KillProcessTree):
            self._process_trees.kill(command.process)
        elif isinstance(command, messages.ForkserverPing):
            _tell(self._control, messages.ForkserverPong())
        return None

    def _fork(
        self, name: str, line: int, spec: int, gate: int | None = None
    ) -> trial_process_main.ForkContext | None:
        """Fork a trial process; return its context in the child."""
        me = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            text = f"{name} could not be started: fork: {error.strerror}."
            _tell(
                self._control,
                messages.ForkserverWarned(text),
                messages.ProcessExited(name, None, None, None),
                messages.ProcessTreeGone(name),
            )
            pid = -1
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for end in (self._control, self._woken, self._waker):
                end.close()
            return trial_process_main.ForkContext(
                name, me, line, spec, gate, self._trial_environment
            )
        for descriptor in (line, spec, gate):
            if descriptor is not None:
                os.close(descriptor)
        if pid > 0:
            # The child does the same; the second call changes nothing.
            with suppress(OSError):
                os.setpgid(pid, pid)
            self._process_trees.add(name, pid)
            _tell(self._control, messages.ProcessForked(name, pid))
        return None


def _only_wake(_signal: int, _frame: FrameType | None) -> None:
    """Do nothing: the signal's byte in the wakeup socket is enough."""


def _tell(control: socket.socket, *reports: messages.ForkserverReport) -> None:
    for report in reports:
        if isinstance(report, messages.ForkserverWarned):  # its text may be long or invalid UTF-8
            text = report.text.encode(errors="replace").decode()
            report = messages.ForkserverWarned(text[: messages.MAX_TEXT])  # noqa: PLW2901
        with suppress(BrokenPipeError, ConnectionResetError):  # `serve` reads the socket's end
            control.send(messages.encode(report))


def _preloaded(boot: messages.ForkserverOptions, control: socket.socket) -> tuple[str, ...]:
    """Preload; if children cannot run with a module, restart this program without it."""
    environment = dict(os.environ)
    try:
        return preload(
            [module for module in boot.preload if module not in boot.without],
            announce=lambda module: _tell(control, messages.PreloadBegan(module)),
            warn=lambda text: _tell(control, messages.ForkserverWarned(text)),
        )
    except PreloadFailed as rejected:
        _tell(
            control,
            messages.ForkserverWarned(
                f"{rejected.module} is not preloaded: {rejected.reason}. Each trial imports it "
                "itself, which takes longer."
            ),
        )
        again = msgspec.structs.replace(boot, without=(*boot.without, rejected.module))
        os.set_inheritable(control.fileno(), True)
        os.execve(  # noqa: S606 - runs this program with our arguments
            sys.executable,
            [
                sys.executable,
                *messages.COMMAND,
                str(control.fileno()),
                messages.encode_boot(again).decode(),
            ],
            environment,
        )


def main() -> None:
    """Serve the node; in a forked child, run trials."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    boot = messages.decode_boot(sys.argv[2])
    # Until there are trial processes to kill, the node's death kills this process, even if it
    # hangs.
    process_attributes.die_with_parent(boot.node)
    process_attributes.become_subreaper()
    if boot.confined:
        process_attributes.keep_memory_private()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Trial processes inherit this until they install their own handler.
    signal.signal(messages.DUMP_SIGNAL, signal.SIG_IGN)
    process_attributes.set_name("tunemq-fork")
    # User code imports it. It is imported by name because our modules do not depend on it.
    importlib.import_module("tunemq")
    # The user's entries come first, as in the script, then this interpreter's and TuneMQ's.
    sys.path[:] = [*boot.sys_path, *(entry for entry in sys.path if entry not in boot.sys_path)]
    before = dict(os.environ)
    try:
        preloaded = _preloaded(boot, control)
    except OSError as error:
        if error.errno not in messages.SHORTAGES:
            raise
        sys.stderr.write(f"this machine has no room for another process: {error}\n")
        sys.exit(messages.EXIT_SHORTAGE)
    output_files.flush()
    trial_environment = TrialEnvironment(
        sys_path=list(sys.path),
        variables=changed_variables(before),
        libraries=LoadedLibraries(),
    )
    process_trees = ProcessTrees(own=children_of(os.getpid()))
    server = Forkserver(control, boot.node, process_trees, trial_environment)
    # Forked processes share memory pages until a garbage collection writes to them.
    gc.collect()
    gc.freeze()
    _tell(control, messages.ForkserverReady(preloaded))
    task = server.serve()
    if task is None:
        os._exit(0)
    trial_process_main.run(task)


if __name__ == "__main__":
    main()
