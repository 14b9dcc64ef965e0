"""`ForkserverClient`: a node's handle on one forkserver: starts it, sends commands, reads reports.

Nothing here blocks: the node's loop watches `fileno` and calls `read`. While the forkserver
preloads, commands may not fit into the socket; they wait in order and are sent after the next
report.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tunemq_shared.base import failpoints
from tunemq_shared.protocol.messages import Environment, TrialOrder
from tunemq_shared.system.stopped_process import POLL_INTERVAL_S, StoppedProcessDetector
from tunemq_workers.forkservers import interpreters
from tunemq_workers.forkservers.report_validation import (
    InvalidReport,
    ReportedProcesses,
    close_all,
)
from tunemq_workers.forkservers.sigstop_guard import killing_stopped_starts
from tunemq_workers.processes import forkserver_messages as messages
from tunemq_workers.runtime.untrusted_sockets import socket_pair
from tunemq_workers.system.lowered_limits import lowered_limits
from tunemq_workers.system.trial_user import UserAccount, own_files
from tunemq_workers.trial_process import thread_limits
from tunemq_workers.trial_process.stack_dumps import have_stacks_written

#: How long trial processes may take to die with their forkserver; the kernel kills them.
_DEATH_S: Final = 1.0
#: Seconds in which a killed process ends, unless another one traces it.
_KILLED_S: Final = 1.0
#: The most reports that one `read` returns, so that a forkserver that writes without end does not
#: block the node.
_REPORTS_AT_ONCE: Final = 64
#: A forkserver that does not answer at this many looks in a row is killed. Looks are counted
#: instead of seconds: a node that was stopped for a while got no answers in that time.
_SILENT_LOOKS: Final = 12
#: A forkserver that is not ready after this time is killed. A trial's own limits shorten it, down
#: to the second value, which allows the import of a large library on a busy machine.
READY_WITHIN_S: Final = 300.0
_SHORTEST_S: Final = 30.0
#: The user is warned about a forkserver that preloads for longer.
_TOLD_AFTER_S: Final = 10.0


class ForkserverLost(Exception):
    """The forkserver ended, or was killed for an error; its trial processes are dead.

    Args:
        text: The cause, for the user.
        reports: The reports before the end, to be handled first.
        unended: The trial processes that ran until then, or were not forked yet.
        processes: Those that may have left processes, which their new parent has to kill.
        is_unusable: It was never ready, and another one would fail in the same way.
    """

    def __init__(
        self,
        text: str,
        reports: list[messages.ForkserverReport],
        *,
        unended: list[str],
        processes: list[str],
        is_unusable: bool,
    ) -> None:
        self.reports, self.unended, self.processes = reports, unended, processes
        self.is_unusable = is_unusable
        super().__init__(text)


class ForkserverClient:
    """One forkserver process, as seen by the node that started it.

    Make and use it in a thread that runs as long as the node: the kernel kills a forkserver when
    the thread that started it ends.

    Args:
        environment: The interpreter, modules and variables of its trial processes.
        log: The file to which its output is appended.
        hostname: This machine's name, which trials report.
        node_ip: This machine's address, which trials report.
        account: The user that it and its trial processes run as; by default the node's own user.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        log: str,
        hostname: str,
        node_ip: str,
        account: UserAccount | None = None,
    ) -> None:
        self.environment = environment
        self._hostname, self._node_ip = hostname, node_ip
        self._control, theirs = socket_pair(socket.SOCK_SEQPACKET)
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        self._log = log
        self._user = None if account is None else account.uid
        boot = messages.ForkserverOptions(
            os.getpid(),
            environment.preload,
            environment.sys_path,
            confined=account is not None,
        )
        with own_files():
            output = open(log, "ab", opener=_private)  # noqa: SIM115  closed below
        watched = nullcontext() if account is None else killing_stopped_starts()
        with theirs, output, watched:
            self._log_began_at = output.tell()
            try:
                self._process = subprocess.Popen(
                    [
                        *interpreters.command(environment.python),
                        str(theirs.fileno()),
                        messages.encode_boot(boot).decode(),
                    ],
                    env=_variables(environment.variables),
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    user=account and account.uid,
                    group=account and account.gid,
                    extra_groups=account and account.groups,
                )
            except OSError:
                self._control.close()
                raise
            except ValueError as error:  # a variable's name has "=", or there is a NUL
                self._control.close()
                raise OSError(errno.EINVAL, str(error)) from error
        if account is not None:
            _offer_to_the_oom_killer(self._process.pid)
        self._processes = ReportedProcesses(self._control, self._process.pid, self._user)
        self._stops, self._silent_looks = StoppedProcessDetector(), 0
        #: How long it has been starting and may be, in seconds that are counted by looks, too.
        self._starting_s, self._ready_within_s = 0.0, READY_WITHIN_S
        self._says_waits = False

    @property
    def pid(self) -> int:
        """The forkserver's pid."""
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """Whether it has preloaded everything."""
        return self._processes.is_ready

    def lowered_limits(self) -> list[str]:
        """Return the limits that trials of its user lowered; trials would inherit them."""
        return [] if self._user is None else lowered_limits(self.pid)

    def fileno(self) -> int:
        """Return the descriptor to watch for reading."""
        return self._control.fileno()

    def start(
        self, process: str, order: TrialOrder, gpus: Sequence[str] = (), gate: int | None = None
    ) -> socket.socket:
        """Fork a trial process for ``order``, which has its ``start``.

        ``process`` is a new name. ``gpus`` are the devices that the trial may see. ``gate`` is a
        descriptor that is closed here: the trial process waits until the other end is closed.
        Returns the node's end of the trial process's socket.

        Raises:
            OSError: this machine is out of descriptors or memory; no process was requested.
        """
        # Another trial of the same user may have changed the forkserver's.
        cpus = () if self._user is None else tuple(os.sched_getaffinity(0))
        spec = messages.TrialProcessSpec(order, self._hostname, self._node_ip, tuple(gpus), cpus)
        given = [] if gate is None else [gate]
        try:
            given.insert(0, _memory_file(messages.encode(spec)))
            ours, theirs = socket_pair()
        except OSError:
            close_all(given)
            raise
        self._processes.ask(process)
        limits = (order.start.limits.stall_s, order.start.limits.trial_s) if order.start else ()
        bound = max(_SHORTEST_S, min(filter(None, limits), default=READY_WITHIN_S))
        self._ready_within_s = min(self._ready_within_s, self._starting_s + bound)
        self._send(messages.StartProcess(process), [theirs.detach(), *given])
        return ours

    def term(self, process: str) -> None:
        """Send SIGTERM to the process group of a trial process; ignore one that is gone."""
        self._send(messages.TerminateProcess(process))

    def kill(self, process: str) -> None:
        """Kill a trial's process tree; ignore one that is gone. `ProcessTreeGone` follows.

        The trial process is killed directly, too, because a trial can stop its forkserver.
        """
        self._send(messages.KillProcessTree(process))
        self._processes.kill(process)

    def process_of(self, process: str) -> tuple[int, int] | None:
        """Return the pidfd and pid of a trial process; None if the kernel does not confirm them."""
        return self._processes.process_of(process)

    def dump(self, process: str) -> None:
        """Make a trial process write its threads' stacks to its log; ignore one that is gone."""
        if (pidfd_and_pid := self._processes.process_of(process)) is not None:
            have_stacks_written(*pidfd_and_pid, self._user)

    def look(self) -> str:
        """Kill a forkserver that is stopped or hangs; call it every `POLL_INTERVAL_S` seconds.

        Trial processes that are stopped are continued. While it preloads it answers nothing, and is
        killed when that takes too long.

        Returns:
            A warning for the user; empty if there is none.

        Raises:
            ForkserverLost: it was killed. This handle cannot be used any more.
        """
        is_unusable, warning = False, ""
        if not self.is_ready:
            self._starting_s += POLL_INTERVAL_S
        if self._stops.look(self.pid):
            problem = "it was stopped (SIGSTOP or a debugger); check that no trial does that"
        elif self._silent_looks >= _SILENT_LOOKS:
            problem = f"it did not answer for {_SILENT_LOOKS * POLL_INTERVAL_S:g} s"
        elif hidden := self._processes.hidden():
            problem = f"it did not report {hidden}; check that no preloaded module prevents that"
        elif not self.is_ready and self._starting_s > self._ready_within_s:
            is_unusable = True
            problem = f"it was not ready after {self._starting_s:g} s"
        else:
            if self.is_ready:
                self._silent_looks += 1
                self._send(messages.ForkserverPing())
            elif self._starting_s > _TOLD_AFTER_S and not self._says_waits:
                self._says_waits = True
                warning = self._why_it_waits()
            if self._processes.continue_stopped():
                warning = (
                    "trial processes were stopped (SIGSTOP), and were continued; check that no"
                    " trial does that."
                )
            return warning
        self._process.kill()
        raise self._lost([], f"was killed, because {problem}", is_unusable=is_unusable)

    def read(self) -> list[messages.ForkserverReport]:
        """Return the next reports of the forkserver; call it again while there may be more.

        Raises:
            ForkserverLost: it ended, or sent an invalid report. This handle cannot be used any
                more.
        """
        reports: list[messages.ForkserverReport] = []
        while len(reports) < _REPORTS_AT_ONCE:
            try:
                report = self._processes.receive()
            except BlockingIOError:
                break
            except ConnectionResetError:
                continue
            except InvalidReport as problem:
                self._process.kill()
                how = (
                    f"was killed, because {problem}; check that no preloaded module writes to "
                    "sockets"
                )
                raise self._lost(reports, how, is_unusable=True) from problem
            if report is None:
                raise self._lost(reports)
            reports.append(report)
        if reports:
            self._silent_looks = 0
            self._send_waiting()
        return reports

    def leave(self) -> None:
        """Close the connection; the forkserver then kills its trial processes and exits."""
        self._forget()

    def has_ended(self) -> bool:
        """Whether the forkserver has exited."""
        return self._process.poll() is not None

    def close(self, within_s: float = 6.0) -> None:
        """Kill all trial processes and end the forkserver; wait at most ``within_s`` seconds."""
        self.leave()
        self._end_within(within_s)

    def _send(self, command: messages.ForkserverCommand, fds: Iterable[int] = ()) -> None:
        if self._control.fileno() < 0:  # it is lost, and its trial processes with it
            close_all(fds)
            return
        self._waiting.append((messages.encode(command), list(fds)))
        if len(self._waiting) == 1:
            self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting:
            packet, fds = self._waiting[0]
            try:
                socket.send_fds(self._control, [packet], fds)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                return  # `read` will notice the end
            self._waiting.popleft()
            close_all(fds)

    def _lost(
        self, reports: list[messages.ForkserverReport], how: str = "", *, is_unusable: bool = False
    ) -> ForkserverLost:
        """Return the error to raise after the last trial process died; ``how`` is its cause."""
        processes = self._processes
        processes.kill_all(_DEATH_S)
        unended, names = processes.unended(), processes.names()
        code = self._end_within(_DEATH_S)
        end = f"ended with {code}"
        if how:
            end = how
        elif code == -signal.SIGKILL:
            end = "was killed by SIGKILL; often that means that memory ran out on this node"
        elif code == messages.EXIT_SHORTAGE:
            end = "ended because this node has no process or memory left"
        # Any trial of its user can send it a signal, or use up the processes that it needs.
        is_failure = code >= 0 and code != messages.EXIT_SHORTAGE
        is_unusable = not processes.is_ready and (is_unusable or is_failure)
        module = processes.preloading
        preloading = "" if module is None else f" while it preloaded {module}"
        text = f"the forkserver {self.pid} {end}{preloading}; see {self._log}."
        if not processes.has_reported and self.environment.python != sys.executable:
            text = interpreters.why_not(self.environment.python, self._log, self._log_began_at)
        self._forget()
        return ForkserverLost(
            text, reports, unended=unended, processes=names, is_unusable=is_unusable
        )

    def _end_within(self, seconds: float) -> int:
        """Return its exit code; kill it after a time.

        A trial may trace a forkserver that starts, as it runs as the same user: then the kernel
        gives the node no exit code before the tracer ends.
        """
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_KILLED_S)
        return -signal.SIGKILL

    def _why_it_waits(self) -> str:
        doing = f"the import of {module}" if (module := self._processes.preloading) else "the start"
        left = self._ready_within_s - self._starting_s
        return (
            f"trials wait for {doing} in the process that they are forked from (preload), which has"
            f" taken more than {_TOLD_AFTER_S:g} s; it is killed {left:.0f} s from now."
        )

    def _forget(self) -> None:
        self._processes.forget()
        close_all(fd for _, fds in self._waiting for fd in fds)
        self._waiting.clear()
        self._control.close()


