"""`uniform`, `choice`, `grid_search` and the others: how a search space is written.

Names, arguments and bounds are Ray Tune's. Bad bounds are refused where they are written, by an
error that names the function, the values and the fix.
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
    """A real number between ``lower`` and ``upper``.

    Raises:
        SearchSpaceError: a bound is not a finite number, or ``lower`` is not below ``upper``.
    """
    return Float(*_range("uniform", lower, upper))


def quniform(lower: float, upper: float, q: float) -> Float:
    """A multiple of ``q`` between ``lower`` and ``upper``, both included, each equally likely.

    Raises:
        SearchSpaceError: as `uniform`, or ``q`` is not positive, or no multiple of it is in the
            range.
    """
    return _quantised("quniform", lower, upper, q, log=False)


def loguniform(lower: float, upper: float, base: object = None) -> Float:  # noqa: ARG001
    """A real number whose logarithm is uniform: each power of ten gets as many.

    Args:
        lower: the lower bound, above 0.
        upper: the upper bound.
        base: without effect, as the base of the logarithm has none; accepted for old scripts.

    Raises:
        SearchSpaceError: as `uniform`, or ``lower`` is not above 0.
    """
    return Float(*_log_range("loguniform", lower, upper), log=True)


def qloguniform(lower: float, upper: float, q: float, base: object = None) -> Float:  # noqa: ARG001
    """A multiple of ``q`` between ``lower`` and ``upper``, both included, log-uniform.

    Raises:
        SearchSpaceError: as `loguniform` and `quniform`.
    """
    _log_range("qloguniform", lower, upper)
    return _quantised("qloguniform", lower, upper, q, log=True)


def randn(mean: float = 0.0, sd: float = 1.0) -> Normal:
    """A normally distributed number.

    Raises:
        SearchSpaceError: an argument is not a finite number, or ``sd`` is not positive.
    """
    return Normal(_number("randn", "mean", mean), _positive("randn", "sd", sd))


def qrandn(mean: float, sd: float, q: float) -> Normal:
    """A normally distributed number, rounded to a multiple of ``q``.

    Raises:
        SearchSpaceError: as `randn`, or ``q`` is not positive.
    """
    return Normal(
        _number("qrandn", "mean", mean), _positive("qrandn", "sd", sd), _positive("qrandn", "q", q)
    )


def randint(lower: int, upper: int) -> Integer:
    """A whole number from ``lower`` to ``upper - 1``.

    Raises:
        SearchSpaceError: a bound is not a whole number, or ``lower`` is not below ``upper``.
    """
    return _integers("randint", lower, upper, 1, log=False)


def qrandint(lower: int, upper: int, q: int = 1) -> Integer:
    """A multiple of ``q`` between ``lower`` and ``upper``; ``upper`` is included unless ``q`` is 1.

    Raises:
        SearchSpaceError: as `randint`, or ``q`` is not positive, or no multiple of it is in the
            range.
    """
    return _integers("qrandint", lower, upper, q, log=False)


def lograndint(lower: int, upper: int, base: object = None) -> Integer:  # noqa: ARG001
    """A whole number from ``lower`` to ``upper - 1``, log-uniform.

    Raises:
        SearchSpaceError: as `randint`, or ``lower`` is not above 0.
    """
    return _integers("lograndint", lower, upper, 1, log=True)


def qlograndint(lower: int, upper: int, q: int, base: object = None) -> Integer:  # noqa: ARG001
    """A multiple of ``q``, log-uniform; ``upper`` is included unless ``q`` is 1.

    Raises:
        SearchSpaceError: as `qrandint`, or ``lower`` is not above 0.
    """
    return _integers("qlograndint", lower, upper, q, log=True)


def choice(categories: Iterable[Any]) -> Choice:
    """One of some values, each as likely as the others; a value may hold further domains.

    Raises:
        SearchSpaceError: there are no values, or they are no ordered collection.
    """
    return Choice(_values("choice", categories))


def grid_search(values: Iterable[Any]) -> GridSearch:
    """Every one of some values, crossed with all other grids of the space.

    Raises:
        SearchSpaceError: there are no values, or they are no ordered collection.
    """
    return GridSearch(_values("grid_search", values))


def sample_from(function: Callable[..., Any]) -> Function:
    """What ``function`` says.

    It takes nothing, or the configuration (``lambda config: 2 * config["width"]``, and also
    ``lambda spec: 2 * spec.config.width``), or the configuration and a `random.Random`. What it
    draws from that generator is the same when the search is resumed; what it draws elsewhere is
    not.

    Raises:
        SearchSpaceError: ``function`` cannot be called like this.
    """
    if not callable(function):
        raise SearchSpaceError(
            f"sample_from({function!r}): a function is needed, e.g. "
            'sample_from(lambda config: 2 * config["width"]).'
        )
    return Function(function, _required_arguments(function))


# --- checks ---------------------------------------------------------------------------------------


def _required_arguments(function: Callable[..., Any]) -> int:
    """How many arguments to pass: as many as have no default, else one if one is taken at all."""
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
        return int(value)  # a float would lose digits above 2**53
    number = _number(function, name, value)
    if not number.is_integer():
        real = function.replace("lograndint", "loguniform").replace("randint", "uniform")
        raise SearchSpaceError(
            f"{function}({name}={value!r}): {name} must be a whole number; "
            f"{real} is the one for real numbers."
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
            f"{function}({lower}, {upper}): lower must be above 0, as 0 has no logarithm; "
            "give the bounds themselves, not their logarithms."
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
    # numpy's arrays are read as plain numbers: a configuration has to travel without numpy.
    plain = values.tolist() if hasattr(values, "tolist") else values
    found = tuple(plain) if isinstance(plain, Iterable) else (plain,)
    if not found:
        raise SearchSpaceError(f"{function}({values!r}): there is nothing to choose from.")
    return found
