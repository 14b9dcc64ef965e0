"""The contract of searchers, as the experiment's loop relies on it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tunemq.testing import simulate
from tunemq_scheduler.schedulers import HyperBandScheduler
from tunemq_scheduler.search import (
    BasicVariantGenerator,
    ConcurrencyLimiter,
    Searcher,
    SearchGenerator,
    Suggestion,
    choice,
    sample_from,
    uniform,
)
from tunemq_scheduler.search.domain_types import Domain
from tunemq_scheduler.search.optuna.optuna_search import OptunaSearch
from tunemq_scheduler.search.optuna.tune_bohb import TuneBOHB
from tunemq_scheduler.search.searcher import innermost
from tunemq_scheduler.search.space import children
from tunemq_shared.base.errors import SearchFailed, SearchSpaceError

SPACE = {
    "x": uniform(0, 1),
    "opt": {"kind": choice(["a", "b"]), "fixed": [1, {"deep": 2}]},
    "twice": sample_from(lambda config: 2 * config["x"]),
}


class PlainSearcher(Searcher):
    """A searcher as people write them for Ray: no restoring, no keyword arguments."""

    def __init__(self) -> None:
        super().__init__(metric="loss", mode="min")
        self.configs: dict[str, dict[str, Any]] = {}
        self.ends: list[tuple[str, Any, bool]] = []
        self.results: list[str] = []
        self.pauses: list[str] = []
        self.points: list[tuple[dict[str, Any], float]] = []

    def set_search_properties(self, metric: Any, mode: Any, config: Any) -> bool:  # type: ignore[override]
        return True

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        self.configs[trial_id] = {"x": len(self.configs) / 100}
        return self.configs[trial_id]

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        self.results.append(trial_id)

    def on_trial_pause(self, trial_id: str) -> None:
        self.pauses.append(trial_id)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        del self.configs[trial_id]
        self.ends.append((trial_id, result, error))

    def add_evaluated_point(self, parameters: Any, value: float, *args: Any, **kwargs: Any) -> None:
        self.points.append((parameters, value))


MAKERS: dict[str, Callable[[], Any]] = {
    "basic": BasicVariantGenerator,
    "constant": lambda: BasicVariantGenerator(constant_grid_search=True),
    "optuna": OptunaSearch,
    "limited optuna": lambda: ConcurrencyLimiter(OptunaSearch(), 3),
    "batched optuna": lambda: ConcurrencyLimiter(OptunaSearch(), 3, batch=True),
    "bohb": TuneBOHB,
    "limited bohb": lambda: ConcurrencyLimiter(TuneBOHB(), 3),
    "batched bohb": lambda: ConcurrencyLimiter(TuneBOHB(), 3, batch=True),
    "plain": PlainSearcher,
    "limited plain": lambda: ConcurrencyLimiter(PlainSearcher(), 3),
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[..., SearchGenerator]:
    def made(num_samples: int = 12, limit: int = 0) -> SearchGenerator:
        searcher = MAKERS[request.param]()
        if limit:
            searcher = ConcurrencyLimiter(searcher, limit)
        return SearchGenerator(searcher, SPACE, num_samples, metric="loss", mode="min", seed=5)

    return made


def play(algorithm: SearchGenerator, first: int = 0, limit: int = 50) -> list[Suggestion]:
    """Run one trial at a time until the search ends; return the suggestions."""
    found = []
    for n in range(first, first + limit):
        answer = algorithm.suggest(n, f"t{n}")
        if answer is Searcher.FINISHED:
            break
        assert isinstance(answer, Suggestion)
        result = {"loss": answer.config["x"], "training_iteration": 1}
        algorithm.on_trial_complete(f"t{n}", result)
        found.append(answer)
    return found


def domains_in(node: Any) -> bool:
    return isinstance(node, Domain) or any(domains_in(child) for _, child in children(node))


@pytest.mark.parity(173)
def test_search_gives_num_samples_configurations_and_then_ends(
    make: Callable[..., SearchGenerator],
) -> None:
    algorithm = make(12)
    assert algorithm.total == 12
    assert len(play(algorithm)) == 12
    assert algorithm.suggest(12, "t12") is Searcher.FINISHED


def test_endless_search_continues(make: Callable[..., SearchGenerator]) -> None:
    algorithm = make(-1)
    assert algorithm.total is None
    assert len(play(algorithm, limit=30)) == 30


def test_configurations_are_complete_and_belong_to_the_receiver(
    make: Callable[..., SearchGenerator],
) -> None:
    algorithm = make()
    space = copy.deepcopy(SPACE["opt"])
    for suggestion in play(algorithm):
        config = suggestion.config
        assert config.keys() == SPACE.keys()
        assert not domains_in(config)
        assert config["twice"] == 2 * config["x"]
        assert config["opt"]["fixed"] == [1, {"deep": 2}]
        assert config["opt"]["kind"] in ("a", "b")
        config["opt"]["fixed"][1]["deep"] = "spoilt"
    assert SPACE["opt"] == space


def test_tags_begin_with_the_number_and_values_have_flat_names(
    make: Callable[..., SearchGenerator],
) -> None:
    for n, suggestion in enumerate(play(make())):
        assert suggestion.tag.startswith(f"{n}_")
        assert suggestion.evaluated_params.keys() == {"x", "opt/kind", "twice"}


def test_same_seed_and_results_give_the_same_configurations(
    make: Callable[..., SearchGenerator],
) -> None:
    assert play(make()) == play(make())


def test_resumed_search_gives_only_the_remaining_configurations(
    make: Callable[..., SearchGenerator],
) -> None:
    whole = play(make())
    resumed = make()
    for n, suggestion in enumerate(whole[:5]):
        resumed.on_trial_restored(n, f"t{n}", suggestion.config)
        result = {"loss": suggestion.config["x"], "training_iteration": 1}
        resumed.on_trial_complete(f"t{n}", result)
    rest = play(resumed, first=5)
    assert len(rest) == 7
    if not isinstance(innermost(resumed.searcher), PlainSearcher):
        assert rest == whole[5:]


def test_number_of_live_trials_is_limited(make: Callable[..., SearchGenerator]) -> None:
    algorithm = make(limit=3)
    for n in range(3):
        assert isinstance(algorithm.suggest(n, f"t{n}"), Suggestion)
    assert algorithm.suggest(3, "t3") is None
    for n in range(3):
        algorithm.on_trial_complete(f"t{n}", None, error=True)
    assert isinstance(algorithm.suggest(3, "t3"), Suggestion)


@pytest.mark.parity(173)
def test_all_kinds_of_ends_are_accepted(make: Callable[..., SearchGenerator]) -> None:
    algorithm = make()
    for n in range(3):
        algorithm.suggest(n, f"t{n}")
    if algorithm.wants_results:
        algorithm.on_trial_result("t0", {"loss": 3, "training_iteration": 1})
    algorithm.on_trial_pause("t0")
    algorithm.on_trial_complete("t0", {"loss": 3}, stopped_early=True)
    algorithm.on_trial_complete("t1", None, error=True)
    algorithm.on_trial_complete("t2", {"loss": float("nan")})
    assert isinstance(algorithm.suggest(3, "t3"), Suggestion)


def test_only_algorithms_that_use_results_require_a_metric(
    make: Callable[..., SearchGenerator],
) -> None:
    algorithm = make()
    is_told_of_it = not isinstance(algorithm.searcher, BasicVariantGenerator)
    assert algorithm.required_metrics == (("loss",) if is_told_of_it else ())


# --- what the generator does for searchers that do little ------------------------------


def test_searcher_that_cannot_restore_is_given_finished_trials_as_points(
    caplog: pytest.LogCaptureFixture,
) -> None:
    searcher = PlainSearcher()
    algorithm = SearchGenerator(searcher, {"x": uniform(0, 1)}, 9)
    for n in range(3):
        algorithm.on_trial_restored(n, f"t{n}", {"x": n})
    algorithm.on_trial_result("t0", {"loss": 1})
    algorithm.on_trial_pause("t0")
    algorithm.on_trial_complete("t0", {"loss": 4.0})
    algorithm.on_trial_complete("t1", {"loss": 4.0}, error=True)
    algorithm.on_trial_complete("t2", None)
    assert searcher.points == [({"x": 0}, 4.0)]
    assert searcher.results == searcher.pauses == searcher.ends == []
    assert caplog.text.count("PlainSearcher cannot restore the trials") == 1


class Listed(Searcher):
    """Suggests the numbers of a list in turn; offers its state, and learns no earlier trial."""

    def __init__(self, numbers: Iterable[int]) -> None:
        super().__init__()
        self.numbers, self.ended = list(numbers), []

    def suggest(self, trial_id: str) -> dict[str, Any] | str:
        return {"x": self.numbers.pop(0)} if self.numbers else Searcher.FINISHED

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        self.ended.append(trial_id)

    def get_state(self) -> dict[str, Any]:
        return {"numbers": self.numbers, "ended": self.ended}

    def set_state(self, state: dict[str, Any]) -> None:
        self.numbers, self.ended = state["numbers"], state["ended"]


def test_searcher_that_offers_its_state_is_asked_again_for_earlier_trials(
    caplog: pytest.LogCaptureFixture,
) -> None:
    searcher = Listed(range(5))
    algorithm = SearchGenerator(searcher, {"x": 0, "drawn": sample_from(os.urandom)}, 9)
    for n in range(3):
        algorithm.on_trial_restored(n, f"t{n}", {"x": n, "drawn": b"any"})
    algorithm.on_trial_complete("t0", None)
    # One that had ended and continues is no further suggestion.
    algorithm.on_trial_restored(0, "t0", {"x": 3, "drawn": b"any"}, is_continued=True)
    assert (searcher.numbers, searcher.ended) == ([3, 4], ["t0"])


def test_searcher_that_suggests_other_trials_now_is_left_as_it_was(
    caplog: pytest.LogCaptureFixture,
) -> None:
    searcher = Listed([7, 8])
    algorithm = SearchGenerator(searcher, {}, 9)
    algorithm.on_trial_restored(0, "t0", {"x": 3})
    algorithm.on_trial_complete("t0", None)
    assert (searcher.numbers, searcher.ended) == ([7, 8], [])
    assert caplog.text.count("Listed cannot restore the trials") == 1


@pytest.mark.parity(66, 173)
def test_results_and_ends_reach_the_searcher_once() -> None:
    searcher = PlainSearcher()
    algorithm = SearchGenerator(ConcurrencyLimiter(searcher, 2), {}, 9)
    assert algorithm.wants_results
    algorithm.suggest(0, "t0")
    algorithm.on_trial_result("t0", {"loss": 1})
    algorithm.on_trial_pause("t0")
    algorithm.on_trial_complete("t0", {"loss": 1}, error=True)
    assert searcher.results == searcher.pauses == ["t0"]
    assert searcher.ends == [("t0", {"loss": 1}, True)]


class Notes(PlainSearcher):
    """Notes each call with its trial, and the step of a result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str, int]] = []
        self.newest: dict[str, int] = {}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        self.newest[trial_id] = result["training_iteration"]
        self.calls.append(("result", trial_id, self.newest[trial_id]))

    def on_trial_pause(self, trial_id: str) -> None:
        self.calls.append(("pause", trial_id, self.newest[trial_id]))


