"""The status that a search reports, and what happens when it cannot be sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.support.searches.plans import PLAN
from tunemq_scheduler.api.farm_answer_types import ExperimentDetail
from tunemq_scheduler.core.trials.trial import PAUSED, PENDING
from tunemq_scheduler.farm.ipc import ipc_messages as r
from tunemq_scheduler.farm.ipc import status_reporter
from tunemq_scheduler.farm.ipc.status_reporter import SearchStatusReporter


class Repr:
    def __repr__(self) -> str:
        raise LookupError("the user's")


class Search:
    """A search without trials."""

    def __init__(self) -> None:
        self.live: dict[str, Any] = {}
        self.giving_way: dict[str, float] = {}
        self.runner = SimpleNamespace(
            live=self.live,
            finished=[],
            interrupted="",
            giving_way=self.giving_way,
            exhausted=False,
            stopping="",
        )
        algorithms = SimpleNamespace(search_name="BasicVariantGenerator")
        loop = SimpleNamespace(runner=self.runner, plan=PLAN, trials={}, algorithms=algorithms)
        self.view = SimpleNamespace(
            counts={},
            num_trials=None,
            elapsed_s=0.0,
            metric="loss",
            mode="min",
            best=None,
            resources_used={},
            notes=[],
            unreturned="",
            store="",
            outcome="finished",
        )
        search: Any = SimpleNamespace(loop=loop, is_killed=False)
        view: Any = self.view
        self.status_reporter = SearchStatusReporter(search, view)

    def show(self) -> r.IpcReply:
        return self.status_reporter.answer(r.IpcRequest(7, r.ShowTrials(2**40)))


@pytest.fixture
def search() -> Search:
    return Search()


def test_answer_is_sent(search):
    answered = search.show()
    assert answered.rejection is None
    detail = msgspec.msgpack.decode(answered.answer, type=ExperimentDetail)
    assert detail.experiment.name == "x"
    assert (
        msgspec.msgpack.decode(search.status_reporter.search_ended().detail, type=ExperimentDetail)
        == detail
    )


@pytest.mark.parametrize("note", ["\udc80", "x" * 2**24])
def test_answer_that_cannot_be_sent_is_rejected(search, note):
    search.view.notes = [note]
    answered = search.show()
    assert answered.rejection is not None
    assert "sent" in answered.rejection.text
    assert not answered.rejection.is_wrong_use
    assert r.encode(answered)
    assert search.status_reporter.search_ended() == r.SearchEnded(
        "finished", is_interrupted=False, detail=b""
    )


@pytest.mark.parametrize("value", [2**64, "\udc80", "x" * 2**20])
def test_configuration_that_cannot_be_sent_is_left_out(value):
    assert status_reporter._told_config({"value": value}) == {}


def test_value_of_a_configuration_without_a_repr_is_shown_by_its_type():
    told = status_reporter._told_config({"value": Repr()})
    assert told["value"].endswith("Repr without a text>")


def test_end_of_the_search_algorithm_is_reported_until_the_search_is_stopped(search):
    assert search.status_reporter.status().waits == ()
    search.runner.exhausted = True
    assert search.status_reporter.status().waits == (
        "its search algorithm (BasicVariantGenerator) has no more configurations",
    )
    search.runner.stopping = "the time budget is used up"
    assert search.status_reporter.status().waits == ()


def waiting(not_before: float, status: str = PENDING) -> SimpleNamespace:
    """Return a trial that is retried at this time."""
    return SimpleNamespace(status=status, not_before=not_before)


@pytest.mark.parametrize(
    ("due", "line"),
    [
        ([27.0], "1 trial failed and is tried again in 27 s"),
        ([5.0, 40.0, 9.0], "3 trials failed and are tried again in 5 to 40 s"),
        ([5.0, 5.2], "2 trials failed and are tried again in 5 s"),
    ],
)
def test_status_names_pauses_after_failures(search, due, line):
    search.view.elapsed_s = 100.0
    trials = [*map(waiting, (100.0 + left for left in due)), waiting(99.0), waiting(200.0, PAUSED)]
    search.live.update(enumerate(trials))
    assert search.status_reporter.status().waits == (line,)


def test_status_names_trials_that_have_to_give_back_their_slots(search):
    search.view.elapsed_s = 100.0
    search.giving_way["a"] = 130.0
    (one,) = search.status_reporter.status().waits
    assert one == (
        "trial a has to save and give back its slot; it is stopped in 30 s where it has not"
        " saved, and continues later from its last checkpoint"
    )
    search.giving_way.update(dict.fromkeys("bcdefg", 112.0))
    (many,) = search.status_reporter.status().waits
    assert many == (
        "trials a, b, c, d, e and 2 more have to save and give back their slots; they are"
        " stopped in 12 to 30 s where they have not saved, and continue later from their last"
        " checkpoints"
    )
