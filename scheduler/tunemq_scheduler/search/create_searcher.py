"""Creates search algorithms by name, and reads ``TuneConfig(search_alg=...)``."""

from __future__ import annotations

from typing import Any

from tunemq_scheduler.search.basic_variant import BasicVariantGenerator
from tunemq_scheduler.search.concurrency import ConcurrencyLimiter
from tunemq_scheduler.search.searcher import Searcher
from tunemq_shared.base.errors import ConfigError

_NAMES = ("random", "variant_generator", "optuna", "bohb")


def create_searcher(search_alg: str, **kwargs: Any) -> Searcher:
    """Create a search algorithm by its name.

    Args:
        search_alg (str): ``"random"`` (also ``"variant_generator"``); ``"optuna"`` and ``"bohb"``,
            which need the extra ``optuna``.
        **kwargs: arguments of the algorithm's class.

    Returns:
        The search algorithm.

    Raises:
        ConfigError: no search algorithm has this name, or an argument is invalid.
        TypeError: the class takes no such argument.

    Example:
        >>> from tunemq import create_searcher
        >>> create_searcher("random", max_concurrent=4).max_concurrent
        4
    """
    match search_alg:
        case "random" | "variant_generator":
            return BasicVariantGenerator(**kwargs)
        case "optuna":
            from tunemq_scheduler.search.optuna.optuna_search import OptunaSearch

            return OptunaSearch(**kwargs)
        case "bohb":
            from tunemq_scheduler.search.optuna.tune_bohb import TuneBOHB

            return TuneBOHB(**kwargs)
        case _:
            raise ConfigError(
                f"the search algorithm {search_alg!r} is unknown; use one of {', '.join(_NAMES)}."
            )


def make_searcher(search_alg: Any, max_concurrent: int | None = None) -> tuple[Searcher, int]:
    """Return an experiment's search algorithm and the most trials that may be live; 0 for no limit.

    Args:
        search_alg: a name, a `Searcher`, or None for grid and random search.
        max_concurrent: ``TuneConfig(max_concurrent_trials=...)``; None or 0 for no limit.

    Raises:
        ConfigError: ``search_alg`` is none of these, or two settings give different limits.
    """
    if isinstance(search_alg, str):
        search_alg = create_searcher(search_alg)
    if search_alg is None:
        search_alg = BasicVariantGenerator()
    if isinstance(search_alg, type) and issubclass(search_alg, Searcher):
        raise ConfigError(
            f"search_alg is the class {search_alg.__name__}; make one: {search_alg.__name__}()."
        )
    if not isinstance(search_alg, Searcher):
        raise ConfigError(
            f"search_alg is {search_alg!r}; it must be a Searcher or one of the names "
            f"{', '.join(_NAMES)}."
        )
    given = max_concurrent or 0
    if not isinstance(search_alg, BasicVariantGenerator | ConcurrencyLimiter):
        if given:
            search_alg.set_max_concurrency(given)
        return search_alg, given
    own = search_alg.max_concurrent
    if own and given and own != given:
        raise ConfigError(
            f"max_concurrent_trials is {given} in TuneConfig and max_concurrent is {own} in "
            f"{type(search_alg).__name__}; set the limit in one place."
        )
    return search_alg, own or given
