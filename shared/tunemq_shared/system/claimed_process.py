"""Verify by the kernel that a process id from a message belongs to the claimed process.

A process that runs user code sends process ids in its messages. The receiver that acts on such an
id may have more rights than the sender, and the id may belong to any process of the machine.

A ``/proc`` that is mounted with hidepid=, as systemd's ProtectProc= does, hides processes: those of
other users, and those of the same user that called
`tunemq_shared.system.process_attributes.keep_memory_private`. A hidden process has not ended.
"""

from __future__ import annotations

import errno
import os
import select
import socket
from typing import Final

from tunemq_shared.system.processes import is_readable

#: The kernel's largest pid (PID_MAX_LIMIT).
MAX_PID: Final = 2**22
#: Errors of `os.pidfd_open` if the id is a thread's.
_NO_PROCESS: Final = frozenset({errno.EINVAL, errno.ENOENT})


class ProcessMismatch(Exception):
    """The id belongs to another process than was claimed; says why."""


def open_claimed(pid: int, *, parent: int | None = None, user: int | None = None) -> int:
    """Open a descriptor (pidfd) of the process ``pid`` and verify that it is the claimed one.

    The descriptor stands for the verified process, even if its id is reused later.

    Args:
        pid: The claimed id.
        parent: The process that must be its parent; by default any.
        user: The user that all of its user ids must be; by default any.

    Raises:
        ProcessMismatch: It is another process.
        ProcessLookupError: There is no such process, or it has ended.
        PermissionError: It runs, but /proc hides it, so that it cannot be verified.
        OSError: No descriptor is left.
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
    """Whether a process has this id, and /proc hides it."""
    try:
        with open(f"/proc/{pid}/stat", "rb"):
            return False
    except (FileNotFoundError, PermissionError):
        return exists(pid)


def exists(pid: int) -> bool:
    """Whether a process, hidden or not, has this id; a zombie counts."""
    if not 0 < pid <= MAX_PID:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        return True
    return True


def has_hung_up(sock: socket.socket) -> bool:
    """Whether all processes with the other end of a socket pair closed it or ended."""
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
    """Read the lines about parent and users; line breaks in the name are escaped."""
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
