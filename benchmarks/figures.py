"""Measured values, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any


@dataclass
class Row:
    """One quantity.

    Attributes:
        what: its description in a few words.
        unit: of all values.
        goal: the budget of the design, in ``unit``; None for no budget.
        more_is_better: true for a rate.
        values: the runs' values by peer: ``tunemq``, ``ray``, ``floor``.
    """

    what: str
    unit: str
    goal: float | None = None
    more_is_better: bool = False
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, who: str, value: float) -> None:
        """Note one run's value."""
        self.values.setdefault(who, []).append(value)

    def median(self, who: str) -> float | None:
        """The middle one of the runs; None where nothing was measured."""
        values = self.values.get(who)
        return median(values) if values else None

    def best(self, who: str) -> float | None:
        """The best of the runs."""
        values = self.values.get(who)
        return (max if self.more_is_better else min)(values) if values else None

    @property
    def times_better(self) -> float | None:
        """How many times better our median is than Ray Tune's."""
        ours, theirs = self.median("tunemq"), self.median("ray")
        if not ours or not theirs:
            return None
        return ours / theirs if self.more_is_better else theirs / ours

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        medians = {who: self.median(who) for who in self.values}
        return asdict(self) | {"medians": medians, "times_better": self.times_better}


_HEADINGS = ("what", "unit", "TuneMQ", "best", "goal", "Ray Tune", "times better", "floor")


def table(rows: Sequence[Row]) -> str:
    """The rows in aligned columns; a value is the median of its runs."""
    cells = [_HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADINGS))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def _cells(row: Row) -> tuple[str, ...]:
    goal = "" if row.goal is None else f"{'>=' if row.more_is_better else '<='} {row.goal:,g}"
    return (
        row.what,
        row.unit,
        _shown(row.median("tunemq")),
        _shown(row.best("tunemq")),
        goal,
        _shown(row.median("ray")),
        _shown(row.times_better),
        _shown(row.median("floor")),
    )


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"
