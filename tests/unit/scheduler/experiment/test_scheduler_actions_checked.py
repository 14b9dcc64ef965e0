"""What a trial scheduler answers is checked before it is journalled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.unit.scheduler.scripted_loop import NODE, Loop, result, started
from tunemq_scheduler.schedulers import Exploit, SetConfig, SetResources, Stop, TrialScheduler
from tunemq_shared.base.errors import TuneError
from tunemq_shared.code.config_packing import unpack_config
from tunemq_shared.protocol import messages as m


class Answers(TrialScheduler):
    """Answers once, to the first result."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self.answer: Callable[[Any], Any] | None = answer

    def on_trial_result(self, runner: Any, trial: Any, result: dict[str, Any]) -> Any:
        answer, self.answer = self.answer, None
        return self.CONTINUE if answer is None else answer(trial)


def asked(answer: Callable[[Any], Any]) -> Loop:
    loop = Loop(scheduler=Answers(answer))
    loop.runner.settings = msgspec.structs.replace(loop.runner.settings, nodes_may_come=False)
    loop.turn(msgspec.structs.replace(NODE, resources={"cpu": 2.0}))
    loop.batch(1, started(), result(1))
    return loop


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("lr 0.1 to 0.2", "lr 0.1 to 0.2"),
        ("", "Answers decided it"),
        (None, "Answers decided it"),
        (3, "3"),
        ("caf\udce9", "caf\\udce9"),
        ("x" * 501, "x" * 499 + "…"),
    ],
    ids=["text", "empty", "none", "number", "surrogate", "long"],
)
@pytest.mark.parametrize("is_decision", [False, True])
def test_reason_is_journalled_as_a_text_of_bounded_length(
    reason: Any, told: str, is_decision: bool
) -> None:
    def answer(trial: Any) -> Any:
        stop = TrialScheduler.STOP.because(reason)
        return stop if is_decision else Stop("t_00001", reason)

    loop = asked(answer)
    records = m.decode_records(m.encode(list(loop.journal.journal_records)))
    found = [one.event for one in records] + [two for one in records for two in one.answers]
    (reasons,) = [one.reason for one in found if isinstance(one, m.DecisionMade | m.ActionTaken)]
    assert reasons == told.replace("decided it", "stopped it" if is_decision else "decided it")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda one: Stop("t_00009"), "this search has no trial 't_00009'"),
        (lambda one: Exploit(one, source="t_00009"), "this search has no trial 't_00009'"),
        (lambda one: Exploit(one, source="t_00001"), "trial t_00001 has saved no checkpoint"),
        (lambda one: Exploit(one, source=one, checkpoint="k"), "no checkpoint 'k' any more"),
        (lambda one: Exploit(one, source="t_00001", config=3), "config=3.*give the whole dict"),
        (lambda one: SetConfig(one, config=[1]), r"config=\[1\].*give the whole dict"),
        (lambda one: SetConfig(one, config={"x": "y" * 2**21}), "its configuration has"),
        (lambda one: SetResources(one, resources={"cpu": "two"}), "cpu='two' is not"),
        (lambda one: SetResources(one, resources={"cpu": float("nan")}), "nan"),
        (
            lambda one: SetResources(one, resources={"cpu": 3}),
            "answered SET_RESOURCES for trial 't_00000'.*cpu",
        ),
    ],
)
def test_answer_that_the_search_cannot_follow_ends_it_with_the_reason(
    answer: Callable[[Any], Any], told: str
) -> None:
    with pytest.raises(TuneError, match=told):
        asked(answer)


def test_configuration_that_a_scheduler_sets_is_that_of_the_next_results() -> None:
    loop = asked(lambda one: SetConfig(one, config={"x": 2}))
    assert loop.loop.trials["t_00000"].config == {"x": 2}
    assert unpack_config(loop.runner.live["t_00000"].config) == {"x": 2}
    assert ("pause", "t_00000") in loop.log
    action = next(
        one.event for one in loop.journal.journal_records if type(one.event) is m.ActionTaken
    )
    assert action.reason == "Answers decided it"
