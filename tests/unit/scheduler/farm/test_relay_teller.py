"""What a search tells of itself where that cannot be sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.plans import PLAN
from tunemq_scheduler.farm.relay import messages as r
from tunemq_scheduler.farm.relay.teller import Teller
from tunemq_shared.answers import ExperimentDetail


class Repr:
    def __repr__(self) -> str:
        raise LookupError("the user's")


class Search:
    """A search of which no trial is known."""

    def __init__(self) -> None:
        runner = SimpleNamespace(live={}, finished=[], interrupted="")
        loop = SimpleNamespace(runner=runner, plan=PLAN, trials={})
        self.view = SimpleNamespace(
            counts={},
            num_trials=None,
            elapsed_s=0.0,
            metric="loss",
            mode="min",
            best=None,
            resources_used={},
            notes=[],
            store="",
            outcome="is over",
        )
        search: Any = SimpleNamespace(loop=loop, is_killed=False)
        view: Any = self.view
        self.teller = Teller(search, view)

    def show(self) -> r.Answered:
        return self.teller.answer(r.Asked(7, r.ShowTrials(2**40)))


@pytest.fixture
def search() -> Search:
    return Search()


def test_an_answer_is_sent(search):
    answered = search.show()
    assert answered.refusal is None
    detail = msgspec.msgpack.decode(answered.answer, type=ExperimentDetail)
    assert detail.experiment.name == "x"
    assert msgspec.msgpack.decode(search.teller.goodbye().detail, type=ExperimentDetail) == detail


@pytest.mark.parametrize("note", ["\udc80", "x" * 2**24])
def test_an_answer_that_cannot_be_sent_is_refused(search, note):
    search.view.notes = [note]
    answered = search.show()
    assert answered.refusal is not None
    assert "sent" in answered.refusal.text
    assert not answered.refusal.is_wrong_use
    assert r.encode(answered)
    assert search.teller.goodbye() == r.Goodbye("is over", is_interrupted=False, detail=b"")


@pytest.mark.parametrize("value", [2**64, "\udc80", "x" * 2**20])
def test_a_best_configuration_that_cannot_be_sent_is_left_out(search, value):
    search.view.best = ("a", 0.5, {"value": value})
    status = search.teller.status()
    assert (status.best, status.best_config) == (("a", 0.5), {})
    assert r.encode(status)


def test_best_configuration_with_a_value_without_a_repr_is_shown_by_its_type(search):
    search.view.best = ("a", 0.5, {"value": Repr()})
    status = search.teller.status()
    assert status.best_config["value"].endswith("Repr without a text>")
    assert r.encode(status)
