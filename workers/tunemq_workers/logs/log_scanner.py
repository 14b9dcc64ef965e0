"""The log scanner: a process that searches trial output for log policies, started on demand.

    python -P -m tunemq_workers.logs.log_scanner --fd FD --node-pid PID [--trial-user USER]

It is a separate process for two reasons. A trial process does not see its children's output and
cannot search anything after its death, when it matters most. In a thread of the node a pattern
could hold the interpreter's lock for hours (`tunemq_workers.logs.log_matching`). The scanner may
hang or die without harm: the node kills it, starts another, and repeats its orders with the
offsets.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from typing import Final

from tunemq_shared.trial.memory_errors import says_cuda_memory
from tunemq_workers.logs import log_messages as messages
from tunemq_workers.logs.log_lines import LogFile, end_of
from tunemq_workers.logs.log_matching import LogPatterns, PatternDisabled
from tunemq_workers.logs.output_files import STDERR, STDOUT
from tunemq_workers.processes.child_start import begin, receive
from tunemq_workers.runtime.frames import FrameDecoder, frame

#: Seconds between two searches; the last one happens when the trial has failed.
PERIOD_S: Final = 1.0
#: Bytes at the end of each file that are checked for a GPU's lack of memory. torchrun prints dozens
#: of lines after its rank's error; errors that a trial survived are farther from the end.
_END_BYTES: Final = 16 * 2**10


class _FollowedOutput:
    """The output of one attempt, and the patterns that were not found in it yet."""

    def __init__(self, output: messages.AttemptOutput) -> None:
        names = zip((STDOUT, STDERR), output.printed, strict=True)
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
                line = self._patterns.search(pattern, lines)
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
    _serve(begin("tunemq_workers.logs.log_scanner", "tunemq-logs"))


def _serve(node: socket.socket) -> None:
    scanner = LogScanner(
        lambda answer: node.sendall(frame(messages.ANSWER, messages.encode(answer)))
    )
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
