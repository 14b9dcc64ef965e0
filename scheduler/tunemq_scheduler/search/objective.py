"""What is optimised: the names of metrics and whether each is to be small or large."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.conditions import lookup

#: The metric of a trainable that reports a bare number.
DEFAULT_METRIC = "_metric"

Metric = str | Sequence[str] | None
Mode = str | Sequence[str] | None


def check_objective(who: str, metric: Metric, mode: Mode) -> None:
    """Refuse a metric that is no name and a mode that is neither ``min`` nor ``max``.

    Raises:
        ConfigError: naming ``who`` got what.
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
            f"{who}(metric={metric!r}, mode={mode!r}): give as many modes as metrics, both as text "
            "or both as lists."
        )


def settle_objective(
    who: str, own: tuple[Metric, Mode], given: tuple[Metric, Mode]
) -> tuple[Metric, Mode]:
    """The metric and mode that count: an algorithm's own, else those of ``TuneConfig``.

    A mode without a metric means the metric of a trainable that reports a bare number.

    Raises:
        ConfigError: both say something, and not the same.
    """
    check_objective("TuneConfig", *given)
    for name, mine, theirs in zip(("metric", "mode"), own, given, strict=True):
        if mine is not None and theirs is not None and _each(mine) != _each(theirs):
            raise ConfigError(
                f"{name} is {theirs!r} in TuneConfig and {mine!r} in {who}; give it in one place."
            )
    metric = own[0] if own[0] is not None else given[0]
    mode = own[1] if own[1] is not None else given[1]
    if metric is None and isinstance(mode, str):
        metric = DEFAULT_METRIC
    check_objective(who, metric, mode)
    return metric, mode


def need_objective(who: str, metric: Metric, mode: Mode) -> None:
    """Refuse an algorithm that cannot work without a metric and a mode.

    Raises:
        ConfigError: one of the two is missing.
    """
    if metric is None or mode is None:
        missing = "metric" if metric is None else "mode"
        raise ConfigError(
            f"{who} needs to know what to optimise: {missing} is missing; "
            "write TuneConfig(metric='loss', mode='min')."
        )


def metric_names(metric: Metric) -> tuple[str, ...]:
    """The names as a tuple, whatever way they were given."""
    return tuple(_each(metric))


def read_number(result: Mapping[str, Any], metric: str) -> float | None:
    """The finite number that a result has for a metric, if it has one."""
    value = lookup(result, metric)
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def is_real(value: Any) -> bool:
    """Whether a value is a real number, numpy's included; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Whether a value is of a type of whole numbers, numpy's included; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_count(who: str, name: str, value: Any, least: int) -> None:
    """Refuse what is no whole number, or too small.

    Raises:
        ConfigError: naming ``who`` got what.
    """
    if not is_whole(value) or value < least:
        raise ConfigError(f"{who}({name}={value!r}) is invalid: give a whole number from {least}.")


def accepted(method: Callable[..., Any], spec: dict[str, Any]) -> dict[str, Any]:
    """``spec`` if a ``set_search_properties`` takes keywords, else nothing."""
    parameters = inspect.signature(method).parameters.values()
    return spec if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters) else {}


def _each(value: str | Sequence[str] | None) -> list[str]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]  # type: ignore[list-item]
