"""`FailureOutput`: add the end of a trial's output to the event of its failure.

The node adds it, because a trial process that dies cannot, and does not see its children's output.
The trial's files may be on another machine than the user, so the excerpt travels with the event and
is short.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias

from msgspec.structs import replace

from tunemq_shared.protocol import messages
from tunemq_workers.logs.log_policy_search import BEGINS, FAILS, tag_of
from tunemq_workers.logs.log_tail import end_of
from tunemq_workers.logs.output_files import STDERR, STDOUT
from tunemq_workers.runtime.trial_process_state import AttemptId, Emit

#: Limits of the excerpt: lines of each file, characters of these, and characters of the stacks of a
#: trial that hung.
_LINES: Final = 20
_BYTES: Final = 3 * 1024
_STACKS_BYTES: Final = 16 * 1024
#: Bytes at the end of a file that are read.
READ_BYTES: Final = 64 * 1024

#: Seconds that the loop may wait for a disk in each `PERIOD_S`: enough for a recently written page.
#: A forkserver's death, which fails many trials at once, must not block the loop for longer.
TIMEOUT_S: Final = 0.25
PERIOD_S: Final = 5.0
_MATTERS: Final = frozenset({BEGINS, *FAILS, b"freed"})

_Printed: TypeAlias = tuple[int, int]
_Read: TypeAlias = Callable[[str, _Printed], dict[str, bytes]]

#: Ends the line that faulthandler writes above each thread.
_STACK: Final = "(most recent call first):"
_MORE: Final = (
    *("Thread 0x", "Current thread 0x", "  File ", "  ...", "  <no Python frame>"),
    "Extension modules:",  # follows the stacks of a process that crashed
)
#: Control characters would reach a terminal through ``error.txt``.
_SHOWN: Final = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "�")


def read_last(
    folder: str, offsets: tuple[int, int] = (0, 0), most_bytes: int = READ_BYTES
) -> dict[str, bytes]:
    """Return the end of ``stdout`` and ``stderr`` in a trial's folder; b"" if unreadable.

    Args:
        folder: the trial's folder.
        offsets: the sizes of the files when the attempt began; earlier output is skipped.
        most_bytes: bytes to read of each file.
    """
    names = (STDOUT, STDERR)
    return {
        name: end_of(os.path.join(folder, name), offset, most_bytes)
        for name, offset in zip(names, offsets, strict=True)
    }


def as_text(read: Mapping[str, bytes]) -> str:
    """Return the last lines of each file with a headline; "" if nothing was printed.

    Stacks at the end of a file, which the node requested because the trial hung, follow below.
    """
    parts = []
    for name, data in read.items():
        lines, stacks = _parted(data.decode(errors="replace").rstrip().split("\n"))
        shown = "\n".join(map(_as_seen, lines[-_LINES:])).strip("\n")
        if shown:
            parts.append(f"The last lines of {name}:\n{_cut(shown, _BYTES)}\n")
        if stacks:
            text = "\n".join(map(_as_seen, stacks))
            parts.append(f"What its threads were doing:\n{text[:_STACKS_BYTES]}\n")
    return "\n".join(parts)


def _parted(lines: list[str]) -> tuple[list[str], list[str]]:
    """Split lines into the output and the stacks at its end."""
    first = len(lines)
    while first and (not lines[first - 1] or lines[first - 1].startswith(_MORE)):
        first -= 1
    if not any(line.endswith(_STACK) for line in lines[first:]):
        return lines, []
    return lines[:first], lines[first:]


def _as_seen(line: str) -> str:
    """Remove control characters, and versions of the line that a progress bar replaced."""
    return line.rstrip("\r").rpartition("\r")[2].translate(_SHOWN)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"[...]{text[-most:]}"


class FailureOutput:
    """Pass events on, and add the output to failures. Owned by the node's loop.

    Args:
        emit: takes (events stream, encoded event).
        read: returns the end of a trial's output; see `read_last`.
    """

    def __init__(self, emit: Emit, read: _Read = read_last) -> None:
        #: Returns the trials that have a trial process.
        self.running_trials: Callable[[], Iterable[tuple[AttemptId, messages.TrialSpec]]] = tuple
        self._emit, self._read = emit, read
        self._printed: dict[tuple[str, AttemptId], _Printed] = {}
        self._orders: queue.SimpleQueue[tuple[str, _Printed] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._has_thread = False
        #: Number of requests that were not answered in time: the disk hangs.
        self._owed = 0
        #: Seconds that the loop has waited in this period, and the period's start (monotonic).
        self._waited_s, self._since = 0.0, -math.inf

    def close(self) -> None:
        """End the thread."""
        self._orders.put(None)

    def emit(self, events_key: str, event: bytes) -> None:
        """Pass on an event of a trial process, or of the node about one."""
        tag = tag_of(event)
        if tag in _MATTERS:
            event = self._heard(events_key, event)
        self._emit(events_key, event)

    def _heard(self, events_key: str, event: bytes) -> bytes:
        match said := messages.decode_node_event(event):
            case messages.TrialStarted(trial, attempt):
                self._printed[events_key, (trial, attempt)] = said.printed
            case messages.SlotFreed(trial, attempt):
                self._printed.pop((events_key, (trial, attempt)), None)
            case messages.TrialFailed(trial, attempt) | messages.TrialProcessDied(trial, attempt):
                key = trial, attempt
                starts = [start for one, start in self.running_trials() if one == key]
                folder = next((one.folder for one in starts if one.events_key == events_key), None)
                if folder is not None:
                    printed = self._printed.get((events_key, key), (0, 0))
                    return messages.encode(replace(said, output=self._output(folder, printed)))
            case _:
                pass
        return event

    def _output(self, folder: str, printed: _Printed) -> str:
        """Return the end of the output; "" if the disk does not answer in time."""
        while self._owed and not self._answers.empty():
            self._answers.get()
            self._owed -= 1
        began = time.monotonic()
        if began >= self._since + PERIOD_S:
            self._waited_s, self._since = 0.0, began
        if self._owed or self._waited_s >= TIMEOUT_S:
            return ""
        if not self._has_thread:
            try:
                threading.Thread(target=self._run, name="last words", daemon=True).start()
            except RuntimeError:  # a trial may have used up the processes of a container
                return ""
            self._has_thread = True
        self._orders.put((folder, printed))
        try:
            return self._answers.get(timeout=TIMEOUT_S - self._waited_s)
        except queue.Empty:
            self._owed += 1
            return ""
        finally:
            self._waited_s += time.monotonic() - began

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            self._answers.put(as_text(self._read(*order)))
