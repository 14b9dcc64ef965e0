"""Lets a trial continue from the state of another one, its *source*, by reference to a checkpoint.

The trial gives up its own state and begins a new lineage. Which state it inherits follows from the
results that the source had reported when the trial scheduler decided: the newest that announced a
checkpoint, so that neither the speed of uploads nor failures change it. The trial waits, without a
slot, until that checkpoint is in the store. Attempts of the source may write it again; if it is
lost for good, an older one is taken, and without any the trial keeps its own state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from tunemq_scheduler.core.commands import StateTaken, StopTrial, WarnStateLost
from tunemq_scheduler.core.nodes.away_nodes import AWAY_UPLOADS_S
from tunemq_scheduler.core.runner_state import RunnerState
from tunemq_scheduler.core.trial_actions import TrialActions
from tunemq_scheduler.core.trials.trial import (
    NO_WAIT,
    PAUSED,
    PENDING,
    RUNNING,
    STATE,
    InheritedState,
    Trial,
    TrialSummary,
)
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.result_conditions import next_result


def exploit(
    runner: TrialActions, trial: Trial, event: m.ActionTaken, answers: Sequence[m.AlgorithmAnswer]
) -> None:
    """Let a trial continue from the state of ``event.source``; ``answers`` may set its horizon."""
    begun = state_of_source(runner, event)
    if event.reason:  # otherwise it begins again from what it had inherited
        runner.decided(trial, m.EXPLOIT, event.reason, event.source)
    runner.leave_inherited(trial)
    if trial.status == RUNNING:
        runner.commands.append(StopTrial(*runner.where(trial)))
    left, left_from = trial.attempt, trial.first_attempt
    trial.leave_config()
    trial.lineage += 1
    trial.attempt = max(trial.attempt, runner.attempts_from) + 1
    trial.inherited = replace(
        begun,
        attempt=trial.attempt,
        left=left,
        left_from=left_from,
        last_step=trial.last_step,
    )
    trial.saved_step = 0
    trial.repeated_result = None
    if event.config:
        trial.config = event.config
    trial.run_until = next_result(begun.step)
    for answer in answers:
        if isinstance(answer, m.HorizonSet):
            trial.run_until = answer.horizon
    runner.awaited.setdefault(event.source, {})[trial.trial_id] = None
    if trial.status == RUNNING:
        runner.set_aside(trial)
    else:
        runner.queue.follow(trial)
    trial.waits = (STATE, f"trial {event.source}")
    _review(runner, trial)
    review_awaited(runner, trial.trial_id)  # it has left the state that others wait for


def await_again(runner: TrialActions, trial: Trial) -> None:
    """Let a trial that ended while it waited for another state wait for that once more."""
    state = trial.inherited
    if state is not None:
        trial.inherited = replace(state, is_awaited=True)
        trial.waits = (STATE, f"trial {state.source}")
        runner.awaited.setdefault(state.source, {})[trial.trial_id] = None
        runner.queue.follow(trial)
        _review(runner, trial)


def state_of_source(runner: RunnerState, event: m.ActionTaken) -> InheritedState:
    """Return the state that an EXPLOIT is about, before it is handled.

    Its step is 0 if the source has no state: it announced no checkpoint, and has none.

    Raises:
        KeyError: there is no such trial, or it does not keep the checkpoint that is named.
    """
    summary, source = runner.summary(event.source), runner.live.get(event.source)
    inherited = summary.inherited
    first = 0 if inherited is None else inherited.attempt + 1
    spent = summary.last_result.time_total_s if summary.last_result is not None else 0.0
    state = InheritedState(
        source=event.source,
        lineage=summary.lineage,
        first_attempt=first,
        step=0,
        announced=0,
        time_total_s=spent,
        attempt=0,
        left=0,
        left_from=0,
        last_step=0,
        key=event.checkpoint,
        is_awaited=True,
    )
    if event.checkpoint:
        steps = {one.key: one.step for one in summary.checkpoints}
        if inherited is not None and (begin := inherited.checkpoint) is not None:
            steps[begin.key] = begin.step
        return replace(state, step=steps[event.checkpoint], first_attempt=0)
    steps_of = [one.step for one in summary.checkpoints if one.attempt >= first]
    if source is not None:
        steps_of += [source.saved_step, source.inherited.step if source.inherited else 0]
    announced = step = max(steps_of, default=0)
    if source is not None and (source.pausing or source.status == PAUSED):
        step = max(step, source.last_step)  # a pause saves the last step if it can
    return replace(state, step=step, announced=announced)


def review_awaited(runner: TrialActions, source: str | None) -> None:
    """Start the trials that wait for a checkpoint of this trial, or of any, if they have it."""
    # In an order that does not depend on the past, which a snapshot does not have.
    sources = sorted(runner.awaited) if source is None else [source]
    if source is not None and source in runner.live:  # the process that it left may be gone
        _review(runner, runner.live[source])
    while sources:
        for trial in sorted(runner.awaited.get(sources.pop(), ())):
            _review(runner, runner.live[trial])
            if not runner.live[trial].awaits_state:
                sources.append(trial)  # others may wait for the state that it has now


def _review(runner: TrialActions, trial: Trial) -> None:
    """Let a trial continue if the state for which it waits is there, or cannot come any more."""
    state = trial.inherited
    if state is None or not state.is_awaited:
        return
    # Its next attempt would take the place of this one in the node's orders.
    is_held_up = runner.slots.node_at(trial.trial_id, state.left) is not None
    if state.checkpoint is None:
        _choose(runner, trial, state, is_held_up=is_held_up)
    may_begin = not is_held_up and trial.awaits_state and trial.inherited_key
    if may_begin:
        _stop_waiting(runner, trial)
    if may_begin or (state.checkpoint is None and trial.inherited_key):
        runner.commands.append(StateTaken(trial.trial_id))


def _choose(runner: TrialActions, trial: Trial, state: InheritedState, *, is_held_up: bool) -> None:
    """Keep the checkpoint from which a trial is to continue, once it is known and committed."""
    found = [one for one in _candidates(runner, state) if one.step <= state.step]
    chosen = next((one for one in found if one.key == state.key), None)
    if chosen is None:
        chosen = max(found, key=lambda one: one.step, default=None)
        if (chosen is None or chosen.step < state.step) and _may_come(runner, state):
            return
    if chosen is None:
        if not is_held_up:
            keep_own(runner, trial)
    elif chosen.sha256:
        if chosen.step < state.announced:
            runner.commands.append(WarnStateLost(trial.trial_id, state.source, chosen.step))
        # From now on, because limits of the source's checkpoints could delete it.
        runner.book.hold(chosen.key)
        trial.inherited = replace(state, step=chosen.step, checkpoint=chosen)
    elif chosen.key != state.key:
        trial.inherited = replace(state, key=chosen.key)


def _candidates(runner: RunnerState, state: InheritedState) -> Iterator[m.CheckpointRef]:
    """Yield the checkpoints of a source's lineage, newest first; without hash if uploading."""
    source = runner.live.get(state.source)
    about: Trial | TrialSummary = runner.summary(state.source) if source is None else source
    inherited = about.inherited
    last = about.attempt if about.lineage == state.lineage else -1
    if last < 0 and inherited is not None and about.lineage == state.lineage + 1:
        last = inherited.attempt
    if source is None:
        for kept in reversed(runner.summary(state.source).checkpoints):
            if state.first_attempt <= kept.attempt <= last:
                yield m.CheckpointRef(kept.key, kept.sha256, kept.step)
    for one in source.checkpoints.since(state.first_attempt) if source is not None else ():
        is_usable = one.is_wanted and not one.is_damaged
        if one.attempt <= last and is_usable and (one.committed or _may_upload(runner, one.node)):
            sha256 = "" if one.committed is None else one.committed.sha256
            yield m.CheckpointRef(one.key, sha256, one.step)
    is_begin = inherited is not None and about.lineage == state.lineage
    if is_begin and inherited is not None and inherited.checkpoint is not None:
        yield inherited.checkpoint