@pytest.mark.parity(173)
def test_pauses_reach_the_searcher_directly_after_their_results() -> None:
    searcher = Notes()
    search = simulate(
        HyperBandScheduler(max_t=9, reduction_factor=3),
        searcher,
        lambda config, step: {"loss": config["x"] + 1 / step},
        metric="loss",
        mode="min",
        num_samples=17,
        workers=4,
    )
    calls = searcher.calls
    pauses = [place for place, call in enumerate(calls) if call[0] == "pause"]
    decided = [one for one in search.decisions if one.action == "PAUSE"]
    assert len(pauses) == len(decided) > 10
    assert [calls[place][2] for place in pauses] == [one.step for one in decided]
    for place in pauses:
        assert calls[place - 1] == ("result", *calls[place][1:])


def test_batch_is_reported_when_all_its_trials_have_ended() -> None:
    searcher = PlainSearcher()
    algorithm = SearchGenerator(ConcurrencyLimiter(searcher, 2, batch=True), {}, 9)
    for n in range(2):
        algorithm.suggest(n, f"t{n}")
    algorithm.on_trial_complete("t1", {"loss": 1})
    assert searcher.ends == []
    assert algorithm.suggest(2, "t2") is None
    algorithm.on_trial_complete("t0", {"loss": 0})
    assert [trial for trial, _, _ in searcher.ends] == ["t1", "t0"]
    assert isinstance(algorithm.suggest(2, "t2"), Suggestion)


