"""Determine which of the accepted signatures a function trainable has."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from typing import Any

from tunemq_shared.base.errors import TrainableError

_ACCEPTED = (
    "f(config), f(config, checkpoint_dir=None) or f(config, reporter); bind other arguments with "
    "tune.with_parameters or functools.partial"
)


class FunctionSignature(Enum):
    """How to call a function trainable."""

    CONFIG = "f(config)"
    CHECKPOINT_DIR = "f(config, checkpoint_dir=None)"
    REPORTER = "f(config, reporter)"


def function_form(function: Callable[..., Any]) -> FunctionSignature:
    """Determine the signature of ``function``; partials, defaults and keywords count as in a call.

    Raises:
        TrainableError: It has none of the accepted signatures, or is a coroutine function.
    """
    name = getattr(function, "__qualname__", repr(function))
    if inspect.iscoroutinefunction(function):
        raise TrainableError(
            f"The trainable {name} is a coroutine function. Wrap it: def train(config): "
            f"asyncio.run({getattr(function, '__name__', 'train_async')}(config))."
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise TrainableError(
            f"The trainable {name} has no signature that can be read ({error}). Wrap it in a "
            f"Python function: def train(config): ..."
        ) from error
    # Checked by name, so that a bare `**kwargs` does not select a deprecated signature.
    if "checkpoint_dir" in signature.parameters and _takes(signature, checkpoint_dir=None):
        return FunctionSignature.CHECKPOINT_DIR
    if "reporter" in signature.parameters and _takes(signature, reporter=None):
        return FunctionSignature.REPORTER
    if _takes(signature):
        return FunctionSignature.CONFIG
    raise TrainableError(
        f"The trainable {name} takes {signature}, which is not an accepted form. Write {_ACCEPTED}."
    )


def _takes(signature: inspect.Signature, **keywords: object) -> bool:
    """Whether the signature accepts a config and ``keywords``."""
    try:
        signature.bind({}, **keywords)
    except TypeError:
        return False
    return True
