"""Metrics and modes: the result keys to optimise, and whether to minimise or maximise each."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.result_conditions import lookup

#: The metric of a trainable that reports a bare number.
DEFAULT_METRIC = "_metric"

Metric = str | Sequence[str] | None
Mode = str | Sequence[str] | None


def check_objective(who: str, metric: Metric, mode: Mode) -> None:
    """Check that a metric is a name and a mode is ``min`` or ``max``.

    Raises:
        ConfigError: one is invalid; the message names ``who`` and the value.
    """
    for one in _each(metric):
        if not isinstance(one, str) or not one:
            raise ConfigError(
                f"{who}(metric={metric!r}): a metric is the name of a reported value."
            )
    for one in _each(mode):
        if one not in ("min", "max"):
            raise ConfigError(f"{who}(mode={mode!r}): mode must be 'min' or 'max'.")
    if metric is None or mode is None:
        return
    if isinstance(metric, str) != isinstance(mode, str) or len(_each(metric)) != len(_each(mode)):
        raise ConfigError(
            f"{who}(metric={metric!r}, mode={mode!r}): pass as many modes as metrics, both as "
            "text or both as lists."
        )


def settle_objective(
    who: str, own: tuple[Metric, Mode], given: tuple[Metric, Mode]
) -> tuple[Metric, Mode]:
    """Return the effective metric and mode: the algorithm's own, else those of ``TuneConfig``.

    A mode without a metric means the metric of a trainable that reports a bare number.

    Raises:
        ConfigError: both define them, differently.
    """
    check_objective("TuneConfig", *given)
    for name, mine, theirs in zip(("metric", "mode"), own, given, strict=True):
        if mine is not None and theirs is not None and _each(mine) != _each(theirs):
            raise ConfigError(
                f"{name} is {theirs!r} in TuneConfig and {mine!r} in {who}; set it in one place."
            )
    metric = own[0] if own[0] is not None else given[0]
    mode = own[1] if own[1] is not None else given[1]
    if metric is None and isinstance(mode, str):
        metric = DEFAULT_METRIC
    check_objective(who, metric, mode)
    return metric, mode


def need_objective(who: str, metric: Metric, mode: Mode) -> None:
    """Check that an algorithm that needs a metric and a mode has both.

    Raises:
        ConfigError: one of the two is missing.
    """
    if metric is None or mode is None:
        missing = "metric" if metric is None else "mode"
        raise ConfigError(
            f"{who} does not know what to optimise: {missing} is missing; write "
            "TuneConfig(metric='loss', mode='min')."
        )


def metric_names(metric: Metric) -> tuple[str, ...]:
    """Return the metric names as a tuple."""
    return tuple(_each(metric))


def read_number(result: Mapping[str, Any], metric: str) -> float | None:
    """Return the finite number that a result has for a metric; None if it has none."""
    value = lookup(result, metric)
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def is_real(value: Any) -> bool:
    """Return whether a value is a real number, including numpy's but not booleans."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Return whether a value has an integer type, including numpy's but not booleans."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_count(who: str, name: str, value: Any, least: int) -> None:
    """Check that a value is an integer and not too small.

    Raises:
        ConfigError: it is not; the message names ``who`` and the value.
    """
    if not is_whole(value) or value < least:
        raise ConfigError(f"{who}({name}={value!r}) is invalid: pass a whole number from {least}.")


def accepted(method: Callable[..., Any], spec: dict[str, Any]) -> dict[str, Any]:
    """Return ``spec`` if a ``set_search_properties`` accepts keywords, else an empty dict."""
    parameters = inspect.signature(method).parameters.values()
    return spec if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters) else {}


def _each(value: str | Sequence[str] | None) -> list[str]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]  # type: ignore[list-item]
