"""Search algorithms by name, and whatever ``TuneConfig(search_alg=...)`` may hold."""

from __future__ import annotations

from typing import Any

from tunemq_scheduler.search.basic_variant import BasicVariantGenerator
from tunemq_scheduler.search.concurrency import ConcurrencyLimiter
from tunemq_scheduler.search.search_algorithm import (
    SearchAlgorithm,
    SearchSetup,
    check_max_concurrent,
)
from tunemq_scheduler.search.search_generator import SearchGenerator
from tunemq_scheduler.search.searcher import Searcher
from tunemq_shared.errors import ConfigError

_NAMES = ("random", "variant_generator", "optuna")


def create_searcher(search_alg: str, **kwargs: Any) -> Searcher | SearchAlgorithm:
    """The search algorithm of a name, made with ``kwargs``.

    Raises:
        ConfigError: there is none of that name; lists those that there are.
    """
    match search_alg:
        case "random" | "variant_generator":
            return BasicVariantGenerator(**kwargs)
        case "optuna":
            from tunemq_scheduler.search.optuna_search import OptunaSearch

            return OptunaSearch(**kwargs)
        case _:
            raise ConfigError(
                f"there is no search algorithm {search_alg!r}; there are {', '.join(_NAMES)}."
            )


def make_search_algorithm(
    search_alg: Any, setup: SearchSetup, max_concurrent: int | None = None
) -> SearchAlgorithm:
    """What the loop asks for configurations, set up for an experiment.

    Args:
        search_alg: a name, a `Searcher`, a `SearchAlgorithm`, or None for grid and random search.
        setup: what is searched.
        max_concurrent: ``TuneConfig(max_concurrent_trials=...)``; None or 0 for no limit.

    Raises:
        ConfigError: ``search_alg`` is nothing of these, or the limit is given in two places.
        UserError: it cannot search what is wanted.
    """
    limit = check_max_concurrent("max_concurrent_trials", max_concurrent)
    if isinstance(search_alg, str):
        search_alg = create_searcher(search_alg)
    if search_alg is None:
        search_alg = BasicVariantGenerator()
    algorithm = _as_algorithm(search_alg, limit)
    algorithm.set_up(setup)
    return algorithm


def _as_algorithm(search_alg: Any, limit: int | None) -> SearchAlgorithm:
    if isinstance(search_alg, BasicVariantGenerator):
        _refuse_two_limits(search_alg.max_concurrent, limit, "BasicVariantGenerator")
        search_alg.max_concurrent = limit or search_alg.max_concurrent
        return search_alg
    if isinstance(search_alg, SearchAlgorithm):
        return search_alg
    if isinstance(search_alg, Searcher):
        if isinstance(search_alg, ConcurrencyLimiter):
            _refuse_two_limits(search_alg.max_concurrent, limit, "ConcurrencyLimiter")
        elif limit is not None:
            search_alg = ConcurrencyLimiter(search_alg, limit)
        return SearchGenerator(search_alg)
    if isinstance(search_alg, type) and issubclass(search_alg, Searcher | SearchAlgorithm):
        raise ConfigError(
            f"search_alg is the class {search_alg.__name__}; make one: {search_alg.__name__}()."
        )
    raise ConfigError(
        f"search_alg is {search_alg!r}; it must be a Searcher or one of the names "
        f"{', '.join(_NAMES)}."
    )


def _refuse_two_limits(own: int | None, given: int | None, who: str) -> None:
    if own is not None and given is not None and own != given:
        raise ConfigError(
            f"max_concurrent_trials is {given} in TuneConfig and max_concurrent is {own} in {who}; "
            "give the limit in one place."
        )
