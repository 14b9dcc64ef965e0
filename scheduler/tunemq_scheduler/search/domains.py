"""Functions that define a search space: `uniform`, `choice`, `grid_search` and others.

Names, arguments and bounds are Ray Tune's. Each function checks its bounds immediately; the error
names the function, the values and the fix.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tunemq_scheduler.search.domain_types import (
    Choice,
    Domain,
    Float,
    Function,
    GridSearch,
    Integer,
    Normal,
    index_above,
    index_below,
)
from tunemq_scheduler.search.objective import is_real, is_whole
from tunemq_shared.base.errors import SearchSpaceError

__all__ = [
    "Choice",
    "Domain",
    "Float",
    "Function",
    "GridSearch",
    "Integer",
    "Normal",
    "choice",
    "grid_search",
    "lograndint",
    "loguniform",
    "qlograndint",
    "qloguniform",
    "qrandint",
    "qrandn",
    "quniform",
    "randint",
    "randn",
    "sample_from",
    "uniform",
]


def uniform(lower: float, upper: float) -> Float:
    """Define a real number, uniformly distributed between two bounds.

    Args:
        lower (float): the lower bound.
        upper (float): the upper bound.

    Returns:
        A domain for a search space.

    Raises:
        SearchSpaceError: a bound is not a finite number, or ``lower`` is not below ``upper``.

    Example:
        >>> from tunemq import uniform
        >>> uniform(0, 1)
        Float(lower=0.0, upper=1.0, log=False, q=None)
    """
    return Float(*_range("uniform", lower, upper))


def quniform(lower: float, upper: float, q: float) -> Float:
    """Define a multiple of ``q`` between two bounds, both included, each equally likely.

    Args:
        lower (float): the lower bound.
        upper (float): the upper bound.
        q (float): the step, above 0.

    Returns:
        A domain for a search space.

    Raises:
        SearchSpaceError: as for `uniform`; or ``q`` is not positive; or the range contains no
            multiple of ``q``.

    Example:
        >>> from tunemq import quniform
        >>> quniform(0, 1, 0.1)
        Float(lower=0.0, upper=1.0, log=False, q=0.1)
    """
    return _quantised("quniform", lower, upper, q, log=False)


def loguniform(lower: float, upper: float, base: object = None) -> Float:  # noqa: ARG001
    """Define a real number whose logarithm is uniform, so that each power of ten is equally likely.

    Args:
        lower (float): the lower bound, above 0.
        upper (float): the upper bound.
        base: ignored; the base of the logarithm has no effect. Accepted for old scripts.

    Returns:
        A domain for a search space.

    Raises:
        SearchSpaceError: as for `uniform`; or ``lower`` is not above 0.

    Example:
        >>> from tunemq import loguniform
        >>> loguniform(1e-4, 1)
        Float(lower=0.0001, upper=1.0, log=True, q=None)
    """
    return Float(*_log_range("loguniform", lower, upper), log=True)


def qloguniform(lower: float, upper: float, q: float, base: object = None) -> Float:  # noqa: ARG001
    """Define a multiple of ``q`` between two bounds, both included, log-uniformly distributed.

    Args:
        lower (float): the lower bound, above 0.
        upper (float): the upper bound.
        q (float): the step, above 0.
        base: ignored, as in `loguniform`.

    Returns:
        A domain for a search space.

    Raises:
        SearchSpaceError: as for `loguniform` and `quniform`.

    Example:
        >>> from tunemq import qloguniform
        >>> qloguniform(1e-3, 1, 1e-3)
        Float(lower=0.001, upper=1.0, log=True, q=0.001)
    """
    _log_range("qloguniform", lower, upper)
    return _quantised("qloguniform", lower, upper, q, log=True)


def randn(mean: float = 0.0, sd: float = 1.0) -> Normal:
    """Define a normally distributed number.

    Args:
        mean (float): the mean.
        sd (float): the standard deviation, above 0.

    Returns:
        A domain for a search space.

    Raises:
        SearchSpaceError: an argument is not a finite number, or ``sd`` is not positive.

    Example:
        >>> from tunemq import randn
        >>> randn(0, 1)
        Normal(mean=0.0, sd=1.0, q=None)
    """
    return Normal(_number("randn", "mean", mean), _positive("randn", "sd", sd))


def qrandn(mean: float, sd: float, q: float) -> Normal:
    """Define a normally distributed number, rounded to a multiple of ``q``.

    Args:
        mean (float): the mean.
        sd (float): the standard deviation, above 0.
        q (float): the step, above 0.

    Returns:
        A domain for a search space.

    Raises:
        SearchSpaceError: as for `randn`; or ``q`` is not positive.

    Example:
        >>> from tunemq import qrandn
        >>> qrandn(0, 1, 0.5)
        Normal(mean=0.0, sd=1.0, q=0.5)
    """
    return Normal(
        _number("qrandn", "mean", mean), _positive("qrandn", "sd", sd), _positive("qrandn", "q", q)
    )


def randint(lower: int, upper: int) -> Integer:
    """Define an integer from ``lower`` to ``upper - 1``, each equally likely.

    Args:
        lower (int): the lower bound, included.
        upper (int): the upper bound, excluded.

    Returns:
        A domain for a search space.

    Raises:
        SearchSpaceError: a bound is not an integer, or ``lower`` is not below ``upper``.

    Example:
        >>> from tunemq import randint
        >>> randint(0, 10)
        Integer(lower=0, last=9, log=False, q=1)
    """
    return _integers("randint", lower, upper, 1, log=False)


def qrandint(lower: int, upper: int, q: int = 1) -> Integer:
    """Define a multiple of ``q`` between two bounds, each equally likely.

    Args:
        lower (int): the lower bound, included.
        upper (int): the upper bound, included unless ``q`` is 1.
        q (int): the step, above 0.

    Returns:
        A domain for a search space.

    Raises:
        SearchSpaceError: as for `randint`; or ``q`` is not positive; or the range contains no
            multiple of ``q``.

    Example:
        >>> from tunemq import qrandint
        >>> qrandint(0, 10, 2)
        Integer(lower=0, last=10, log=False, q=2)
    """
    return _integers("qrandint", lower, upper, q, log=False)


def lograndint(lower: int, upper: int, base: object = None) -> Integer:  # noqa: ARG001
    """Define an integer from ``lower`` to ``upper - 1``, log-uniformly distributed.

    Args:
        lower (int): the lower bound, included, above 0.
        upper (int): the upper bound, excluded.
        base: ignored, as in `loguniform`.

    Returns:
        A domain for a search space.

    Raises:
        SearchSpaceError: as for `randint`; or ``lower`` is not above 0.

    Example:
        >>> from tunemq import lograndint
        >>> lograndint(1, 1000)
        Integer(lower=1, last=999, log=True, q=1)
    """
    return _integers("lograndint", lower, upper, 1, log=True)


def qlograndint(lower: int, upper: int, q: int, base: object = None) -> Integer:  # noqa: ARG001
    """Define a multiple of ``q`` between two bounds, log-uniformly distributed.

    Args:
        lower (int): the lower bound, included, above 0.
        upper (int): the upper bound, included unless ``q`` is 1.
        q (int): the step, above 0.
        base: ignored, as in `loguniform`.

    Returns:
        A domain for a search space.

    Raises:
        SearchSpaceError: as for `qrandint`; or ``lower`` is not above 0.

    Example:
        >>> from tunemq import qlograndint
        >>> qlograndint(2, 1000, 2)
        Integer(lower=2, last=1000, log=True, q=2)
    """
    return _integers("qlograndint", lower, upper, q, log=True)


def choice(categories: Iterable[Any]) -> Choice:
    """Define a choice among values, each equally likely; a value may contain further domains.

    Args:
        categories (sequence): the values, at least one; also a numpy array.

    Returns:
        A domain for a search space.

    Raises:
        SearchSpaceError: there are no values, or they are not an ordered collection.

    Example:
        >>> from tunemq import choice
        >>> choice(["adam", "sgd"])
        Choice(categories=('adam', 'sgd'))
    """
    return Choice(_values("choice", categories))


def grid_search(values: Iterable[Any]) -> GridSearch:
    """Define a grid: the search tries every value, combined with all other grids of the space.

    Args:
        values (sequence): the values, at least one; also a numpy array.

    Returns:
        A domain for a search space.

    Raises:
        SearchSpaceError: there are no values, or they are not an ordered collection.

    Example:
        >>> from tunemq import grid_search
        >>> grid_search([16, 32, 64])
        GridSearch(values=(16, 32, 64))
    """
    return GridSearch(_values("grid_search", values))


def sample_from(function: Callable[..., Any]) -> Function:
    """Define a value that a function computes, for instance from other values of the configuration.

    Args:
        function (callable): takes nothing; or the configuration (``lambda config: 2 *
            config["width"]``, and also ``lambda spec: 2 * spec.config.width``); or the
            configuration and a `random.Random`. Only values drawn from that generator are the same
            when the search is resumed.

    Returns:
        A domain for a search space.

    Raises:
        SearchSpaceError: ``function`` is not callable, or needs other arguments.

    Example:
        >>> from tunemq import choice, sample_from
        >>> space = {
        ...     "width": choice([16, 32]),
        ...     "depth": sample_from(lambda config: config["width"] // 8),
        ... }
    """
    if not callable(function):
        raise SearchSpaceError(
            f"sample_from({function!r}): a function is needed, e.g. "
            'sample_from(lambda config: 2 * config["width"]).'
        )
    return Function(function, _required_arguments(function))


# --- checks ---------------------------------------------------------------------------------------


def _required_arguments(function: Callable[..., Any]) -> int:
    """Return how many arguments to pass: all required ones, else one if any is accepted."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1  # some builtins have no signature; Ray passes the configuration
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    needs_keyword = any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters)
    if len(required) > 2 or needs_keyword:
        raise SearchSpaceError(
            f"sample_from({function!r}): the function needs more than (config, rng); "
            "bind the other arguments with functools.partial."
        )
    takes_any = bool(positional) or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return len(required) or int(takes_any)