def _private(path: str, flags: int) -> int:
    """Open a log that only the node's user can read."""
    return os.open(path, flags, 0o600)


def _offer_to_the_oom_killer(pid: int) -> None:
    """Let the kernel prefer a process of the trials' user, and its children, to the node.

    With CAP_SYS_RESOURCE this is also the least that they can set themselves.
    """
    with suppress(OSError), own_files(), open(f"/proc/{pid}/oom_score_adj", "wb") as file:
        file.write(b"500")


def _variables(given: Mapping[str, str]) -> dict[str, str]:
    """Return the forkserver's own environment; its trial processes get ``given``."""
    variables = {
        n: v for n, v in given.items() if not n.startswith("TUNEMQ_")
    } | thread_limits.SINGLE
    if failpoints.VARIABLE in os.environ:  # a test wants trial processes to fail
        variables[failpoints.VARIABLE] = os.environ[failpoints.VARIABLE]
    path = [*_our_roots(), *filter(None, [given.get("PYTHONPATH")])]
    if path:
        variables["PYTHONPATH"] = os.pathsep.join(path)
    return variables


def _our_roots() -> list[str]:
    """Return the folders from which an interpreter without TuneMQ can import it."""
    # Scripts that define a Tuner also import the scheduler's package.
    names = ("tunemq", "tunemq_shared", "tunemq_workers", "tunemq_scheduler")
    specs = [find_spec(name) for name in names]
    files = [spec.origin for spec in specs if spec is not None and spec.origin is not None]
    roots = dict.fromkeys(str(Path(file).parent.parent) for file in files)
    # A site-packages folder would add all other packages, made for another interpreter.
    return [root for root in roots if Path(root).name not in {"site-packages", "dist-packages"}]


def _memory_file(content: bytes) -> int:
    """Return a descriptor from which ``content`` can be read."""
    file = os.memfd_create("tunemq-trial")
    with open(file, "wb", buffering=0, closefd=False) as writer:
        rest = memoryview(content)
        while rest:
            rest = rest[writer.write(rest) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file
