"""Log lines at a worker's terminal: sentences about the events that its user follows.

The full log is in ``node.log``, one event name with fields per line. This module turns a few of
these events into sentences and passes warnings on unchanged. A terminal may be slow, stopped with
Ctrl-S, or a pipe without a reader, so a separate thread writes, and lines are dropped when it
cannot keep up.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import sys
import threading
import time
from logging.handlers import QueueHandler
from typing import Any, Final, TextIO

from tunemq_shared.base.safe_text import harmless

_FIELD: Final = re.compile(r"(\w+)=%\w")
#: The sentence for each event; its fields are in braces.
_TOLD: Final = {
    "node.started": "Worker {name} (instance {instance_id}) starts; Redis is at {redis}.",
    "node.offers": "It offers {resources}; GPUs: {gpus}.",
    "node.trials_as_root": (
        "Trials run as root, who may read this worker's keys; --trial-user USER runs them as "
        "another user."
    ),
    "memory.polled": "Memory limits of trials are looked at up to 50 times a second: {reason}. One"
    " that allocates fast exceeds its limit for a moment.",
    "node.introduced": (
        "Ready: this worker has registered. `tunemq nodes` lists it once a scheduler accepts it."
    ),
    "node.stopping": "Stopping ({reason}). Trials here: {trials}; they may save for {grace} s.",
    "node.ending": "Killing the remaining processes (trials: {trials}).",
    "node.retired": "This worker is retiring ({reason}).",
    "node.fenced": "The farm continued without this node ({reason}).",
    "node.impersonated": "Another process has sent events as this node; it starts again under a"
    " new identity. Replace the worker's keys: tunemq keys rotate.",
    "node.abandoned": "Ending at once ({reason}).",
    "node.reports_dropped": "{size} bytes of reports could not be sent to Redis: trials repeat"
    " these steps.",
    "node.ended": "Ended.",
    "keys.read": "{line}",
    "keys.missing": (
        "The farm's scheduler signs its messages, and this worker has no keys, so that each "
        "rejects the other. Start the worker with the farm's keys: --keys worker.toml."
    ),
    "keys.unused": "This worker has keys, and the farm's scheduler has none: neither believes"
    " the other. Start the scheduler with its keys (--keys scheduler.toml), or this without.",
    "keys.unknown": (
        "The farm's scheduler signs with the key {key}, which is not in {path}, so this worker "
        "rejects its messages. Copy the farm's current worker.toml to it."
    ),
    "message.rejected": "{what}",
    "redis.unreachable": "Redis is away ({reason}) Trials continue; their results are kept.",
    "redis.back": "Redis is back.",
    "store.unusable": "This worker cannot use the farm's store {store}: {reason}",
    "store.answers": "The farm's store {store} answers now.",
    "files.not_sent": "Not all files of a trial are in the store: {reason}. They are in {folder}"
    " for {days} days, or until this worker needs the space.",
    "files.removed": "Removed {folder}: files of trials that are not in the store, too old or too"
    " large to keep.",
    "loop.hangs": "This worker's main loop has not answered for {seconds} s: its lease expires, and"
    " its trials continue elsewhere.",
    "trial.started": "Trial {trial} runs (attempt {attempt}, process {pid}).",
    "trial.left": "Trial {trial} has left (attempt {attempt}).",
}
#: The most lines that wait for a slow terminal.
_WAITING: Final = 1000
#: How long `close` waits for the last lines.
_FLUSH_S: Final = 0.5
_END: Final = None


def open_terminal(stream: TextIO | None = None) -> TerminalHandler:
    """Print log events as sentences from now on; see `TerminalHandler`."""
    terminal = TerminalHandler(stream or sys.stderr)
    root = logging.getLogger()
    for handler in root.handlers:
        handler.setLevel(root.level)
    root.addHandler(terminal)
    # These debug events are for the terminal only; the log file stays at its level.
    logging.getLogger("tunemq_workers.trials.trial_supervisor").setLevel(logging.DEBUG)
    return terminal


class TerminalHandler(QueueHandler):
    """A log handler that writes sentences and never blocks."""

    def __init__(self, stream: TextIO) -> None:
        self._lines: queue.Queue[Any] = queue.Queue(_WAITING)
        super().__init__(self._lines)
        self._stream = stream
        self._thread = threading.Thread(target=self._write, name="terminal", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the sentence for an event, if it has one."""
        told = format_log_event(record)
        if told is not None:
            at = time.strftime("%H:%M:%S", time.localtime(record.created))
            with contextlib.suppress(queue.Full):
                self._lines.put_nowait(f"{at} {one_line(told)}\n")

    def close(self) -> None:
        """Write the lines that wait, for at most half a second."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(_END)
        self._thread.join(_FLUSH_S)
        super().close()

    def _write(self) -> None:
        # A closed terminal must not stop the node.
        with contextlib.suppress(OSError, ValueError):
            while (line := self._lines.get()) is not _END:
                self._stream.write(line)
                self._stream.flush()


class OneLineFormatter(logging.Formatter):
    """A formatter whose output is always one line without terminal control characters."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - of the base class
        """Return the record's line."""
        return one_line(super().formatMessage(record))


def one_line(text: str) -> str:
    """Return the text with all unprintable characters escaped."""
    return harmless(text).replace("\n", "\\n").replace("\t", "\\t")


def format_log_event(record: logging.LogRecord) -> str | None:
    """Return a log record as a sentence; None if the terminal does not show it."""
    event = str(record.msg).partition(" ")[0]
    sentence = _TOLD.get(event)
    if sentence is None:
        return record.getMessage() if record.levelno >= logging.WARNING else None
    names = _FIELD.findall(str(record.msg))
    values = record.args if isinstance(record.args, tuple) else ()
    try:
        return sentence.format_map(dict(zip(names, values, strict=True)))
    except (KeyError, ValueError):  # its fields differ from the sentence's
        return record.getMessage()