def _may_come(runner: RunnerState, state: InheritedState) -> bool:
    """Whether the source may still write the checkpoint of the wanted step."""
    source = runner.live.get(state.source)
    if source is None or source.is_finished:
        return False
    if source.lineage != state.lineage:  # the process that it left may be saving its last step
        left = 0 if source.inherited is None else source.inherited.left
        is_next = source.lineage == state.lineage + 1
        return is_next and runner.slots.node_at(state.source, left) is not None
    if source.status == PAUSED:  # its node may be silent while it saves
        nodes = runner.left_behind.get(state.source, {})
        return any(node in runner.away and _may_upload(runner, node) for node in nodes)
    if source.status == PENDING:
        return True
    newest = source.repeated_result or source.newest
    return (
        bool(source.pausing)
        or newest is None
        or newest.attempt != source.attempt
        or newest.step <= state.step
    )


def _may_upload(runner: RunnerState, node: str) -> bool:
    """Whether a node is there, or has been away only for a short time."""
    away = runner.away.get(node)
    return node in runner.nodes or (
        away is not None and runner.elapsed < away.since + AWAY_UPLOADS_S
    )


def keep_own(runner: TrialActions, trial: Trial) -> None:
    """Let a trial continue from its own state, because the inherited one is lost.

    If its own checkpoints are lost, too, it begins again from nothing.
    """
    state, own = trial.inherited, trial.trial_id
    if state is None:
        return
    runner.leave_inherited(trial)
    kept = [one for one in trial.checkpoints if one.is_wanted]
    is_there = any(state.left_from <= one.attempt <= state.left for one in kept)
    first = state.left_from if is_there else 0
    if (state.source, state.first_attempt, state.is_awaited) == (own, first, True):
        runner.commands.append(WarnStateLost(own, own, 0))
        trial.inherited = replace(state, step=0, checkpoint=None, is_awaited=False, key="")
        trial.run_until = next_result(0)
        _stop_waiting(runner, trial)
        return
    if state.source != own:
        source = runner.live.get(state.source)
        has_none = state.is_awaited and source is not None and source.saves_nothing
        runner.commands.append(WarnStateLost(own, state.source, 0, has_none=has_none))
    spent = trial.last_result.time_total_s if trial.last_result is not None else 0.0
    trial.inherited = replace(
        state,
        source=own,
        lineage=trial.lineage - 1,
        first_attempt=first,
        step=state.last_step if is_there else max((one.step for one in kept), default=0),
        announced=0,
        time_total_s=spent,
        checkpoint=None,
        key="",
        is_awaited=True,
    )
    runner.awaited.setdefault(own, {})[own] = None
    if trial.status != RUNNING:
        runner.queue.follow(trial)
    _review(runner, trial)


def _stop_waiting(runner: TrialActions, trial: Trial) -> None:
    runner.stop_awaiting(trial)
    trial.waits = NO_WAIT
    if not trial.is_finished:
        runner.queue.follow(trial)
