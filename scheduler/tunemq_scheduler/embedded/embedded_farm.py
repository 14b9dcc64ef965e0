"""`EmbeddedFarm`: a script's handle of its private Redis and node."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from tunemq_scheduler.embedded import runtime_folder_lock
from tunemq_scheduler.embedded.bound_processes import remove_tree
from tunemq_scheduler.embedded.command_lines import (
    default_cpus,
    environment,
    node_command,
    watchdog_command,
)
from tunemq_scheduler.embedded.redis_command import find_redis_server, redis_command
from tunemq_scheduler.embedded.runtime_folder import make_runtime_folder
from tunemq_scheduler.embedded.watchdog import WATCHDOG_PID
from tunemq_shared.base.errors import RedisUnavailable
from tunemq_shared.protocol.messages import Environment

#: Makes the node's command line from the URL of Redis, a folder, the watchdog's pid, the number of
#: CPUs and the file with the environment to prepare.
NodeCommand = Callable[[str, str, str, int, str | None], list[str]]

#: Redis answers within milliseconds, except on an overloaded machine.
_READY_WITHIN_S: Final = 20.0
#: The watchdog needs a few milliseconds to end everything, and gives up after two seconds of
#: running time. If it hangs it is killed, and cannot end the orphans.
_STOP_WITHIN_S: Final = 10.0
_LOG_TAIL_BYTES: Final = 2000
#: Variables for a store's clients (address, keys and certificates), and for failpoints.
_ABOUT_STORE: Final = (
    "AWS_",
    "MINIO_",
    "SSL_CERT_",
    "TUNEMQ_S3_",
    "TUNEMQ_FAILPOINTS",
)
_terms = itertools.count(1)


class EmbeddedFarm:
    """A private Redis and node of this script, watched by a watchdog process.

    The constructor returns once the watchdog is started, so that a script can import modules
    meanwhile; `wait_until_ready` waits for Redis. The node registers when it is ready.

    **Threads.** Any thread may create and stop it; the watchdog handles PDEATHSIG.

    **Fork.** A forked child of the script must call `forget` and not use the farm
    (`tunemq_scheduler.embedded.warm_farms` ensures that).

    Args:
        cpus: the CPUs that the node offers; by default ``$TUNEMQ_CPUS``, or those that this process
            may use.
        prewarm: the environment of the first trials, which the node prepares at once. It contains
            all environment variables, so it is passed in the private folder, not on a command line.
        gpus: whether the node offers the GPUs that this script may use.
        make_node_command: makes the node's command line.

    Raises:
        ConfigError: there is no redis-server or no place for the runtime folder, or
            ``$TUNEMQ_CPUS`` is invalid.
    """

    def __init__(
        self,
        cpus: int | None = None,
        *,
        prewarm: Environment | None = None,
        gpus: bool = False,
        make_node_command: NodeCommand | None = None,
    ) -> None:
        self.cpus = cpus if cpus is not None else default_cpus()
        binary, environ = find_redis_server(), environment()
        #: The environment variables about stores that its node has.
        self.about_store = about_store()
        #: Its node's ``CUDA_VISIBLE_DEVICES``; empty if it offers no GPUs.
        self.visible_gpus = visible_gpus() if gpus else ""
        make_node_command = make_node_command or partial(node_command, gpus=gpus)
        self._status_lines = b""
        self._notices: list[str] = []
        self._gave_up: str | None = None
        self._is_ending = False
        #: The pids of the services, as reported by the watchdog.
        self.pids: dict[str, int] = {}
        self.folder = make_runtime_folder()
        with contextlib.ExitStack() as undo:  # a failure or an interrupt leaves nothing behind
            undo.callback(remove_tree, self.folder)
            self._socket_path = os.path.join(self.folder, runtime_folder_lock.SOCKET)
            #: The address of its Redis, in the form of redis-py.
            self.url = f"unix://{self._socket_path}"
            workdir = os.path.join(self.folder, runtime_folder_lock.NODE)
            wanted = (
                None if prewarm is None else os.path.join(self.folder, runtime_folder_lock.PREWARM)
            )
            services: dict[str, Sequence[str]] = {
                runtime_folder_lock.REDIS: redis_command(binary, self._socket_path),
                runtime_folder_lock.NODE: make_node_command(
                    self.url, workdir, WATCHDOG_PID, self.cpus, wanted
                ),
            }
            os.mkdir(workdir, 0o700)
            if wanted is not None:
                _write_private(wanted, msgspec.json.encode(prewarm))
            self._control, theirs = socket.socketpair()
            undo.callback(self._control.close)
            self._control.setblocking(False)
            with theirs:
                self._start_watchdog(undo, theirs, services, environ)
            undo.pop_all()

    def _start_watchdog(
        self,
        undo: contextlib.ExitStack,
        theirs: socket.socket,
        services: dict[str, Sequence[str]],
        environ: dict[str, str],
    ) -> None:
        me = os.pidfd_open(os.getpid())
        log = os.open(
            os.path.join(self.folder, runtime_folder_lock.WATCHDOG_LOG),
            os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC,
            0o600,
        )
        try:
            self._watchdog = subprocess.Popen(
                watchdog_command(self.folder, theirs.fileno(), me, services),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(), me),
                env=environ,
                start_new_session=True,
            )
            undo.callback(self.stop)
        finally:
            os.close(me)
            os.close(log)

    @property
    def watchdog_pid(self) -> int:
        """The pid of the watchdog."""
        return self._watchdog.pid

    def new_term(self) -> int:
        """Return a term greater than all earlier ones of this farm: one for each experiment."""
        return next(_terms)

    def wait_until_ready(self, within: float = _READY_WITHIN_S) -> None:
        """Wait until Redis answers.

        Args:
            within: the most seconds to wait.

        Raises:
            RedisUnavailable: it does not answer in time, or cannot be started; says why.
        """
        deadline = time.monotonic() + within
        while not self._redis_answers():
            trouble = self.trouble()
            if trouble is None and time.monotonic() > deadline:
                log = self._tail(runtime_folder_lock.REDIS)
                trouble = f"its Redis did not answer within {within:g} s{log}"
            if trouble is not None:
                raise RedisUnavailable(f"The embedded farm cannot be used: {trouble}.")
            # Redis creates its socket when it is ready; a message from the watchdog ends the pause
            # early.
            select.select([self._control], [], [], 0.002)

    def _redis_answers(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(self._socket_path)
                probe.sendall(b"PING\r\n")
                return probe.recv(16).startswith(b"+PONG")
            except OSError:
                return False

    def trouble(self) -> str | None:
        """Return why this farm has failed for good, or None; cheap, may be called at any time."""
        self._read_status()
        if self._gave_up is not None:
            return self._gave_up
        if self._watchdog.poll() is not None:
            return (
                f"its watchdog process ended ({self._watchdog.returncode}){self._tail('watchdog')}"
            )
        if not os.path.isdir(self.folder):  # with the code of the trials that begin next
            return (
                f"its folder {self.folder} was removed, as by a logout or a clean-up of temporary"
                " files; set XDG_RUNTIME_DIR or TMPDIR to a folder that stays, and restore the"
                " search"
            )
        return None

    @property
    def is_usable(self) -> bool:
        """Whether another search can use it."""
        return not self._is_ending and self.trouble() is None

    def excuse_node(self) -> None:
        """Tell the watchdog not to count the node's newest death as the node's fault.

        Otherwise a few trials that crash their node would end the farm before each is identified.
        """
        try:
            self._control.send(runtime_folder_lock.excuse(runtime_folder_lock.NODE).encode())
        except OSError:  # the watchdog is gone, which `trouble` reports
            return

    def notices(self) -> list[str]:
        """Return the new notices for the user."""
        self._read_status()
        notices, self._notices = self._notices, []
        return notices

    def _read_status(self) -> None:
        try:
            while heard := self._control.recv(4096):
                self._status_lines += heard
        except OSError:  # nothing more to read, or the watchdog is gone
            pass
        *lines, self._status_lines = self._status_lines.split(b"\n")
        for line in lines:
            kind, service, detail = line.decode().split(" ", 2)
            if kind == "started":
                self.pids[service] = int(detail)
            elif kind == "died":
                self._notices.append(
                    f"The embedded {service} ended ({detail}) and is started again."
                )
            else:
                self._gave_up = (
                    f"its {service} ends as soon as it is started ({detail}){self._tail(service)}"
                )

    def _tail(self, service: str) -> str:
        try:
            with open(os.path.join(self.folder, runtime_folder_lock.log_of(service)), "rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - _LOG_TAIL_BYTES))
                said = log.read().decode(errors="replace").strip()
        except OSError:
            return ""
        return f"; it said: {said}" if said else ""

    def end_now(self) -> None:
        """Kill everything without waiting; safe in signal handlers."""
        self._is_ending = True
        try:
            self._control.send(b"stop\n")
        except OSError:  # the watchdog is gone, and all else with it
            return

    def stop(self) -> None:
        """End everything and wait until nothing is left (milliseconds); may be called twice."""
        self.end_now()
        try:
            self._watchdog.wait(_STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            # PDEATHSIG ends Redis and the node, and with the node its process trees.
            self._watchdog.send_signal(signal.SIGKILL)
            self._watchdog.wait()
        self._control.close()
        remove_tree(self.folder)

    def forget(self) -> None:
        """Release a farm that belongs to the parent process."""
        self._control.close()
        self._watchdog.returncode = 0  # otherwise Popen warns when it is collected


def about_store() -> dict[str, str]:
    """Return the script's environment variables about stores and their keys."""
    return {name: value for name, value in os.environ.items() if name.startswith(_ABOUT_STORE)}


def visible_gpus() -> str | None:
    """Return the script's ``CUDA_VISIBLE_DEVICES``; None: it may use all GPUs."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def _write_private(path: str, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
