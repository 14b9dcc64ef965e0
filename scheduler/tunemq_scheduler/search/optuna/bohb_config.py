"""Reads the settings of BOHB, ``TuneBOHB(bohb_config=...)``."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tunemq_scheduler.search.objective import check_count, is_real
from tunemq_shared.base.errors import ConfigError

#: Keys of hpbandster's BOHB without a counterpart in Optuna, and what Optuna does instead.
_NOT_SETTABLE: Final = {
    "top_n_percent": "Optuna takes the best tenth, at most 25",
    "bandwidth_factor": "Optuna samples from the densities themselves",
    "min_bandwidth": "Optuna computes the smallest bandwidth",
}


@dataclass(frozen=True, slots=True)
class BOHBConfig:
    """The settings of BOHB; the defaults are those of the paper.

    Attributes:
        min_points_in_model: a budget with two observations more than this has a model; None for
            the number of hyperparameters plus 1.
        num_samples: the number of candidates of which the model chooses one.
        random_fraction: the share of configurations that are drawn at random.
    """

    min_points_in_model: int | None = None
    num_samples: int = 64
    random_fraction: float = 1 / 3


_NAMES: Final = tuple(BOHBConfig.__dataclass_fields__)


def read_bohb_config(config: Mapping[str, Any] | None) -> BOHBConfig:
    """Read and check a ``bohb_config``.

    Raises:
        ConfigError: a key is unknown or cannot be set, or a value is invalid.
    """
    if config is None:
        return BOHBConfig()
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"TuneBOHB(bohb_config={config!r}) is invalid: pass a dict, such as "
            "{'random_fraction': 0.2}."
        )
    for name in config:
        _check_name(name)
    settings = BOHBConfig(**config)
    who = "bohb_config"
    if settings.min_points_in_model is not None:
        check_count(who, "min_points_in_model", settings.min_points_in_model, least=1)
    check_count(who, "num_samples", settings.num_samples, least=1)
    fraction = settings.random_fraction
    if not is_real(fraction) or math.isnan(fraction) or not 0 <= fraction <= 1:
        raise ConfigError(
            f"{who}(random_fraction={fraction!r}) is invalid: pass a number from 0 to 1."
        )
    return settings


def _check_name(name: Any) -> None:
    if name in _NAMES:
        return
    if name in _NOT_SETTABLE:
        raise ConfigError(
            f"bohb_config has the key {name!r}, which TuneBOHB cannot set: "
            f"{_NOT_SETTABLE[name]}; remove it."
        )
    close = difflib.get_close_matches(str(name), _NAMES, 1)
    meant = f"did you mean {close[0]}?" if close else f"it takes {', '.join(_NAMES)}."
    raise ConfigError(f"bohb_config has the unknown key {name!r}; {meant}")
