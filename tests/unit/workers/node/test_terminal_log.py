"""The log lines on a worker's terminal."""

from __future__ import annotations

import io
import logging
import threading

from tunemq_workers.node import terminal_log as terminal_module
from tunemq_workers.node.terminal_log import OneLineFormatter, TerminalHandler, format_log_event


def record(text: str, *args: object, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("tunemq_workers", level, __file__, 1, text, args, None)


def test_events_for_users_are_logged_in_words():
    told = format_log_event(record("trial.started trial=%s attempt=%d pid=%d", "a_00001", 2, 77))
    assert told == "Trial a_00001 runs (attempt 2, process 77)."


def test_other_events_are_logged_if_they_are_warnings():
    assert format_log_event(record("consumer.started pid=%d", 7)) is None
    warned = record("consumer.died pid=%s", 7, level=logging.WARNING)
    assert format_log_event(warned) == "consumer.died pid=7"


def test_event_with_changed_fields_is_logged_as_it_is():
    assert format_log_event(record("trial.started trial=%s", "a")) == "trial.started trial=a"


def test_names_in_warnings_break_no_line_and_send_no_terminal_codes():
    stream = io.StringIO()
    terminal = TerminalHandler(stream)
    terminal.emit(record("cache.not_opened folder=%s", "a\x1b[31m\nb", level=logging.WARNING))
    terminal.close()
    assert stream.getvalue().endswith(" cache.not_opened folder=a\\x1b[31m\\nb\n")
    shown = OneLineFormatter("%(levelname)s %(message)s").format(
        record("cache.opened %s", "\x9b\n\r")
    )
    assert shown == "INFO cache.opened \\x9b\\n\\r"


def test_terminal_log_writes_timed_lines_until_it_is_closed(monkeypatch):
    monkeypatch.setattr(terminal_module, "_FLUSH_S", 60.0)  # for a busy machine
    stream = io.StringIO()
    terminal = TerminalHandler(stream)
    terminal.emit(record("node.ended"))
    terminal.close()
    at, _, said = stream.getvalue().partition(" ")
    assert len(at.split(":")) == 3
    assert said == "Ended.\n"


def test_terminal_that_is_closed_or_stuck_blocks_no_logging():
    class Stuck(io.StringIO):
        let_go = threading.Event()

        def write(self, text: str) -> int:
            self.let_go.wait(60)
            raise BrokenPipeError

    terminal = TerminalHandler(Stuck())
    for _ in range(2_000):  # more than the log keeps
        terminal.emit(record("node.ended"))
    terminal.close()
    Stuck.let_go.set()
    terminal._thread.join(60)
