"""Chooses the display of a search; supports user-defined reporters with Ray Tune's interface."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TextIO

from tunemq_scheduler.output.terminal.display_base import Display, TerminalOutput
from tunemq_scheduler.output.terminal.formatting import duration, fit, resources, text_table
from tunemq_scheduler.output.terminal.line_display import STATUS_PERIOD_S, LineDisplay
from tunemq_scheduler.output.terminal.rows import (
    TableOptions,
    choose,
    columns_of,
    sorted_by_metric,
)
from tunemq_scheduler.output.terminal.summary import plain, sections
from tunemq_shared.base.errors import ConfigError

if TYPE_CHECKING:
    from tunemq_scheduler.output.terminal.display_view import SearchView
    from tunemq_scheduler.results.result import Result
    from tunemq_scheduler.results.trial_view import TrialView

_WIDTH: Final = 120


class ProgressReporter:
    """Base class of user-defined reporters for `RunConfig(progress_reporter=...)`.

    ``trials`` includes finished trials, so a search with such a reporter keeps all of them in
    memory.
    """

    def setup(
        self,
        start_time: float | None = None,
        total_samples: int | None = None,
        metric: str | None = None,
        mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Called before the first report, with the search's start (Unix time) and properties."""

    def should_report(self, trials: Sequence[TrialView], done: bool = False) -> bool:
        """Return whether to report after this turn; ``done`` if the search has ended."""
        del trials, done
        return True

    def report(self, trials: Sequence[TrialView], done: bool, *sys_info: str) -> None:
        """Show the trials; ``sys_info`` contains lines about the whole search."""
        raise NotImplementedError


class CLIReporter(ProgressReporter):
    """The default table, with chosen columns.

    A subclass that overrides `should_report` or `report` prints plain tables one below the other,
    when `should_report` returns True.

    Args:
        metric_columns: the result keys to show, or a dict from keys to headers. Default: the
            optimised metric and the first few others.
        parameter_columns: the configuration keys (nested ones as ``outer/inner``), likewise.
        max_progress_rows: the most trials to show.
        max_column_length: the widest cell, in terminal columns.
        max_report_frequency: seconds between two tables, or between status lines without a
            terminal; None for half a second and 30 seconds.
        infer_limit: how many metrics to show by default.
        metric, mode: define the best trial. Default: the search's metric and mode.
        sort_by_metric: show the best trials first.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self,
        *,
        metric_columns: Sequence[str] | Mapping[str, str] | None = None,
        parameter_columns: Sequence[str] | Mapping[str, str] | None = None,
        max_progress_rows: int = 20,
        max_column_length: int = 20,
        max_report_frequency: float | None = None,
        infer_limit: int = 3,
        metric: str | None = None,
        mode: str | None = None,
        sort_by_metric: bool = False,
    ) -> None:
        if max_progress_rows < 1:
            raise ConfigError(
                f"CLIReporter(max_progress_rows={max_progress_rows}) is invalid: give 1 or more."
            )
        if mode not in {None, "min", "max"}:
            raise ConfigError(f"CLIReporter(mode={mode!r}) is invalid: give 'min' or 'max'.")
        self.options = TableOptions(
            metric_columns=_names(metric_columns),
            parameter_columns=_names(parameter_columns),
            max_rows=max_progress_rows,
            max_width=max_column_length,
            infer_limit=infer_limit,
            metric=metric,
            mode=mode,
            sort_by_metric=sort_by_metric,
        )
        self.period_s = max_report_frequency
        self._last_report = -float("inf")

    def add_metric_column(self, metric: str, representation: str | None = None) -> None:
        """Show another metric, with the header ``representation``."""
        columns = self.options.metric_columns or {}
        self.options.metric_columns = {**columns, metric: representation or metric}

    def add_parameter_column(self, parameter: str, representation: str | None = None) -> None:
        """Show another parameter, with the header ``representation``."""
        columns = self.options.parameter_columns or {}
        self.options.parameter_columns = {**columns, parameter: representation or parameter}

    def setup(
        self,
        start_time: float | None = None,
        total_samples: int | None = None,
        metric: str | None = None,
        mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Use the search's metric and mode, unless others were chosen."""
        del start_time, total_samples, kwargs
        self.options.metric = self.options.metric or metric
        self.options.mode = self.options.mode or mode

    def should_report(self, trials: Sequence[TrialView], done: bool = False) -> bool:
        """Return True every ``max_report_frequency`` seconds, and at the end."""
        del trials
        now = time.monotonic()
        if not done and now < self._last_report + (self.period_s or 5.0):
            return False
        self._last_report = now
        return True

    def report(self, trials: Sequence[TrialView], done: bool, *sys_info: str) -> None:
        """Write a plain table to stdout."""
        options = self.options
        rows = choose(trials, (), options.max_rows, most=len(trials))
        if options.sort_by_metric:
            rows = sorted_by_metric(rows, options.metric, options.mode)
        table = text_table(fit(columns_of(rows, options, options.metric), _WIDTH)) if rows else []
        hidden = len(trials) - len(rows)
        more = [f"... {hidden} more not shown"] if hidden > 0 else []
        title = "== Result ==" if done else "== Status =="
        TerminalOutput(sys.stdout).write(title, *sys_info, *table, *more, "")


