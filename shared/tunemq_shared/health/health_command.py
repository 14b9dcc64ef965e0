"""``tunemq health``: whether a service on this machine is healthy, for containers and monitors.

It runs every few seconds beside each service, so it must start fast: it imports only a few modules,
without argparse and without other modules of TuneMQ.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Sequence

_USAGE = """\
usage: tunemq health [--ready] [--within SECONDS] [FILE]

Says whether the `tunemq scheduler` or `tunemq worker` that was started with
TUNEMQ_HEALTH=FILE is healthy; FILE defaults to this command's $TUNEMQ_HEALTH. Run it on the same
machine, or in the same container, as the same user or as root.

A service is alive if its main loop went round within --within seconds (default: 60); if not,
restart it. An unreachable Redis, scheduler or store does not count: trials run on.
  --ready   also require that it can work now: that Redis confirmed a worker's lease and the worker
            is not stopping, or that a scheduler serves and reaches its Redis.

Exit codes: 0 it is; 1 it is not; 64 invalid arguments.
"""
_EX_USAGE = 64
#: Same as in `tunemq_shared.health.service_health`, which is not imported here.
_VARIABLE = "TUNEMQ_HEALTH"
_SIZE = 200
_WITHIN_S = 60.0
_BOOT = "/proc/sys/kernel/random/boot_id"
_BOOT_SIZE = 16


class _Unusable(Exception):
    pass


class _Unwell(Exception):
    pass


def main(arguments: Sequence[str]) -> int:
    """Print the service's health; returns the exit code."""
    if "-h" in arguments or "--help" in arguments:
        sys.stdout.write(_USAGE)
        return 0
    try:
        path, within_s, must_be_ready = _options(list(arguments))
        said = _look(path, within_s, must_be_ready=must_be_ready)
    except _Unusable as problem:
        sys.stderr.write(f"tunemq health: {problem}\n")
        return _EX_USAGE
    except _Unwell as problem:
        sys.stdout.write(f"{_printable(str(problem))}\n")
        return 1
    sys.stdout.write(f"{_printable(said)}\n")
    return 0


def _printable(text: str) -> str:
    """Escape control characters: a trial of the service's own user may write into the file."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def boot() -> str:
    """Identify this boot of the machine; ``-`` if the kernel gives no boot id."""
    try:
        with open(_BOOT, encoding="ascii") as file:
            return file.read().strip().replace("-", "")[:_BOOT_SIZE] or "-"
    except (OSError, ValueError):
        return "-"


def _options(given: list[str]) -> tuple[str, float, bool]:
    """Parse the arguments: the file, its maximum age in seconds, and whether --ready is set."""
    path, within_s, must_be_ready = "", _WITHIN_S, False
    while given:
        one = given.pop(0)
        if one == "--ready":
            must_be_ready = True
        elif one == "--within" or one.startswith("--within="):
            within_s = _seconds(one.partition("=")[2] or (given.pop(0) if given else ""))
        elif one.startswith("-") or path:
            raise _Unusable(f"Invalid argument {one}; see tunemq health --help.")
        else:
            path = one
    path = path or os.environ.get(_VARIABLE, "")
    if not path:
        raise _Unusable(
            f"${_VARIABLE} is not set: start the service with {_VARIABLE}=FILE, and name the same"
            " file here."
        )
    return path, within_s, must_be_ready


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise _Unusable(f"--within is {text!r}; give a number of seconds, such as 60.")
    return seconds


def _look(path: str, within_s: float, *, must_be_ready: bool) -> str:
    """Describe the service's health, or raise `_Unwell`."""
    role, pid, at, booted, state, status = _read(path)
    age_s = time.monotonic() - at
    who = f"{role} (process {pid})"
    if booted != boot() or age_s < -1:  # the time in the file is rounded
        raise _Unwell(f"{path} is from before this machine was started.")
    if age_s > within_s:
        raise _Unwell(f"{who} hangs, or is gone: its loop last went round {age_s:.1f} s ago.")
    if must_be_ready and state != "ready":
        raise _Unwell(f"{who} is alive and not ready ({state}): {status}".rstrip(": "))
    return f"{who} is {'ready' if state == 'ready' else f'alive ({state})'}: {status}".rstrip(": ")


def _read(path: str) -> tuple[str, int, float, str, str, str]:
    try:
        # Follow no symbolic link, and do not block on a pipe without a writer.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            about = os.fstat(file)
            content = os.read(file, _SIZE)
        finally:
            os.close(file)
    except (OSError, ValueError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else str(problem)
        raise _Unwell(f"{path} cannot be read, so nothing runs here: {why}.") from problem
    is_ours = os.geteuid() in {0, about.st_uid} or about.st_uid == 0
    if not (is_ours and stat.S_ISREG(about.st_mode)):
        raise _Unwell(f"{path} is no file of this user's, so its writer is unknown.")
    parts = content.decode("ascii", "replace").rstrip().split(" ", 5)
    try:
        role, pid, at, booted, state = parts[0], int(parts[1]), float(parts[2]), *parts[3:5]
    except (IndexError, ValueError) as problem:
        raise _Unwell(f"{path} says nothing of a service's health.") from problem
    return role, pid, at, booted, state, parts[5] if len(parts) > 5 else ""
