"""Check the metrics that a trial reports, and convert them to plain Python values.

This runs for every result of every trial, so the usual report (a flat dict of Python numbers) takes
one pass over exact types and one shallow copy. Scalars of array libraries are recognised by their
shape, without importing those libraries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from tunemq_shared.base.errors import MetricError
from tunemq_shared.base.safe_text import repr_of
from tunemq_shared.protocol.result_conditions import lookup

#: The key of a metric that was reported or returned without a name.
UNNAMED: Final = "_metric"

_AS_THEY_ARE: Final = frozenset({float, bool, type(None)})
_SMALLEST, _LARGEST = -(2**63), 2**64 - 1
#: The deepest nesting of a metric's value.
DEEPEST: Final = 32


def check_metrics(
    metrics: Mapping[str, Any],
    required: tuple[str, ...] = (),
    finite: tuple[str, ...] = (),
    *,
    step: int,
) -> dict[str, Any]:
    """Copy ``metrics`` to plain values, nested dicts and lists included.

    There must be a number under every key of ``required``, and a finite one under every key of
    ``finite``; ``outer/inner`` names a nested one. ``step`` is the result's training_iteration.

    Raises:
        MetricError: Names the key, the value, the step and the fix.
    """
    plain = dict(metrics)
    for key, value in plain.items():
        if type(key) is not str or not key.isascii():
            plain = _plain_mapping(metrics, "", step, 0)
            break
        if type(value) not in _AS_THEY_ARE:
            plain[key] = _plain(value, key, step, 0)
    check_expected(plain, required, finite, step=step)
    return plain


def check_expected(
    result: Mapping[str, Any],
    required: tuple[str, ...],
    finite: tuple[str, ...],
    *,
    step: int,
) -> None:
    """Raise MetricError unless numbers are under ``required``, finite ones under ``finite``."""
    for key in required:
        value = lookup(result, key)
        if not isinstance(value, int | float):
            raise _not_a_number(key, value, result, step)
    for key in finite:
        value = lookup(result, key)
        if not isinstance(value, int | float):
            raise _not_a_number(key, value, result, step)
        if not math.isfinite(value):
            raise MetricError(
                f"Metric {key!r} is {value} at step {step}, and {value} cannot be compared. Report "
                f"a large finite number instead, or set TuneConfig(nonfinite='worst') to rank "
                f"such results last."
            )


def check_comparable(result: Mapping[str, Any], keys: tuple[str, ...], *, step: int) -> None:
    """Raise MetricError if ``result`` has something other than a number under one of ``keys``."""
    for key in keys:
        value = lookup(result, key)
        if value is not None and not isinstance(value, int | float):
            raise MetricError(
                f"Metric {key!r} is {value!r} ({_type_name(value)}) at step {step}, but a stop "
                f"criterion or the trial scheduler compares it with a number: report a number."
            )


def missing_metric(key: str, result: Mapping[str, Any], step: int) -> MetricError:
    """Make the error for a result without ``key``; it lists the reported keys and the readers."""
    reported = ", ".join(repr(name) for name in list(result)[:20]) or "none"
    return MetricError(
        f"Metric {key!r} is missing from the result of step {step}; reported keys are {reported}. "
        f"The metric or time_attr of TuneConfig, a search algorithm, a trial scheduler or a "
        f"stopper reads it from every result: report it each time, or change the name there."
    )


def named(metrics: Any) -> dict[str, Any]:
    """Convert the argument of ``report`` to a dict: a single number gets the name ``_metric``.

    Raises:
        MetricError: It is neither a mapping nor a number.
    """
    if isinstance(metrics, Mapping):
        return dict(metrics)
    if isinstance(metrics, int | float) or _shape(metrics) is not None:
        return {UNNAMED: metrics}
    raise MetricError(
        f"report() takes a dict of metrics such as {{'loss': 0.1}}, not {_type_name(metrics)}."
    )


def _plain(value: Any, key: str, step: int, depth: int) -> Any:
    """Convert ``value`` to types that every reader of results understands."""
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is int:
        return _sixty_four_bits(value, key, step)
    if kind is str:
        return _encodable(value, key, step)
    if depth == DEEPEST:
        raise MetricError(
            f"Metric {key!r} at step {step} is nested more than {DEEPEST} deep; report a flat dict."
        )
    if isinstance(value, Mapping):
        return _plain_mapping(value, key, step, depth + 1)
    if kind is list or kind is tuple:
        return [_plain(item, f"{key}[{i}]", step, depth + 1) for i, item in enumerate(value)]
    return _converted(value, key, step)


def _plain_mapping(value: Mapping[Any, Any], key: str, step: int, depth: int) -> dict[str, Any]:
    plain = {}
    for inner, item in value.items():
        if not isinstance(inner, str):
            raise _bad_key(inner, key, step)
        name = str.__str__(inner)
        if not name.isascii():
            _check_name(name, key, step)
        plain[name] = _plain(item, f"{key}/{name}" if key else name, step, depth)
    return plain


def _converted(value: Any, key: str, step: int) -> Any:
    """Convert a scalar of an array library, or of a subclass of a plain type, to a plain value."""
    shape = _shape(value)
    if shape is not None and len(shape) > 0:
        raise MetricError(
            f"Metric {key!r} at step {step} is {_type_name(value)} of shape {shape}, not a number. "
            f"Report a scalar of it, such as float(x.mean()), x.item() or x.tolist()."
        )
    if shape is not None and hasattr(value, "item"):
        value = value.item()
    elif shape is not None and hasattr(value, "numpy"):
        value = value.numpy().item()
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return _sixty_four_bits(int(value), key, step)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        # An enum of strings prints its name, but its value is the string.
        return _encodable(str.__str__(value), key, step)
    raise MetricError(
        f"Metric {key!r} at step {step} is {_type_name(value)}. Results hold None, bool, int, "
        f"float, str, and dicts and lists of these: convert it, for example with float() or str()."
    )


def _shape(value: Any) -> tuple[int, ...] | None:
    """The shape of an array, tensor or scalar of an array library; None for anything else."""
    if isinstance(value, type):
        return None
    shape = getattr(value, "shape", None)
    try:
        return None if shape is None else tuple(shape)
    except (TypeError, ValueError):
        return None


def _sixty_four_bits(value: int, key: str, step: int) -> int:
    if _SMALLEST <= value <= _LARGEST:
        return value
    raise MetricError(
        f"Metric {key!r} at step {step} is an integer of {value.bit_length()} bits, and results "
        f"hold 64. Report it as float or str."
    )


def _encodable(value: str, key: str, step: int) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise MetricError(
                f"Metric {key!r} at step {step} is {value!a}, which is not valid Unicode. "
                f"Decode the bytes it came from with errors='replace'."
            ) from None
    return value


def _check_name(name: str, inside: str, step: int) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        place = f" inside {inside!a}" if inside else ""
        raise MetricError(
            f"A metric{place} at step {step} has the name {name!a}, which is not valid Unicode. "
            f"Decode the bytes it came from with errors='replace'."
        ) from None


def _bad_key(key: object, inside: str, step: int) -> MetricError:
    place = f" inside {inside!r}" if inside else ""
    shown = repr_of(key)
    return MetricError(
        f"A metric{place} at step {step} has the name {shown} ({_type_name(key)}); names are "
        f"strings: use str({shown})."
    )


def _not_a_number(key: str, value: object, result: Mapping[str, Any], step: int) -> MetricError:
    if value is None and key not in result:
        return missing_metric(key, result, step)
    return MetricError(
        f"Metric {key!r} is {value!r} ({_type_name(value)}) at step {step}, but the search "
        f"algorithm or the trial scheduler compares it with others: report a number."
    )


def _type_name(value: object) -> str:
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}"
