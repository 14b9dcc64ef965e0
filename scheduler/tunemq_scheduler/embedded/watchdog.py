"""The watchdog: a process between a script and its farm, which ends a second after the script.

The script starts it; it starts Redis and the node, starts them again when they die, and ends
everything when the script ends, in whatever way. It exists because the kernel's PDEATHSIG follows
the *thread* that started a process (``fit()`` may run in a thread that ends long before the
script), because only a descriptor of the script's process tells reliably that it is gone (its pipes
may be held by its children), and because somebody must be left to remove the folder.

It imports little of TuneMQ and nothing from outside the standard library, and starts with ``python
-I -S``, so that no module of the user's can get in its way.

Both ends speak lines. To the watchdog: ``stop``, and ``excuse <service>`` where its newest death
was not its own fault. To the script: ``started <service> <pid>``, ``died <service> <how>``,
``gave_up <service> <why>``.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

from tunemq_scheduler.embedded import bound_processes, runtime_layout
from tunemq_shared.system.process_control import become_subreaper, set_name

#: Pauses before a service that died young is started again; after the last one the watchdog gives
#: up.
_PAUSES_S = (0.0, 0.1, 0.3, 1.0, 1.0)
#: A service that lived so long did not die young.
_YOUNG_S = 10.0
#: So many young deaths in a row can be excused: a dozen poison trials, each with its budget; not a
#: machine on which nothing can run.
_MOST_EXCUSED = 40
#: What ends without us being able to wait for it (it sleeps in the kernel) is given up after so
#: long.
_TIMEOUT_S = 0.8
#: In a command line, this stands for the watchdog's pid.
WATCHDOG_PID = "{watchdog}"


class WatchedService:
    """Redis, or the node: a command that is to run."""

    def __init__(self, name: str, argv: list[str]) -> None:
        self.name = name
        self.argv = argv
        self.pid: int | None = None
        self.started_at = 0.0
        self.young_deaths = 0
        self._excused = 0
        #: When it is to be started; None while it runs, and for ever when it was given up.
        self.due: float | None = 0.0

    def died(self, now: float) -> bool:
        """Note its death; returns whether it is worth starting again."""
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
        """So many of its deaths do not count, within reason."""
        times = min(times, self.young_deaths, _MOST_EXCUSED - self._excused)
        self.young_deaths -= times
        self._excused += times


class Watchdog:
    """Watches one script and its services.

    Args:
        folder: the runtime folder; removed at the end.
        control: the watchdog's end of a socket pair with the script.
        script: a pidfd of the script.
        services: in the order in which they are started; they are ended in the opposite one.
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
        """Keep the farm until the script ends or says ``stop``."""
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self._bell, warn_on_full_buffer=False)
        try:
            # Held until this process ends, when the folder is gone.
            runtime_layout.take_lock(self._folder)
            self._start_due()
            runtime_layout.remove_abandoned(self._folder)
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
        """Do what the script says; returns whether that is to end."""
        try:
            said = os.read(self._control, 4096)
        except OSError:
            return True
        for service in self._services:
            service.excuse(said.count(runtime_layout.excuse(service.name).encode()))
        # End of file: the script has turned into another program (exec), and cannot say so.
        return not said or b"stop" in said

    def _noted(self, pid: int, status: int) -> None:
        for service in self._services:
            if service.pid != pid:
                continue
            how = bound_processes.how_it_ended(status)
            self._say(f"died {service.name} {how}")
            if not service.died(time.monotonic()):
                self._say(f"gave_up {service.name} {how}, {len(_PAUSES_S) + 1} times in a row")
            if service.name == runtime_layout.NODE:
                # What it left is re-parented to us: a new one must not meet its predecessor's
                # hosts.
                bound_processes.kill_children(self._running(), _TIMEOUT_S, self._noted)
            return

    def _running(self) -> list[int]:
        return [service.pid for service in self._services if service.pid is not None]

    def _start_due(self) -> None:
        now = time.monotonic()
        for service in self._services:
            if service.due is not None and service.due <= now:
                argv = [str(os.getpid()) if part == WATCHDOG_PID else part for part in service.argv]
                log = os.path.join(self._folder, runtime_layout.log_of(service.name))
                service.pid = bound_processes.start(argv, os.environ, log)
                service.due, service.started_at = None, now
                self._say(f"started {service.name} {service.pid}")

    def _say(self, status_line: str) -> None:
        try:
            os.write(self._control, status_line.encode() + b"\n")
        except OSError:  # nobody reads it: the script is busy, or gone, which the pidfd tells
            return

    def _end(self) -> None:
        # Redis last: what is being killed must not begin to wait for it to come back.
        for service in reversed(self._services):
            service.due = None
            others = [pid for pid in self._running() if pid != service.pid]
            bound_processes.kill_children(others, _TIMEOUT_S)
            service.pid = None
        bound_processes.remove_tree(self._folder)


def main() -> None:
    """``watchdog FOLDER CONTROL SCRIPT NAME:N ARG*N NAME:N ARG*N ...``."""
    folder, control, script, *rest = sys.argv[1:]
    for descriptor in (int(control), int(script)):
        os.set_inheritable(descriptor, False)
    os.set_blocking(int(control), False)
    signal.pthread_sigmask(
        signal.SIG_SETMASK, []
    )  # the thread that started us may have blocked some
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
    # Nothing is left to do that the interpreter's own ending would do.
    os._exit(0)