@pytest.mark.parametrize("answer", [3, "done", ["x"]])
def test_invalid_suggestion_is_an_error_that_names_the_searcher(answer: Any) -> None:
    class Wrong(PlainSearcher):
        def suggest(self, trial_id: str) -> Any:
            return answer

    algorithm = SearchGenerator(Wrong(), {}, 9)
    with pytest.raises(SearchFailed, match=r"Wrong\.suggest\(\) returned"):
        algorithm.suggest(0, "t0")


@pytest.mark.parity(63)
def test_searcher_may_wait_and_may_finish() -> None:
    answers: list[Any] = [None, {"x": 1}, Searcher.FINISHED]

    class Story(PlainSearcher):
        def suggest(self, trial_id: str) -> Any:
            return answers.pop(0)

    algorithm = SearchGenerator(Story(), {"c": 2}, -1)
    assert algorithm.suggest(0, "t0") is None
    suggestion = algorithm.suggest(0, "t0")
    assert isinstance(suggestion, Suggestion)
    assert suggestion.config == {"c": 2, "x": 1}
    assert suggestion.evaluated_params == {"x": 1}
    assert algorithm.suggest(1, "t1") is Searcher.FINISHED
    assert answers == []


def test_searcher_without_a_space_rejects_domains_that_would_not_be_searched() -> None:
    class Own(PlainSearcher):
        def set_search_properties(self, metric: Any, mode: Any, config: Any) -> bool:  # type: ignore[override]
            return False

    with pytest.raises(SearchSpaceError, match="varies 'x', but Own"):
        SearchGenerator(Own(), {"x": uniform(0, 1)})
    SearchGenerator(Own(), {"x": sample_from(lambda: 3)})
