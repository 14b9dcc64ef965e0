"""`with_parameters`: binds large objects to a trainable; they are shipped once and shared."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from tunemq_shared.base.errors import TrainableError
from tunemq_shared.code.code_by_value import trainable_name
from tunemq_shared.trainable.attached import (
    BoundParameters,
    attach,
    attached_to,
    check_trainable,
    parameters_of,
)

T = TypeVar("T", bound=Callable[..., Any])


def with_parameters(trainable: T, **objects: Any) -> T:
    """Bind these objects to keyword arguments of the trainable, for every trial.

    A function ``f(config, data)`` gets them with each call; a class gets them in
    ``setup(self, config, data)``. They are written once, when the first experiment starts, as they
    are then; later changes do not reach trials that use the same wrapper. Trial processes map the
    buffers in them (of numpy arrays, pandas frames, arrow tables), so that eight trials with the
    same array hold it once.

    **Arrays are read-only in a trial.** A trial that changes an array must copy it first.

    Raises:
        TrainableError: The trainable has no argument of that name.

    Args:
        trainable (function or class): what each trial runs; it is not changed.
        **objects: anything that can be pickled, by the name of the keyword argument.

    Returns:
        The trainable with its objects, for `Tuner` or `run`.

    Example:
        >>> from tunemq import report, with_parameters
        >>> def train(config, data):
        ...     report({"total": config["x"] * sum(data)})
        >>> trainable = with_parameters(train, data=[1, 2, 3])
    """
    check_trainable(trainable, "with_parameters")
    attached = attached_to(trainable)
    _check_names(attached.original, objects)
    before = attached.parameters.objects if attached.parameters is not None else {}
    wrapper: T = attach(trainable, parameters=BoundParameters({**before, **objects}))
    return wrapper


def _check_names(trainable: Any, objects: dict[str, Any]) -> None:
    accepted = list(parameters_of(trainable).parameters.values())
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted):
        return
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [parameter.name for parameter in accepted[1:] if parameter.kind in by_name]
    for name in objects:
        if name not in names:
            what = trainable_name(trainable) + (".setup" if isinstance(trainable, type) else "")
            has = f"it takes {', '.join(map(repr, names))}" if names else "it takes none"
            raise TrainableError(
                f"with_parameters({name}=...): {what} has no argument {name!r} after the "
                f"configuration ({has}); add it, or correct the name."
            )
