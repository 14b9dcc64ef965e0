"""The whole state of an experiment in one canonical form."""

from __future__ import annotations

from tunemq_scheduler.core.runner_state import RunnerState
from tunemq_shared.messages import encode


def snapshot(runner: RunnerState) -> bytes:
    """Equal states give equal bytes.

    The elapsed time is left out: it is the clock's, and turns in which nothing happened move it on
    without a trace in the journal.
    """
    live = [
        (
            trial.trial_id,
            trial.summary(),
            list(trial.checkpoints),
            trial.run_until,
            trial.repeated,
            (trial.fruitless, trial.not_before),
            (trial.ending, trial.stop_ordered),
            (trial.pausing, trial.restoring, trial.waits),
        )
        for trial in runner.live.values()
    ]
    return encode(
        (
            live,
            list(runner.finished.items()),
            sorted(runner.counts.items()),
            [(node, runner.accepted.get(node)) for node in sorted(runner.nodes)],
            list(runner.slots),
            [trial.trial_id for trial in runner.queue],
            runner.book.state(),
            (runner.suggested, runner.exhausted, runner.stopping, runner.interrupted),
            (runner.stale, runner.repeated, runner.cursor),
        )
    )