def _number(function: str, name: str, value: Any) -> float:
    if isinstance(value, str):
        raise SearchSpaceError(
            f"{function}({name}={value!r}): this is text; write it as a number "
            "(YAML reads 1e-4 as text and 1.0e-4 as a number)."
        )
    if not is_real(value):
        raise SearchSpaceError(f"{function}({name}={value!r}): {name} must be a number.")
    if not math.isfinite(value):
        raise SearchSpaceError(f"{function}({name}={value!r}): {name} must be finite.")
    return float(value)


def _whole(function: str, name: str, value: Any) -> int:
    if is_whole(value):
        return int(value)  # a float loses digits above 2**53
    number = _number(function, name, value)
    if not number.is_integer():
        real = function.replace("lograndint", "loguniform").replace("randint", "uniform")
        raise SearchSpaceError(
            f"{function}({name}={value!r}): {name} must be a whole number; use {real} for real "
            "numbers."
        )
    return int(number)


def _positive(function: str, name: str, value: Any) -> float:
    number = _number(function, name, value)
    if number <= 0:
        raise SearchSpaceError(f"{function}({name}={value!r}): {name} must be above 0.")
    return number


def _range(function: str, lower: Any, upper: Any) -> tuple[float, float]:
    low, high = _number(function, "lower", lower), _number(function, "upper", upper)
    _check_order(function, low, high)
    return low, high


