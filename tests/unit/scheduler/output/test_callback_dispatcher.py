"""Which callbacks receive a search's notifications, and how their errors are handled."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.searches.plans import PLAN
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.trials.trial import TrialSummary
from tunemq_scheduler.output.callback_dispatcher import CallbackDispatcher
from tunemq_scheduler.output.loggers import LoggerCallback
from tunemq_scheduler.output.terminal.display_base import Display
from tunemq_scheduler.results.callback import Callback
from tunemq_scheduler.results.trial_view import TrialView
from tunemq_shared.base.errors import SearchFailed
from tunemq_shared.code.config_packing import pack_config
from tunemq_shared.protocol import messages as m


def dispatcher(*callbacks: Callback) -> CallbackDispatcher:
    return CallbackDispatcher(callbacks, Display(), None, None)


def reported(told: CallbackDispatcher, loss: Any = 1.0) -> None:
    view = TrialView("t", TrialSummary(0, pack_config({}), "", {"cpu": 1.0}), PLAN)
    view.started(m.TrialStarted("t", 1, 1, "host", "127.0.0.1", 0.0))
    result = m.ResultReported("t", 1, 1, {"loss": loss}, 0.0, 1.0, 1.0, 1.0, 1)
    told.notify(c.NotifyResult("t", result, done=False), view)


@pytest.mark.parametrize("loss", [True, 1 - 2**64])
def test_best_value_is_a_number_that_messages_can_hold(loss: Any) -> None:
    told = CallbackDispatcher((), Display(), "loss", "max")
    reported(told, loss)
    assert told.best is not None
    assert type(told.best[1]) is float


@pytest.mark.parity(57)
def test_callbacks_get_the_number_of_each_turn_at_its_start_and_end() -> None:
    told: list[tuple[str, int]] = []

    class Turns(Callback):
        def on_step_begin(self, iteration: int, trials: Any, **info: Any) -> None:
            told.append(("begin", iteration))

        def on_step_end(self, iteration: int, trials: Any, **info: Any) -> None:
            told.append(("end", iteration))

    search = dispatcher(Turns())
    for _ in range(2):
        search.turn_began()
        search.turn_ended()
    assert told == [("begin", 0), ("end", 0), ("begin", 1), ("end", 1)]


@pytest.mark.parity(132)
def test_callbacks_see_the_trials_at_the_start_and_end_of_a_turn() -> None:
    seen: list[list[str]] = []

    class Looks(Callback):
        def on_step_begin(self, iteration: int, trials: Any, **info: Any) -> None:
            seen.append(list(trials))

        def on_step_end(self, iteration: int, trials: Any, **info: Any) -> None:
            seen.append(list(trials))

    search = dispatcher(Looks())
    for trials in ([], ["a", "b"]):
        search.trials = lambda now=trials: now
        search.turn_began()
        search.turn_ended()
    assert seen == [[], [], ["a", "b"], ["a", "b"]]


@pytest.mark.parametrize("hook", ["on_trial_result", "log_trial_result"])
def test_logger_gets_results_by_either_hook(hook: str) -> None:
    losses: list[float] = []

    class Logs(LoggerCallback):
        pass

    setattr(Logs, hook, lambda self, *args, **info: losses.append(args[-1]["loss"]))
    reported(dispatcher(Logs()))
    assert losses == [1.0]


def test_callback_that_raises_ends_the_search_with_its_name() -> None:
    class Broken(Callback):
        def on_trial_result(self, *args: Any, **info: Any) -> None:
            raise ZeroDivisionError("in mine")

    with pytest.raises(SearchFailed, match=r"Broken\.on_trial_result raised ZeroDivisionError"):
        reported(dispatcher(Broken()))
