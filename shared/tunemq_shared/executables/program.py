"""`Program`: the process of a trial's program, with its process group and its exit."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Final

from tunemq_shared.base.errors import ExecutableFailed, TrainableError
from tunemq_shared.system.processes import all_pids, is_readable, signal_group, signal_name, stat_of

#: How much of the end of stderr an error shows.
_TAIL_BYTES: Final = 4096
_TAIL_LINES: Final = 20
#: Seconds between two checks for remaining processes of a group.
_POLL_INTERVAL_S: Final = 0.05


class Program:
    """A running program, in its own process group.

    It shares this process's stderr; ``stdout`` is a pipe from it.

    Raises:
        TrainableError: It cannot be started; says why.
    """

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], cwd: str) -> None:
        self._name = command[0]
        self._printed = _size_of_stderr()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                cwd=cwd,
                env=dict(variables),
                process_group=0,
            )
        except (OSError, ValueError) as error:
            raise TrainableError(_why_not_started(command, cwd, error)) from None
        #: Descriptor that becomes readable when the program ends.
        self.ended: int = os.pidfd_open(self._process.pid)
        pipe = self._process.stdout
        #: Descriptor of its output.
        self.stdout: int = -1 if pipe is None else pipe.fileno()

    def end(self, grace_s: float) -> int:
        """End the program and its group, by SIGTERM and after the grace by SIGKILL.

        If it has ended by itself, the rest of its group is killed.

        Args:
            grace_s: Seconds between the two signals.

        Returns:
            The exit code; negative for the number of a signal.
        """
        if not is_readable(self.ended, 0.0):
            signal_group(self._process.pid, signal.SIGTERM)
            # A shell may exit at once while its children still save.
            deadline = time.monotonic() + grace_s
            is_readable(self.ended, grace_s)
            while time.monotonic() < deadline and _runs_any(self._process.pid):
                time.sleep(_POLL_INTERVAL_S)
        # The pid, and so the group's id, cannot be reused before `wait`.
        signal_group(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def close(self) -> None:
        """Close its descriptors."""
        os.close(self.ended)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def check(self) -> None:
        """Check its exit code; call it after `end`.

        Raises:
            ExecutableFailed: Its exit code is not 0, or a signal killed it.
        """
        code = self._process.returncode
        if code != 0:
            raise ExecutableFailed(f"{self._name} {_ending(code)}{self._last_output()}")

    def _last_output(self) -> str:
        """The end of its stderr, if that is a file."""
        try:
            with open("/proc/self/fd/2", "rb") as file:
                size = os.fstat(file.fileno()).st_size
                begin = self._printed if self._printed <= size else 0
                file.seek(max(begin, size - _TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return "."
        lines = text.rstrip().splitlines()[-_TAIL_LINES:]
        if not lines:
            return "; it wrote nothing to stderr."
        return "; its stderr ends with:\n" + "\n".join(lines)


def _runs_any(group: int) -> bool:
    """Whether a process of the group runs; zombies do not count."""
    stats = filter(None, map(stat_of, all_pids()))
    return any(int(stat[2]) == group and stat[0] not in {b"Z", b"X"} for stat in stats)


def _size_of_stderr() -> int:
    try:
        return os.fstat(2).st_size
    except OSError:
        return 0


def _ending(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}"
    name = signal_name(-code)
    if -code == signal.SIGKILL:
        return f"was killed by {name} (by a user or process, or by the kernel for memory)"
    return f"was killed by {name}"


def _why_not_started(command: Sequence[str], cwd: str, error: OSError | ValueError) -> str:
    reason = f"{command[0]} cannot be started in {cwd}: {error}."
    if isinstance(error, OSError) and error.errno == 8:
        return f"{reason} A script has to begin with a line such as #!/bin/sh."
    return reason
