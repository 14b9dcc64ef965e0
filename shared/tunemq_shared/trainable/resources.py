"""What one trial needs: amounts by resource name, from `with_resources` or the trainable's class.

Amounts are plain dicts such as ``{"cpu": 2, "gpu": 0.5, "licence": 1}``; ``CPU`` and ``GPU`` are
accepted too. The default is one CPU. A trial runs on one node, so the bundles of a
`PlacementGroupFactory` are added up to one request.

Two names concern the GPUs themselves. ``gpu_memory`` is a number of bytes: with ``gpu``, each
device must have that much in total; without it, the trial shares one device and gets that part of
it. ``accelerator_type:A100``, with any amount above 0, allows no other GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Final, TypeVar

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.code.code_by_value import trainable_name
from tunemq_shared.trainable.attached import attach, attached_to, check_trainable
from tunemq_shared.trainable.resource_names import ACCELERATOR_TYPE, GPU, GPU_MEMORY

#: A smaller ``gpu_memory`` is surely not in bytes.
_LEAST_GPU_MEMORY: Final = 1_000_000

DEFAULT_RESOURCES: Final[Mapping[str, float]] = {"cpu": 1.0}

_STRATEGIES: Final = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

T = TypeVar("T", bound=Callable[..., Any])


class PlacementGroupFactory:
    """Several bundles of resources for one trial, in Ray Tune's syntax.

    The bundles of a trial are on one node and are added up, with PACK, SPREAD and STRICT_PACK
    alike. STRICT_SPREAD asks for a node per bundle and is rejected if there are several.

    Raises:
        ConfigError: No bundles, an unknown strategy, or an invalid amount.

    Example:
        >>> from tunemq import PlacementGroupFactory, with_resources
        >>> bundles = PlacementGroupFactory([{"cpu": 1}, {"gpu": 1}])
        >>> trainable = with_resources(lambda config: {"loss": config["x"]}, bundles)
    """

    def __init__(self, bundles: Sequence[Mapping[str, float]], strategy: str = "PACK") -> None:
        if isinstance(bundles, Mapping) or not bundles:
            raise ConfigError(
                f"PlacementGroupFactory(bundles={bundles!r}): give a list of at least one dict, "
                'such as [{"CPU": 1, "GPU": 1}].'
            )
        if strategy not in _STRATEGIES:
            raise ConfigError(
                f"PlacementGroupFactory(strategy={strategy!r}): use {', '.join(_STRATEGIES)}."
            )
        if strategy == "STRICT_SPREAD" and len(bundles) > 1:
            raise ConfigError(
                'PlacementGroupFactory(strategy="STRICT_SPREAD") asks for several nodes and a '
                'trial runs on one; use "PACK" or a single bundle.'
            )
        self._required = _summed(bundles)
        self.bundles = [dict(bundle) for bundle in bundles]
        self.strategy = strategy

    @property
    def required_resources(self) -> dict[str, float]:
        """The sum of all bundles."""
        return dict(self._required)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlacementGroupFactory):
            return NotImplemented
        return (self.bundles, self.strategy) == (other.bundles, other.strategy)

    def __hash__(self) -> int:
        return hash((frozenset(self._required.items()), self.strategy))

    def __repr__(self) -> str:
        return f"PlacementGroupFactory({self.bundles!r}, strategy={self.strategy!r})"


ResourceInput = Mapping[str, float] | PlacementGroupFactory


def with_resources(
    trainable: T, resources: ResourceInput | Callable[[dict[str, Any]], ResourceInput]
) -> T:
    """Wrap the trainable so that each of its trials gets these resources.

    The trainable itself is not changed. ``resources`` may be a function that takes a trial's
    configuration and returns them.

    Raises:
        ConfigError: The resources are invalid; the message names the amount.

    Args:
        trainable (function, class or executable): what each trial runs.
        resources (dict, PlacementGroupFactory or function): amounts by resource: ``cpu`` and
            ``gpu`` in devices or parts of one, ``memory`` in bytes, others as nodes offer them.

    Returns:
        The trainable with its resources, for `Tuner` or `run`.

    Example:
        >>> from tunemq import report, with_resources
        >>> def train(config):
        ...     report({"loss": config["x"]})
        >>> trainable = with_resources(train, {"cpu": 2, "gpu": 0.5})
    """
    check_trainable(trainable, "with_resources")
    if isinstance(resources, Mapping | PlacementGroupFactory):
        _amounts(resources)
    elif not callable(resources):
        raise ConfigError(
            f"with_resources(resources={resources!r}): give a dict such as "
            '{"cpu": 2, "gpu": 1}, a PlacementGroupFactory, or a function of the configuration.'
        )
    wrapper: T = attach(trainable, resources=resources)
    return wrapper


def resources_of(trainable: Any, config: dict[str, Any]) -> dict[str, float]:
    """What a trial with this configuration needs: amounts above 0 by normalised resource name.

    Raises:
        ConfigError: Both `with_resources` and ``default_resource_request`` ask for resources, or
            the request is invalid.
    """
    attached = attached_to(trainable)
    given = attached.resources
    ask = getattr(attached.original, "default_resource_request", None)
    own = ask(config) if callable(ask) and isinstance(attached.original, type) else None
    if own is not None and given is not None:
        raise ConfigError(
            f"{trainable_name(trainable)}.default_resource_request() asks for {own!r} and "
            "with_resources was given too; clear one of them."
        )
    request = own if own is not None else given
    if callable(request) and not isinstance(request, Mapping):
        request = request(config)
    return dict(DEFAULT_RESOURCES) if request is None else _amounts(request)


def _amounts(request: Any) -> dict[str, float]:
    if isinstance(request, PlacementGroupFactory):
        return request.required_resources
    if not isinstance(request, Mapping):
        raise ConfigError(
            f"the resources of a trial must be a dict or PlacementGroupFactory, not {request!r}."
        )
    return _summed([request])


def _summed(bundles: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for bundle in bundles:
        if not isinstance(bundle, Mapping):
            raise ConfigError(f"a bundle of resources must be a dict, not {bundle!r}.")
        for name, amount in bundle.items():
            key = _name(name)
            total[key] = total.get(key, 0.0) + _amount(name, amount)
    if total.get(GPU) and total.get(GPU_MEMORY):  # memory per device, not in total
        total[GPU_MEMORY] = max(float(bundle.get(GPU_MEMORY, 0.0)) for bundle in bundles)
    # 0.1 and 0.2 must add up to 0.3.
    rounded = {name: round(amount, 6) for name, amount in total.items()}
    total = {name: amount for name, amount in rounded.items() if amount > 0}
    _check_gpus(total)
    if not total:
        raise ConfigError(
            "resources: a trial must need something; give at least one amount above 0, such as "
            '{"cpu": 1}.'
        )
    return total


def _check_gpus(total: Mapping[str, float]) -> None:
    gpus = total.get(GPU, 0.0)
    if gpus > 1 and not gpus.is_integer():
        raise ConfigError(
            f"resources: gpu={gpus:g} is not possible; request a fraction below 1 (a shared "
            f"device) or a whole number such as {math.ceil(gpus)}."
        )
    memory = total.get(GPU_MEMORY, 0.0)
    if 0 < memory < _LEAST_GPU_MEMORY:
        raise ConfigError(
            f"resources: {GPU_MEMORY}={memory:g} is a number of bytes and very few; 40 GB are 40e9."
        )
    models = [name for name in total if name.startswith(ACCELERATOR_TYPE)]
    if len(models) > 1:
        raise ConfigError(
            f"resources: {' and '.join(models)} together are not possible, because the GPUs of "
            "a trial are of one model; request one of them."
        )


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"resources: {name!r} is not the name of a resource; use a string.")
    model = name.removeprefix(ACCELERATOR_TYPE) if name.startswith(ACCELERATOR_TYPE) else None
    if name == ACCELERATOR_TYPE.rstrip(":") or (model is not None and not model.strip()):
        raise ConfigError(
            f"resources: {name!r} names no model; write it behind a colon, as in "
            f"{ACCELERATOR_TYPE}A100."
        )
    return name.lower() if name in ("CPU", "GPU") else name


def _amount(name: str, amount: Any) -> float:
    if isinstance(amount, bool) or not isinstance(amount, Real):
        raise ConfigError(
            f"resources: {name}={amount!r} is not a number; give one such as 1 or 0.5."
        )
    number = float(amount)
    if not math.isfinite(number) or number < 0:
        raise ConfigError(f"resources: {name}={amount!r} must be a finite number of 0 or more.")
    return number
