"""The log scanner: a process that searches trial output for log policies, started on demand.

    python -P -m tunemq_workers.logs.log_policy_scanner --fd FD --node-pid PID [--trial-user USER]

It is a separate process for two reasons. A trial process does not see its children's output and
cannot search anything after its death, when it matters most. In a thread of the node a pattern
could hold the interpreter's lock for hours: a regular expression can take exponential time, its
form does not reveal this, and only a signal stops Python's `re`, and only in the main thread. The
scanner may hang or die without harm: the node kills it, starts another, and repeats its orders with
the offsets.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from tunemq_shared.trial.memory_errors import says_cuda_memory
from tunemq_workers.logs import scanner_messages as messages
from tunemq_workers.logs.log_tail import LogFile, end_of
from tunemq_workers.logs.output_files import STDERR, STDOUT
from tunemq_workers.processes.child_entry import begin, receive
from tunemq_workers.runtime.frames import ANSWER, FrameDecoder, frame

#: Seconds between two searches; the last one happens when the trial has failed.
PERIOD_S: Final = 1.0
#: Bytes at the end of each file that are checked for a GPU's lack of memory. torchrun prints dozens
#: of lines after its rank's error; errors that a trial survived are farther from the end.
_END_BYTES: Final = 16 * 2**10
#: Seconds of processor time that a pattern may take for the output of one period. Most take a
#: hundredth of this for the longest output that is read at once.
BUDGET_S: Final = 0.25
#: After as many of its patterns took longer, a search's others are left out on this node, too: the
#: policies of other searches wait for them.
_SLOW_PATTERNS: Final = 4
#: Characters of a line that a report contains.
SHOWN: Final = 300
#: Characters of a line before the match that a report contains.
_BEFORE: Final = 100
#: Control characters would reach users' terminals.
_PLAIN: Final = dict.fromkeys([*range(32), *range(127, 160)], " ")


class PatternDisabled(Exception):
    """The pattern is not searched for any more; the text says why."""


class _TimeIsUp(Exception):
    """The pattern used up its processor time."""


class LogPatterns:
    """Compiled patterns with a time limit; usable only in the main thread."""

    def __init__(self, budget_s: float = BUDGET_S) -> None:
        self._budget_s = budget_s
        self._compiled: dict[str, re.Pattern[str]] = {}
        #: By search, the reason for each pattern that is left out.
        self._left_out: dict[str, dict[str, str]] = {}
        self._is_limited = False
        signal.signal(signal.SIGVTALRM, self._ring)

    def search(self, pattern: str, lines: Iterable[str], whose: str = "") -> str | None:
        """Return the first matching line, shortened for display; None if there is none.

        Args:
            pattern: the regular expression.
            lines: the output.
            whose: the search that has the pattern and the output.

        Raises:
            PatternDisabled: the pattern is invalid or takes too long, now or earlier.
        """
        left_out = self._left_out.setdefault(whose, {})
        if pattern in left_out:
            raise PatternDisabled(left_out[pattern])
        if len(left_out) >= _SLOW_PATTERNS:
            raise PatternDisabled(f"{_SLOW_PATTERNS} other patterns of its search took too long")
        try:
            with self._limited():
                return self._search(pattern, lines)
        except _TimeIsUp:
            reason = f"it took more than {self._budget_s:g} s for the output of a trial"
        except (re.error, OverflowError, RecursionError, MemoryError) as error:
            reason = f"it cannot be used here: {error}"
        left_out[pattern] = reason
        raise PatternDisabled(reason)

    def _search(self, pattern: str, lines: Iterable[str]) -> str | None:
        compiled = self._compiled.get(pattern)
        if compiled is None:
            compiled = self._compiled[pattern] = re.compile(pattern)
        for line in lines:
            found = compiled.search(line)
            if found is not None:
                begin = max(0, found.start() - _BEFORE)
                return line[begin : begin + SHOWN].translate(_PLAIN).strip()
        return None

    @contextmanager
    def _limited(self) -> Iterator[None]:
        # The process's own time, so that a busy machine does not disable patterns.
        self._is_limited = True
        signal.setitimer(signal.ITIMER_VIRTUAL, self._budget_s)
        try:
            yield
        finally:
            self._is_limited = False
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def _ring(self, _signal: int, _frame: FrameType | None) -> None:
        if self._is_limited:  # otherwise it came just before the timer was stopped
            raise _TimeIsUp


class _FollowedOutput:
    """The output of one attempt, and the patterns that were not found in it yet."""

    def __init__(self, output: messages.AttemptOutput) -> None:
        names = zip((STDOUT, STDERR), output.printed, strict=True)
        self.search = output.search
        self._files = [LogFile(os.path.join(output.folder, name), at) for name, at in names]
        self.patterns = list(output.patterns)

    def notices(self, *, is_last: bool) -> list[str]:
        return [line for file in self._files for line in file.lines(is_last=is_last)]


class LogScanner:
    """Carry out the node's orders; usable only in the main thread.

    Args:
        answer: takes answers.
    """

    def __init__(self, answer: Callable[[messages.LogAnswer], None]) -> None:
        self._answer = answer
        self._patterns = LogPatterns()
        self._followed: dict[int, _FollowedOutput] = {}

    def obey(self, order: messages.LogOrder) -> None:
        """Carry out one order."""
        match order:
            case messages.FollowOutput(id_, output):
                self._followed[id_] = _FollowedOutput(output)
            case messages.FinishOutput(id_, output, asks_memory):
                followed = (
                    self._followed.pop(id_) if id_ in self._followed else _FollowedOutput(output)
                )
                self._look_at(id_, followed, is_last=True)
                self._answer(messages.OutputFinished(id_, asks_memory and _is_cuda_memory(output)))
            case _:
                self._followed.pop(order.id, None)

    def look(self) -> None:
        """Search the output that was added since the last call."""
        for id_, followed in self._followed.items():
            self._look_at(id_, followed)

    def _look_at(self, id_: int, followed: _FollowedOutput, *, is_last: bool = False) -> None:
        if not followed.patterns:
            return
        lines = followed.notices(is_last=is_last)
        for pattern in list(followed.patterns):
            try:
                line = self._patterns.search(pattern, lines, followed.search)
            except PatternDisabled as left_out:
                self._answer(messages.PatternDropped(id_, pattern, str(left_out)))
            else:
                if line is None:
                    continue
                self._answer(messages.LineMatched(id_, pattern, line))
            followed.patterns.remove(pattern)


def _is_cuda_memory(output: messages.AttemptOutput) -> bool:
    names = zip((STDOUT, STDERR), output.printed, strict=True)
    return any(
        says_cuda_memory(
            end_of(os.path.join(output.folder, name), at, _END_BYTES).decode(errors="replace")
        )
        for name, at in names
    )


def main() -> None:
    """Carry out the node's orders until it closes the socket named on the command line."""
    _serve(begin("tunemq_workers.logs.log_policy_scanner", "tunemq-logs"))


def _serve(node: socket.socket) -> None:
    scanner = LogScanner(lambda answer: node.sendall(frame(ANSWER, messages.encode(answer))))
    decoder = FrameDecoder()
    due = time.monotonic() + PERIOD_S
    while True:
        if select.select([node], [], [], max(0.0, due - time.monotonic()))[0]:
            data = receive(node)
            if not data:
                return
            for _, payload in decoder.feed(data):
                scanner.obey(messages.decode_order(payload))
        if time.monotonic() >= due:
            scanner.look()
            due = time.monotonic() + PERIOD_S


if __name__ == "__main__":
    main()