class _UserReporter(Display):
    """Call a user-defined reporter at the end of every turn."""

    def __init__(self, reporter: ProgressReporter, output: TerminalOutput) -> None:
        self._reporter = reporter
        self._output = output
        self._ended: list[TrialView] = []
        self._notices: list[str] = []

    def begin(self, view: SearchView) -> None:
        self._reporter.setup(
            start_time=time.time() - view.elapsed_s,
            total_samples=view.num_trials,
            metric=view.metric,
            mode=view.mode,
        )

    def trial_ended(self, trial: TrialView, reason: str) -> None:
        del reason
        self._ended.append(trial)

    def notices(self, text: str) -> None:
        self._notices.append(text)

    def update(self, view: SearchView) -> None:
        self._ask(view, done=False)

    def end(self, view: SearchView, results: Sequence[Result]) -> None:
        self._ask(view, done=True)
        self._output.write(*plain(sections(view, results, TableOptions(), _WIDTH)))

    def _ask(self, view: SearchView, *, done: bool) -> None:
        trials = [*view.live, *self._ended]
        if self._reporter.should_report(trials, done=done):
            used = resources(view.resources_used, view.resources_total)
            about = f"{view.name}: {duration(view.elapsed_s)}, {used}"
            self._reporter.report(trials, done, about, *view.notes, *self._notices)
            self._notices.clear()


def display_for(
    reporter: ProgressReporter | None = None, *, verbose: int = 1, stream: TextIO | None = None
) -> Display:
    """Return the display of a search.

    Args:
        reporter: the user's reporter: its options, or the reporter itself if it overrides methods.
        verbose: 0 shows nothing; 1 a live table, or lines if ``stream`` is not a terminal; from 2
            on lines, with every result.
        stream: the output. Default: stdout, if it exists.
    """
    stream = stream or sys.stdout
    if verbose <= 0:
        return Display()
    if reporter is not None and type(reporter) is not CLIReporter:
        return _UserReporter(reporter, TerminalOutput(stream))
    if stream is None:
        return Display()
    shown = reporter or CLIReporter()
    if verbose == 1 and _is_terminal(stream):
        # Import rich, which takes 40 ms, only for a table.
        from tunemq_scheduler.output.terminal.table_display import PERIOD_S, TableDisplay

        period_s = max(PERIOD_S, shown.period_s or 0.0)
        return TableDisplay(shown.options, stream=stream, period_s=period_s)
    return LineDisplay(
        TerminalOutput(stream),
        shown.options,
        show_results=verbose > 1,
        status_period_s=shown.period_s or STATUS_PERIOD_S,
    )


def _is_terminal(stream: TextIO) -> bool:
    """Return whether a stream can show a table in place, with its characters."""
    try:
        can_draw = stream.isatty() and stream.encoding.lower().startswith("utf")
        return can_draw and os.environ.get("TERM", "") not in {"", "dumb", "unknown"}
    except (AttributeError, ValueError):  # replaced by another object, or closed
        return False


def _names(columns: Sequence[str] | Mapping[str, str] | None) -> dict[str, str] | None:
    if columns is None:
        return None
    if isinstance(columns, str):
        raise ConfigError(f"CLIReporter needs a list of column names, not {columns!r}.")
    if isinstance(columns, Mapping):
        return dict(columns)
    return {name: name for name in columns}
