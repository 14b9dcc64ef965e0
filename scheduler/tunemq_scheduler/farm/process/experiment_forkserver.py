"""The forkserver of experiments, which makes a start cost a fork and no imports.

    python -P -m tunemq_scheduler.farm.process.experiment_forkserver FD SUPERVISOR VERSION STORE

FD is the socket of `tunemq_scheduler.farm.ipc.fork_messages`, SUPERVISOR a pid, VERSION the
supervisor's version of TuneMQ, and STORE the farm's store, whose client is loaded, too. It has one
thread and no key of the farm, and never runs an experiment's code. The kernel kills it when the
supervisor ends, and with it all processes that it has forked.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from types import ModuleType
from typing import Final, NamedTuple

from tunemq_scheduler.farm.common.scheduler_exit_codes import EXIT_MUST_WAIT
from tunemq_scheduler.farm.ipc.fork_messages import (
    MAX_PACKET_BYTES,
    REAP,
    ExperimentExited,
    ExperimentForked,
    ExperimentForkFailed,
    ForkAnswer,
    encode,
)
from tunemq_scheduler.farm.process import experiment_process_main
from tunemq_shared.checkpoints.open_store import import_client
from tunemq_shared.system.process_attributes import (
    die_with_parent,
    keep_memory_private,
    leave_no_core_file,
    set_name,
)

#: Modules that most experiments import only when they run. No internal module may depend on the
#: first.
_PRELOADED: Final = ("tunemq", "tunemq_scheduler.output.syncing.default_syncer")


#: How many descriptors come with `START`.
_DESCRIPTORS: Final = 4
_LOOK_AGAIN_MS: Final = 500
#: Seconds in which a dead child can be reaped, unless another process traces it.
_REAPED_S: Final = 1.0
#: A child writes this into its pipe when it has left the forkserver.
_LEFT: Final = b"."
#: A service manager may send these to all processes of the service. This process ignores them,
#: because it ends with the supervisor.
_IGNORED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class _Experiment(NamedTuple):
    channel: socket.socket
    pid: int


class ExperimentForkserver:
    """Forks experiments for one supervisor.

    Args:
        control: the socket to the supervisor.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._experiments: dict[int, _Experiment] = {}
        #: Children that have not left this process yet, by the pipe on which they report it.
        self._leaving: dict[int, _Experiment] = {}
        #: Killed children that have not ended yet.
        self._killed: set[int] = set()
        self._poller = select.poll()
        self._poller.register(control, select.POLLIN)

    def serve(self) -> socket.socket | None:
        """Work until the supervisor is gone; in a child, return its end of the connection."""
        while True:
            for fd, _ in self._poller.poll(_LOOK_AGAIN_MS if self._killed else None):
                if fd != self._control.fileno():
                    self._attend(fd)
                    continue
                wanted, fds, _, _ = socket.recv_fds(
                    self._control, MAX_PACKET_BYTES, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
                if not wanted:
                    return None
                if len(fds) != _DESCRIPTORS:  # the kernel could not pass all of them
                    _reject(fds)
                elif (line := self._fork(*fds)) is not None:
                    return line
            self._bury()

    def _fork(self, channel_fd: int, line: int, output: int, errors: int) -> socket.socket | None:
        """Fork; in the child, return its end of the connection."""
        try:
            leaving, left = os.pipe()
        except OSError:
            _reject([channel_fd, line, output, errors])
            return None
        channel, forkserver = socket.socket(fileno=channel_fd), os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            _say(channel, ExperimentForkFailed(f"fork: {error.strerror}"))
            pid = -1
        if pid == 0:
            for own in (
                self._control,
                channel,
                *(one.channel for one in self._experiments.values()),
            ):
                own.close()
            for pipe in (leaving, *self._leaving):
                os.close(pipe)
            os.dup2(output, 1)
            os.dup2(errors, 2)
        os.close(output)
        os.close(errors)
        if pid == 0:
            _leave_the_forkserver(forkserver)
            with suppress(BrokenPipeError):  # the forkserver was killed, and so is this process
                os.write(left, _LEFT)
            os.close(left)
            return socket.socket(fileno=line)
        os.close(line)
        os.close(left)
        if pid < 0:
            os.close(leaving)
            channel.close()
            return None
        self._experiments[channel_fd] = self._leaving[leaving] = _Experiment(channel, pid)
        self._poller.register(channel, select.POLLIN)
        self._poller.register(leaving, select.POLLIN)
        return None

    def _attend(self, fd: int) -> None:
        """Handle an event on an experiment's pipe or channel."""
        if (experiment := self._leaving.pop(fd, None)) is not None:
            self._poller.unregister(fd)
            has_left = os.read(fd, len(_LEFT)) == _LEFT
            os.close(fd)
            self._forked(experiment, has_left=has_left)
        elif (experiment := self._experiments.get(fd)) is not None:
            self._obey(experiment)

    def _forked(self, experiment: _Experiment, *, has_left: bool) -> None:
        """Report a child to the supervisor, once it has left this process or died before that.

        Until it has left, the child is as private as this process: a /proc with hidden processes
        does not show it, so the supervisor could not verify whose child it is.
        """
        if experiment not in self._experiments.values():
            return  # its channel was closed meanwhile
        if has_left:
            _say(experiment.channel, ExperimentForked(experiment.pid))
        else:
            _say(experiment.channel, ExperimentForkFailed("it died at once"))
            self._kill(experiment)

    def _obey(self, experiment: _Experiment) -> None:
        """Reap an experiment that has ended, or kill one whose channel was closed."""
        channel, pid = experiment
        try:
            is_over = channel.recv(MAX_PACKET_BYTES) == REAP
        except ConnectionResetError:  # closed before the fork report was read
            is_over = False
        if is_over:
            deadline = time.monotonic() + _REAPED_S
            while not (reaped := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
                time.sleep(0.01)
            if not reaped[0]:  # a process traces it, and gets its exit code first
                self._killed.add(pid)
            status = reaped[1] if reaped[0] else signal.SIGKILL
            _say(channel, ExperimentExited(os.waitstatus_to_exitcode(status)))
            self._let_go(channel)
        else:
            self._kill(experiment)

    def _kill(self, experiment: _Experiment) -> None:
        """Kill a child, and let `_bury` wait for its end."""
        os.kill(experiment.pid, signal.SIGKILL)
        self._killed.add(experiment.pid)
        self._let_go(experiment.channel)

    def _let_go(self, channel: socket.socket) -> None:
        self._poller.unregister(channel)
        del self._experiments[channel.fileno()]
        channel.close()

    def _bury(self) -> None:
        """Reap killed children without waiting, because a child may be blocked by a disk."""
        self._killed -= {pid for pid in self._killed if os.waitpid(pid, os.WNOHANG)[0]}


def _reject(descriptors: list[int]) -> None:
    """Close the descriptors; closing the first, the channel, reports that there is no process."""
    if descriptors:
        with socket.socket(fileno=descriptors[0]) as channel:
            _say(
                channel,
                ExperimentForkFailed("no file descriptors are left to what it is forked from"),
            )
    for one in descriptors[1:]:
        os.close(one)


def _say(channel: socket.socket, answer: ForkAnswer) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # `_obey` handles it
        channel.send(encode(answer))


def _leave_the_forkserver(forkserver: int) -> None:
    """Make a fork of the forkserver, which has this pid, an independent process."""
    os.setsid()
    die_with_parent(forkserver)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    keep_memory_private(False)  # as accessible as the user's other processes
    leave_no_core_file()
    # multiprocessing would import the forkserver again as the main module of its children.
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main


def main() -> int:
    """Serve; in a child, run an experiment. Return the exit code."""
    fd, supervisor, version, store = sys.argv[1:]
    control = socket.socket(fileno=int(fd))
    control.set_inheritable(False)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(int(supervisor))
    keep_memory_private()
    set_name("tunemq-fork")
    for module in _PRELOADED:
        importlib.import_module(module)
    if (ours := sys.modules["tunemq"].__version__) != version:
        sys.stderr.write(f"it has TuneMQ {ours}, and the scheduler {version}")
        sys.exit(EXIT_MUST_WAIT)
    import_client(store)
    # Experiments share the memory pages of loaded modules until a garbage collection writes to
    # them.
    gc.collect()
    gc.freeze()
    line = ExperimentForkserver(control).serve()
    return 0 if line is None else experiment_process_main.run(line)


if __name__ == "__main__":
    sys.exit(main())
