"""What Linux lets a process say about itself and its parent, and Python does not offer."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_GET_DUMPABLE: Final = 3
_PR_SET_DUMPABLE: Final = 4
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_SET_NO_NEW_PRIVS: Final = 38
#: capabilities(7), and the version of the structs that `capget` and `capset` take.
_CAP_SYS_PTRACE: Final = 19
_CAPABILITY_VERSION: Final = 0x20080522
#: No user's and no group's number: who gives it learns what is set.
_NOBODY: Final = 2**32 - 1

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, with_signal: int = signal.SIGKILL) -> None:
    """Have the kernel send ``with_signal`` to this process when its parent thread ends.

    ``parent`` is the pid that the parent is supposed to have. If it is gone already, nobody would
    ever send the signal, so this process ends at once. An exec of a set-user-id program clears
    the wish.
    """
    _prctl(_PR_SET_PDEATHSIG, int(with_signal))
    if os.getppid() != parent:
        os._exit(0)


def become_subreaper() -> None:
    """Become the parent of every descendant whose own parent ends (a *subreaper*)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """Show ``name`` (15 bytes of it) in ps and top."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode(errors="replace")[:15]))


def keep_memory_private(private: bool = True) -> None:
    """Let nobody but root read this process's memory, environment and descriptors; or take it back.

    Children that are forked are as private as this process; an exec ends it.
    """
    _prctl(_PR_SET_DUMPABLE, int(not private))


def leave_no_core_file() -> None:
    """If this process crashes, or one that it starts, nothing of its memory is written to a disk.

    For those that hold keys and do not `keep_memory_private`.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def is_memory_private() -> bool:
    """Whether `keep_memory_private` holds."""
    return bool(_libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) != 1)


def no_new_privileges() -> None:
    """From now on no program that this process or a descendant executes gets another's rights."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Capabilities(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def look_into_no_other_users_process() -> None:
    """Give up root's right to what is below ``/proc/PID`` of other users' processes, for good.

    With it a link to ``/proc/PID/cwd`` or ``/proc/PID/root`` leads past closed folders, whatever
    user `files_as` names. Call it before the process starts threads: they keep the right.
    """
    header = _CapabilityHeader(_CAPABILITY_VERSION, 0)
    rights = (_Capabilities * 2)()  # of the numbers 0 to 31, and of those above
    _called("capget", _libc.capget(ctypes.byref(header), rights))
    for name, _ in _Capabilities._fields_:
        setattr(rights[0], name, getattr(rights[0], name) & ~(1 << _CAP_SYS_PTRACE))
    _called("capset", _libc.capset(ctypes.byref(header), rights))


def files_as(uid: int, gid: int) -> None:
    """Have the calling thread, and those that it starts, open files as another user would.

    Nothing else changes: signals, the right to start processes as anybody, and whose the process
    is. For root. What `die_with_parent` asked for in this thread is forgotten.

    Raises:
        PermissionError: this process may not.
    """
    for call, number in ((_libc.setfsgid, gid), (_libc.setfsuid, uid)):
        call(ctypes.c_uint(number))
    if files_user() != (uid, gid):
        raise PermissionError(errno.EPERM, f"files cannot be opened as user {uid}")


def files_user() -> tuple[int, int]:
    """The user and the group that the calling thread opens files as."""
    numbers = [call(ctypes.c_uint(_NOBODY)) for call in (_libc.setfsuid, _libc.setfsgid)]
    uid, gid = (number & _NOBODY for number in numbers)
    return uid, gid


def _prctl(option: int, argument: object) -> None:
    _called(f"prctl {option}", _libc.prctl(option, argument, 0, 0, 0))


def _called(name: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
