"""The state of an experiment in a form in which equal states are equal bytes."""

from __future__ import annotations

from typing import Any

import msgspec

from tunemq_scheduler.core.runner_snapshot import dump
from tunemq_scheduler.core.trial_runner import TrialRunner


def comparable(runner: TrialRunner) -> bytes:
    """Return a runner's state, and the summaries of its finished trials.

    The elapsed time is left out: it follows the clock, and turns without events advance it without
    a trace in the journal. So are trials' recent events, which only error messages show, and how
    long lines were passed over, apart from the number of freed slots.
    """
    state: dict[str, Any] = msgspec.msgpack.decode(dump(runner))
    del state["elapsed"]
    for trial in state["live"]:
        del trial["story"]
    del state["passed_over"][1:]
    for in_any_order in (state["book"][3][1], state["slots"][0][2]):
        in_any_order.sort()
    return msgspec.msgpack.encode((state, runner.finished), order="sorted")
