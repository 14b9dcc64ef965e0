"""Linux process attributes that Python does not offer: parent death, privacy, rights, keyrings."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
from types import MappingProxyType
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
#: An invalid user and group id: setting it changes nothing and returns the current one.
_NOBODY: Final = 2**32 - 1
#: The number of the system call `keyctl`, for which glibc has no function, and an operation of it.
_KEYCTL: Final = MappingProxyType(
    {"x86_64": 250, "aarch64": 219, "riscv64": 219, "ppc64le": 271, "s390x": 280}
)
_KEYCTL_JOIN_SESSION_KEYRING: Final = 1

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, with_signal: int = signal.SIGKILL) -> None:
    """Make the kernel send ``with_signal`` to this process when its parent thread ends.

    ``parent`` is the parent's expected pid. If the parent has already ended, the signal would never
    come, so this process exits at once. An exec of a set-user-id program clears the setting.
    """
    _prctl(_PR_SET_PDEATHSIG, int(with_signal))
    if os.getppid() != parent:
        os._exit(0)


def become_subreaper() -> None:
    """Become the parent of every descendant whose own parent ends (a *subreaper*)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """Set the name that ps and top show; the kernel keeps 15 bytes of it."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode(errors="replace")[:15]))


def keep_memory_private(private: bool = True) -> None:
    """Allow only root to read this process's memory, environment and descriptors, or undo that.

    Forked children inherit it; an exec ends it.
    """
    _prctl(_PR_SET_DUMPABLE, int(not private))


def leave_no_core_file() -> None:
    """Disable core files for this process and its children, so that no memory is written to disk.

    For processes that hold keys and do not `keep_memory_private`.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def is_memory_private() -> bool:
    """Whether `keep_memory_private` is in effect."""
    return bool(_libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) != 1)


def no_new_privileges() -> None:
    """Prevent programs that this process or a descendant executes from gaining privileges."""
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
    """Drop root's right to access ``/proc/PID`` of other users' processes, permanently.

    With it, a link to ``/proc/PID/cwd`` or ``/proc/PID/root`` leads past closed folders, whatever
    user `files_as` sets. Call it before the process starts threads: they would keep the right.
    """
    header = _CapabilityHeader(_CAPABILITY_VERSION, 0)
    rights = (_Capabilities * 2)()  # capabilities 0 to 31, and those above
    _called("capget", _libc.capget(ctypes.byref(header), rights))
    for name, _ in _Capabilities._fields_:
        setattr(rights[0], name, getattr(rights[0], name) & ~(1 << _CAP_SYS_PTRACE))
    _called("capset", _libc.capset(ctypes.byref(header), rights))


def leave_session_keyring() -> None:
    """Begin an empty session keyring, so that no child has the keys of the login.

    A child that becomes another user would keep all rights to them: see session-keyring(7). Call it
    before the process starts threads.

    Raises:
        OSError: This is not possible, though the kernel has keyrings and children may use them.
    """
    number = _KEYCTL.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOTSUP, f"not implemented for {platform.machine()} processors")
    keyring = _libc.syscall(number, _KEYCTL_JOIN_SESSION_KEYRING, None)
    if keyring < 0 and ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM):
        _called("keyctl", keyring)


def files_as(uid: int, gid: int) -> None:
    """Make the calling thread, and threads that it starts, open files as another user.

    Nothing else changes: signals, the right to start processes as any user, and the process's
    owner. It needs root. It clears the setting of `die_with_parent` in this thread.

    Raises:
        PermissionError: This process may not.
    """
    for call, number in ((_libc.setfsgid, gid), (_libc.setfsuid, uid)):
        call(ctypes.c_uint(number))
    if files_user() != (uid, gid):
        raise PermissionError(errno.EPERM, f"files cannot be opened as user {uid}")


def files_user() -> tuple[int, int]:
    """The user and the group as which the calling thread opens files."""
    numbers = [call(ctypes.c_uint(_NOBODY)) for call in (_libc.setfsuid, _libc.setfsgid)]
    uid, gid = (number & _NOBODY for number in numbers)
    return uid, gid


def _prctl(option: int, argument: object) -> None:
    _called(f"prctl {option}", _libc.prctl(option, argument, 0, 0, 0))


def _called(name: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