def _check_order(function: str, lower: float, upper: float) -> None:
    if lower > upper:
        raise SearchSpaceError(
            f"{function}({lower}, {upper}): lower must be below upper; swap the two."
        )
    if lower == upper:
        raise SearchSpaceError(
            f"{function}({lower}, {upper}): lower must be below upper; "
            "for a constant write the value itself."
        )


def _log_range(function: str, lower: Any, upper: Any) -> tuple[float, float]:
    low, high = _range(function, lower, upper)
    _check_log(function, low, high)
    return low, high


def _check_log(function: str, lower: float, upper: float) -> None:
    if lower <= 0:
        raise SearchSpaceError(
            f"{function}({lower}, {upper}): lower must be above 0, as 0 has no logarithm; pass "
            "the bounds themselves, not their logarithms."
        )


def _quantised(function: str, lower: Any, upper: Any, q: Any, *, log: bool) -> Float:
    low, high = _range(function, lower, upper)
    step = _positive(function, "q", q)
    if index_above(low, step) > index_below(high, step):
        raise _no_multiple(function, low, high, step)
    return Float(low, high, log=log, q=step)


def _integers(function: str, lower: Any, upper: Any, q: Any, *, log: bool) -> Integer:
    low, high = _whole(function, "lower", lower), _whole(function, "upper", upper)
    step = _whole(function, "q", q)
    _check_order(function, low, high)
    if log:
        _check_log(function, low, high)
    if step <= 0:
        raise SearchSpaceError(f"{function}(q={q!r}): q must be above 0.")
    last = high if step > 1 else high - 1
    if -(-low // step) > last // step:
        raise _no_multiple(function, low, high, step)
    return Integer(low, last, log=log, q=step)


def _no_multiple(function: str, lower: float, upper: float, q: float) -> SearchSpaceError:
    return SearchSpaceError(
        f"{function}({lower}, {upper}, q={q}): no multiple of {q} lies between the "
        "bounds; make q smaller or the range wider."
    )


def _values(function: str, values: Any) -> tuple[Any, ...]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise SearchSpaceError(f"{function}({values!r}): a list of values is needed.")
    if isinstance(values, set | frozenset):
        raise SearchSpaceError(
            f"{function}({values!r}): a set has no order, so a resumed search would differ; "
            "write a list, e.g. sorted(values)."
        )
    # Convert numpy arrays to plain numbers: nodes must decode a configuration without numpy.
    plain = values.tolist() if hasattr(values, "tolist") else values
    found = tuple(plain) if isinstance(plain, Iterable) else (plain,)
    if not found:
        raise SearchSpaceError(f"{function}({values!r}) has no values to choose from.")
    return found
