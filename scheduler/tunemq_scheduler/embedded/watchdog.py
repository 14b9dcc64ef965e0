"""The watchdog: a process between a script and its farm, which ends within a second of the script.

The script starts it. It starts Redis and the node, restarts them when they die, and ends everything
when the script ends, in whatever way. It exists for three reasons: the kernel's PDEATHSIG follows
the *thread* that started a process (``fit()`` may run in a thread that ends long before the
script); only a descriptor of the script's process shows reliably that it is gone (its children may
hold its pipes); and one process must remain to delete the folder.

It imports little of TuneMQ and nothing outside the standard library, and starts with ``python -I
-S``, so that no module of the user can interfere.

Both ends send lines. To the watchdog: ``stop``, and ``excuse <service>`` for a death that was not
the service's fault. To the script: ``started <service> <pid>``, ``died <service> <how>``, ``gave_up
<service> <why>``.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

from tunemq_scheduler.embedded import bound_processes, runtime_folder_lock
from tunemq_shared.system.process_attributes import become_subreaper, set_name

#: Seconds to wait before restarting a service that died young; after the last the watchdog gives
#: up.
_PAUSES_S = (0.0, 0.1, 0.3, 1.0, 1.0)
#: Seconds of life after which a death is not young.
_YOUNG_S = 10.0
#: The most young deaths in a row that are excused: a dozen poison trials with their retries, but
#: not a machine on which nothing can run.
_MOST_EXCUSED = 40
#: Seconds to wait for a process that cannot be reaped, as in an uninterruptible sleep.
_TIMEOUT_S = 0.8
#: The placeholder for the watchdog's pid in a command line.
WATCHDOG_PID = "{watchdog}"


class WatchedService:
    """Redis, or the node: a command that must run."""

    def __init__(self, name: str, argv: list[str]) -> None:
        self.name = name
        self.argv = argv
        self.pid: int | None = None
        self.started_at = 0.0
        self.young_deaths = 0
        self._excused = 0
        #: When to start it; None while it runs, and forever once it was given up.
        self.due: float | None = 0.0

    def died(self, now: float) -> bool:
        """Record its death; return whether to restart it."""
        self.pid = None
        if now - self.started_at >= _YOUNG_S:
            self.young_deaths = self._excused = 0
        self.young_deaths += 1
        if self.young_deaths > len(_PAUSES_S):
            self.due = None
            return False
        self.due = now + _PAUSES_S[self.young_deaths - 1]
        return True

    def excuse(self, times: int) -> None:
        """Excuse a number of its deaths, up to a limit."""
        times = min(times, self.young_deaths, _MOST_EXCUSED - self._excused)
        self.young_deaths -= times
        self._excused += times


class Watchdog:
    """Watches one script and its services.

    Args:
        folder: the runtime folder; deleted at the end.
        control: the watchdog's end of a socket pair with the script.
        script: a pidfd of the script.
        services: in the order in which they start; they end in reverse.
    """

    def __init__(
        self, folder: str, control: int, script: int, services: list[WatchedService]
    ) -> None:
        self._folder = folder
        self._control = control
        self._script = script
        self._services = services
        self._ending = False
        self._alarm, self._bell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        """Run the farm until the script ends or sends ``stop``."""
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self._bell, warn_on_full_buffer=False)
        try:
            # Held until this process ends, after the folder is deleted.
            runtime_folder_lock.take_lock(self._folder)
            self._start_due()
            runtime_folder_lock.remove_abandoned(self._folder)
            poll = select.poll()
            for descriptor in (self._alarm, self._control, self._script):
                poll.register(descriptor, select.POLLIN)
            while not self._ending:
                ready = [descriptor for descriptor, _ in poll.poll(self._pause_ms())]
                self._look(ready)
        finally:
            self._end()

    def _on_signal(self, number: int, _frame: object) -> None:
        if number == signal.SIGTERM:
            self._ending = True

    def _pause_ms(self) -> float | None:
        due = [service.due for service in self._services if service.due is not None]
        return max(0.0, min(due) - time.monotonic()) * 1000 if due else None

    def _look(self, ready: list[int]) -> None:
        if self._script in ready:
            self._ending = True
        if self._control in ready and self._is_told_to_end():
            self._ending = True
        if self._ending:
            return
        if self._alarm in ready:
            os.read(self._alarm, 512)
            for pid, status in bound_processes.reap():
                self._noted(pid, status)
        self._start_due()

    def _is_told_to_end(self) -> bool:
        """Process the script's messages; return whether to end."""
        try:
            said = os.read(self._control, 4096)
        except OSError:
            return True
        for service in self._services:
            service.excuse(said.count(runtime_folder_lock.excuse(service.name).encode()))
        # End of file: the script has called exec, and cannot send messages any more.
        return not said or b"stop" in said

    def _noted(self, pid: int, status: int) -> None:
        for service in self._services:
            if service.pid != pid:
                continue
            how = bound_processes.how_it_ended(status)
            self._say(f"died {service.name} {how}")
            if not service.died(time.monotonic()):
                self._say(f"gave_up {service.name} {how}, {len(_PAUSES_S) + 1} times in a row")
            if service.name == runtime_folder_lock.NODE:
                # Its orphans are re-parented to this process; a new node must not meet its
                # predecessor's trial processes.
                bound_processes.kill_children(self._running(), _TIMEOUT_S, self._noted)
            return

    def _running(self) -> list[int]:
        return [service.pid for service in self._services if service.pid is not None]

    def _start_due(self) -> None:
        now = time.monotonic()
        for service in self._services:
            if service.due is not None and service.due <= now:
                argv = [str(os.getpid()) if part == WATCHDOG_PID else part for part in service.argv]
                log = os.path.join(self._folder, runtime_folder_lock.log_of(service.name))
                service.pid = bound_processes.start(argv, os.environ, log)
                service.due, service.started_at = None, now
                self._say(f"started {service.name} {service.pid}")

    def _say(self, status_line: str) -> None:
        try:
            os.write(self._control, status_line.encode() + b"\n")
        except OSError:  # no reader: the script is busy, or gone, which the pidfd shows
            return

    def _end(self) -> None:
        # Redis last: processes that are being killed must not begin to wait for it.
        for service in reversed(self._services):
            service.due = None
            others = [pid for pid in self._running() if pid != service.pid]
            bound_processes.kill_children(others, _TIMEOUT_S)
            service.pid = None
        bound_processes.remove_tree(self._folder)


def main() -> None:
    """Parse ``watchdog FOLDER CONTROL SCRIPT NAME:N ARG*N NAME:N ARG*N ...``, and run."""
    folder, control, script, *rest = sys.argv[1:]
    for descriptor in (int(control), int(script)):
        os.set_inheritable(descriptor, False)
    os.set_blocking(int(control), False)
    signal.pthread_sigmask(
        signal.SIG_SETMASK, []
    )  # the parent's thread may have blocked some of the signals
    set_name("tunemq-watchdog")
    become_subreaper()
    services: list[WatchedService] = []
    while rest:
        name, _, count = rest.pop(0).partition(":")
        services.append(WatchedService(name, rest[: int(count)]))
        del rest[: int(count)]
    try:
        Watchdog(folder, int(control), int(script), services).run()
    except Exception:  # noqa: BLE001  the process's boundary: its log says it, and all has been ended
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    # The interpreter's normal exit would do nothing more.
    os._exit(0)
