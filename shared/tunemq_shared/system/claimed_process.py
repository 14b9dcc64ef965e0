"""Proves that a process is what another party says: by the kernel, and not by its number alone.

A process that runs user code names process ids in its messages. Who acts on such a number may have
more rights than the sender, and the number may belong to any process of the machine.

A ``/proc`` that is mounted with hidepid=, as systemd's ProtectProc= does, hides processes: those of
other users, and those of one's own that `tunemq_shared.system.process_control.keep_memory_private`.
To be hidden is not to have ended.
"""

from __future__ import annotations

import errno
import os
import select
import socket
from typing import Final

from tunemq_shared.system.processes import is_readable

#: The kernel never gives a greater number (PID_MAX_LIMIT).
MAX_PID: Final = 2**22
#: By `os.pidfd_open`: the number is that of a thread.
_NO_PROCESS: Final = frozenset({errno.EINVAL, errno.ENOENT})


class ProcessMismatch(Exception):
    """The number belongs to another process than was claimed; says why."""


def open_claimed(pid: int, *, parent: int | None = None, user: int | None = None) -> int:
    """A descriptor (pidfd) of the process ``pid``, if it is what it should be.

    The descriptor stands for the process that was examined, also when the number is another's.

    Args:
        pid: the number that was claimed.
        parent: the process whose child it has to be; by default any.
        user: the user that all of its user ids have to be; by default any.

    Raises:
        NotThatProcess: it is another process.
        ProcessLookupError: there is no such process, or no longer.
        PermissionError: it runs, and /proc hides it: what it is cannot be known.
        OSError: no descriptor is left.
    """
    if not 0 < pid <= MAX_PID:
        raise ProcessMismatch(f"{pid} is the number of no process")
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        if error.errno in _NO_PROCESS:
            raise ProcessMismatch(f"{pid} is the number of no process") from error
        raise
    try:
        _prove(pid, pidfd, parent, user)
    except BaseException:
        os.close(pidfd)
        raise
    return pidfd


def is_hidden(pid: int) -> bool:
    """Whether a process has this number, and /proc does not show which it is."""
    try:
        with open(f"/proc/{pid}/stat", "rb"):
            return False
    except (FileNotFoundError, PermissionError):
        return exists(pid)


def exists(pid: int) -> bool:
    """Whether a process has this number, hidden or not; it may have ended, unless waited for."""
    if not 0 < pid <= MAX_PID:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        return True
    return True


def has_hung_up(sock: socket.socket) -> bool:
    """Whether every process that had the other end of a socket pair has closed it, or ended."""
    poller = select.poll()
    poller.register(sock, 0)
    return any(events & select.POLLHUP for _, events in poller.poll(0))


def _prove(pid: int, pidfd: int, parent: int | None, user: int | None) -> None:
    found = _status(pid, pidfd)
    if parent is not None and found.get("PPid") != [parent]:
        raise ProcessMismatch(f"process {pid} is no child of process {parent}")
    if user is not None and found.get("Uid") != [user] * 4:
        raise ProcessMismatch(f"process {pid} does not run as user {user}")


def _status(pid: int, pidfd: int) -> dict[str, list[int]]:
    """The lines about its parent and its users; in the name before them line breaks are escaped."""
    found = {}
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, numbers = line.partition(":")
                if name in {"PPid", "Uid"}:
                    found[name] = [int(number) for number in numbers.split()]
    except (FileNotFoundError, PermissionError) as error:
        if is_readable(pidfd):
            raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended") from error
        hidden = f"process {pid} is hidden by the hidepid= or ProtectProc= of /proc"
        raise PermissionError(errno.EACCES, hidden) from error
    return found
