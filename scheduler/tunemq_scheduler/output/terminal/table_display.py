"""`TableDisplay`: a live table on a terminal; the script's output scrolls above it."""

from __future__ import annotations

import contextlib
import textwrap
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from tunemq_scheduler.output.terminal.display_base import Display
from tunemq_scheduler.output.terminal.formatting import (
    GAP,
    TableColumn,
    clean,
    clock,
    fit,
    parameters,
    resources,
    value,
)
from tunemq_scheduler.output.terminal.rows import (
    STATES,
    TableOptions,
    TrialRowView,
    choose,
    columns_of,
    row_of,
    sorted_by_metric,
)
from tunemq_scheduler.output.terminal.summary import SummarySection, sections

if TYPE_CHECKING:
    from tunemq_scheduler.output.terminal.display_view import SearchView
    from tunemq_scheduler.results.result import Result
    from tunemq_scheduler.results.trial_view import TrialView

#: The shortest time between two drawings; slow drawings are spaced to take 2 % of the time.
PERIOD_S: Final = 0.5
_SHARE: Final = 0.02
#: Lines of the screen besides rows: the header, the table's head, notes, and one for output.
_OTHER_LINES: Final = 10
_LEAST_ROWS: Final = 3
_NOTES: Final = 4
#: The most characters of a notice; a reason may be long.
_NOTICES: Final = 500

_STYLES: Final = {
    "RUNNING": "cyan",
    "PAUSED": "yellow",
    "PENDING": "bright_black",
    "ERROR": "red",
    "TERMINATED": "green",
}
#: The colour of a trial that waits for the store, in any state.
_WAITS: Final = "yellow"
_WORDS: Final = {
    "RUNNING": "running",
    "PAUSED": "paused",
    "PENDING": "pending",
    "ERROR": "failed",
    "TERMINATED": "done",
}


class TableDisplay(Display):
    """Draw the search as a table that stays in place.

    The cost of a drawing depends on its rows, not on the number of trials: the display remembers
    only the last few finished trials. rich draws within `update`, without a thread.
    """

    def __init__(
        self,
        options: TableOptions,
        *,
        stream: TextIO | None = None,
        period_s: float = PERIOD_S,
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._period_s = period_s
        self._console = console or Console(file=stream)
        self._now = now
        self._due = 0.0
        self._live: Live | None = None
        self._finished: deque[TrialRowView] = deque(maxlen=options.max_rows)

    def begin(self, view: SearchView) -> None:
        """Draw for the first time."""
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()
        # A killed script cannot restore the cursor, so it is never hidden.
        self._console.show_cursor(show=True)
        self.update(view)

    def trial_ended(self, trial: TrialView, reason: str) -> None:
        """Remember the trial for the next drawing."""
        del reason
        self._finished.appendleft(row_of(trial))

    def notices(self, text: str) -> None:
        """Print the notice above the table, where it stays."""
        with contextlib.suppress(OSError):
            self._console.print(Text(clean(text, _NOTICES), style="yellow"), soft_wrap=True)

    def update(self, view: SearchView) -> None:
        """Draw if a drawing is due."""
        now = self._now()
        if self._live is None or now < self._due:
            return
        try:
            self._live.update(self.frame(view), refresh=True)
        except OSError:
            self.close()  # the terminal is gone; the search continues
            return
        took = self._now() - now
        self._due = now + max(self._period_s, took / _SHARE)

    def end(self, view: SearchView, results: Sequence[Result]) -> None:
        """Replace the table with the summary."""
        self.close()
        try:
            for section in sections(view, results, self._options, self._console.width):
                self._print(section)
        except OSError:
            return  # the terminal is gone, and its readers

    def close(self) -> None:
        """Remove the table; the output above it stays."""
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(OSError):
                live.stop()

    def frame(self, view: SearchView) -> RenderableType:
        """Return the current drawing."""
        options = self._options
        metric, mode = options.metric or view.metric, options.mode or view.mode
        limit = max(_LEAST_ROWS, min(options.max_rows, self._console.height - _OTHER_LINES))
        rows = choose(view.live, self._finished, limit)
        if options.sort_by_metric:
            rows = sorted_by_metric(rows, metric, mode)
        parts: list[RenderableType] = [*self._header(view)]
        if rows:
            best = view.best[0] if view.best else None
            columns = fit(columns_of(rows, options, metric, best), self._console.width - 2)
            parts += [Text(), Padding(_drawn_table(columns), (0, 0, 0, 1))]
        hidden = sum(view.counts.values()) - len(rows)
        if rows and hidden > 0:
            parts.append(Text(f" ... {hidden} more not shown", style="bright_black"))
        parts += [
            Text(f" {line}", style="yellow", no_wrap=True, overflow="ellipsis")
            for line in _in_lines(view.notes, self._console.width - 2)
        ]
        return Group(*parts)

    def _print(self, section: SummarySection) -> None:
        style = "bold red" if section.is_error else "bold"
        self._console.print(Text(f"\n{section.title}", style=style), soft_wrap=True)
        if section.columns:
            self._console.print(Padding(_drawn_table(section.columns), (0, 0, 0, 2)))
        for line in section.lines:
            # Do not wrap: a path broken in two can be neither clicked nor copied.
            self._console.print(Text(f"  {line}"), soft_wrap=True)

    def _header(self, view: SearchView) -> list[RenderableType]:
        width = self._console.width
        title = Text(clean(view.name, max(10, width - 8)), style="bold")
        about = [clock(view.elapsed_s), resources(view.resources_used, view.resources_total)]
        lines: list[RenderableType] = [
            Rule(title, align="left", style="bright_black"),
            _one_line(_states(view), Text("   ".join(filter(None, about)), style="bright_black")),
        ]
        if view.best is not None:
            trial, found, config = view.best
            name = clean(self._options.metric or view.metric or "metric")
            told = Text.assemble(" best ", (f"{name} {value(found)}", "bold green"))
            told.append(f"  {clean(trial)}  {parameters(config)}", style="default")
            lines.append(_one_line(told))
        return lines


def _one_line(*texts: Text) -> Text:
    line = Text("   ").join(texts)
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _states(view: SearchView) -> Text:
    told = Text(" ")
    done = sum(view.counts.get(state, 0) for state in ("TERMINATED", "ERROR"))
    total = f"{done}/{view.num_trials}" if view.num_trials else str(done)
    told.append(f"{total} trials over", style="bold")
    for state in STATES:
        count = view.counts.get(state, 0)
        if count and state != "TERMINATED":
            told.append("  ").append(f"{count} {_WORDS[state]}", style=_STYLES[state])
    return told


def _in_lines(notes: Sequence[str], width: int) -> list[str]:
    """Return the notes in the available lines; the end of a note says why something waits."""
    lines = [line for note in notes for line in textwrap.wrap(clean(note, _NOTICES), width)]
    if len(lines) > _NOTES:
        lines[_NOTES - 1] += " ..."
    return lines[:_NOTES]


def _drawn_table(columns: Sequence[TableColumn]) -> Table:
    # Text, not str: users' names may look like markup.
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(
            Text(column.header, style="bold underline" if column.is_main else "bold"),
            justify="right" if column.right else "left",
            no_wrap=True,
        )
    for cells in zip(*(column.cells for column in columns), strict=True):
        drawn = []
        for column, cell in zip(columns, cells, strict=True):
            style = _STYLES.get(cell, _WAITS) if column.header == "status" else ""
            drawn.append(Text(cell, style="bold" if column.is_main else style))
        table.add_row(*drawn)
    return table
