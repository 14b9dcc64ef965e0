"""Attach parameters and resources to a trainable by a wrapper, leaving the trainable unchanged.

`with_parameters` and `with_resources` return a wrapper: a function for a function, a subclass for a
class. Wrapping a wrapper wraps the same original again, with all attachments so far. So the
original is always one step away, and shipping a trainable means shipping the original and its
attachments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tunemq_shared.base.errors import TrainableError
from tunemq_shared.code.code_by_value import trainable_name
from tunemq_shared.protocol.messages import BlobRef

_ATTRIBUTE: Final = "__tunemq_attached__"


@dataclass(eq=False)
class BoundParameters:
    """Objects bound to arguments of a trainable, and the blob that holds them, once written."""

    objects: dict[str, Any]
    blob: BlobRef | None = None


@dataclass(frozen=True, eq=False)
class TrainableAttachments:
    """A trainable's original, and its attachments."""

    original: Any
    parameters: BoundParameters | None = None
    resources: Any = None
    #: The wrapper that carries this: users' decorators copy attributes from function to function.
    wrapper: list[Any] = field(default_factory=list, repr=False)


def attached_to(trainable: Any) -> TrainableAttachments:
    """The attachments of the trainable; empty if it is not a wrapper."""
    if isinstance(trainable, type):
        found = vars(trainable).get(_ATTRIBUTE)
    else:
        found = getattr(trainable, _ATTRIBUTE, None)
    if isinstance(found, TrainableAttachments) and any(
        trainable is wrapper for wrapper in found.wrapper
    ):
        return found
    return TrainableAttachments(trainable)


def attach(trainable: Any, **changes: Any) -> Any:
    """Wrap the trainable's original with these fields of `TrainableAttachments` changed."""
    attached = replace(attached_to(trainable), **changes, wrapper=[])
    wrapper = _wrapped(attached.original, attached.parameters)
    setattr(wrapper, _ATTRIBUTE, attached)
    attached.wrapper.append(wrapper)
    return wrapper


def check_trainable(trainable: Any, caller: str) -> None:
    """Raise TrainableError unless the trainable is a function or class."""
    if not callable(trainable):
        raise TrainableError(
            f"{caller}: the trainable must be a function or a Trainable class, not {trainable!r}."
        )


def parameters_of(trainable: Any) -> inspect.Signature:
    """The signature that takes the configuration: the function's, or that of ``setup``."""
    try:
        if not isinstance(trainable, type):
            return inspect.signature(trainable)
        setup = inspect.signature(trainable.setup)  # type: ignore[attr-defined]
        return setup.replace(parameters=list(setup.parameters.values())[1:])
    except (AttributeError, TypeError, ValueError) as error:
        raise TrainableError(
            f"the arguments of {trainable_name(trainable)} cannot be found out: {error}."
        ) from error


def _wrapped(original: Any, parameters: BoundParameters | None) -> Any:
    objects = parameters.objects if parameters is not None else {}
    if isinstance(original, type):
        return _subclass(original, objects)
    return _function(original, objects)


def _function(original: Callable[..., Any], objects: dict[str, Any]) -> Callable[..., Any]:
    signature = _without(parameters_of(original), objects)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # By name: arguments after a bound one would otherwise take its position.
        bound = signature.bind(*args, **kwargs)
        return original(*bound.args, **bound.kwargs, **objects)

    wrapper.__name__ = trainable_name(original)
    for name in ("__qualname__", "__module__", "__doc__"):
        setattr(wrapper, name, getattr(original, name, getattr(wrapper, name)))
    vars(wrapper)["__signature__"] = signature
    return wrapper


def _subclass(original: type, objects: dict[str, Any]) -> type:
    body: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    if objects:

        def setup(self: Any, config: dict[str, Any]) -> None:
            original.setup(self, config, **objects)  # type: ignore[attr-defined]

        body["setup"] = setup
    return type(original)(original.__name__, (original,), body)


def _without(signature: inspect.Signature, names: dict[str, Any]) -> inspect.Signature:
    """The signature without the bound names; arguments after those become keyword-only."""
    left: list[inspect.Parameter] = []
    by_keyword = False
    for parameter in signature.parameters.values():
        if parameter.name in names:
            by_keyword = True
        elif by_keyword and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            left.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
        elif not (by_keyword and parameter.kind is parameter.VAR_POSITIONAL):
            left.append(parameter)
    return signature.replace(parameters=left)
