"""The rows of ``result.json``: results, and beside them the decisions about their trial."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.trial_decisions import TrialDecision
from tunemq_shared.protocol.message_limits import is_possible
from tunemq_shared.trial.results import DONE

if TYPE_CHECKING:
    from tunemq_scheduler.results.trial_view import TrialView

#: The key of the decisions since the row before; rows without any lack it.
DECISIONS: Final = "decisions"

_DEFAULTS: Final = msgspec.structs.asdict(TrialDecision(0, ""))


def result_row(trial: TrialView, command: c.NotifyResult) -> dict[str, Any]:
    """Return a result as loggers and callbacks get it, whether it is the last, and decisions.

    A metric of the name of `DECISIONS` that the trainable reported stays.
    """
    result = trial.full_result(command.result)
    more: dict[str, Any] = {}
    if command.done and not command.result.done:
        more[DONE] = True
    if command.decisions and DECISIONS not in result:
        more[DECISIONS] = [_as_row(one) for one in command.decisions]
    return {**result, **more} if more else result


def without_decisions(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result without its decisions, for tables."""
    if not isinstance(result.get(DECISIONS), list):
        return result
    return {key: value for key, value in result.items() if key != DECISIONS}


def decisions_in(rows: Iterable[Mapping[str, Any]]) -> Iterator[TrialDecision]:
    """Yield the decisions in rows, and leave out all else: trials can change the file."""
    for row in rows:
        found = row.get(DECISIONS)
        for one in found if isinstance(found, list) else ():
            if isinstance(one, Mapping) and one.keys() >= {"step", "action"}:
                values = [one.get(name, default) for name, default in _DEFAULTS.items()]
                try:
                    decision = msgspec.convert(values, TrialDecision)
                except msgspec.ValidationError:
                    continue
                if is_possible(decision.step) and is_possible(decision.lineage):
                    yield decision


def _as_row(decision: TrialDecision) -> dict[str, Any]:
    fields = msgspec.structs.asdict(decision)
    return {name: value for name, value in fields.items() if value or name == "step"}
