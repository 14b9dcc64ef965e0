"""Converts Optuna's trials to JSON values, and back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial


def dump_trial(trial: FrozenTrial) -> dict[str, Any] | None:
    """Return everything that samplers read; None for a trial that JSON cannot represent exactly."""
    from optuna.distributions import distribution_to_json

    try:
        dumped = {
            "state": trial.state.name,
            "values": trial.values,
            "parameters": {
                name: [distribution_to_json(one), one.to_internal_repr(trial.params[name])]
                for name, one in trial.distributions.items()
            },
            "system": trial.system_attrs,
            "intermediate": list(trial.intermediate_values.items()),
        }
        read = load_trial(json.loads(json.dumps(dumped)))
    except (TypeError, ValueError):
        return None
    same = ("params", "distributions", "system_attrs", "intermediate_values", "values")
    return dumped if all(getattr(read, name) == getattr(trial, name) for name in same) else None


def load_trial(dumped: dict[str, Any]) -> FrozenTrial:
    """Return the trial that `dump_trial` dumped."""
    from optuna.distributions import json_to_distribution
    from optuna.trial import TrialState, create_trial

    distributions = {
        name: json_to_distribution(text) for name, (text, _) in dumped["parameters"].items()
    }
    return create_trial(
        state=TrialState[dumped["state"]],
        values=dumped["values"],
        distributions=distributions,
        params={
            name: distributions[name].to_external_repr(value)
            for name, (_, value) in dumped["parameters"].items()
        },
        system_attrs=dumped["system"],
        intermediate_values={int(step): value for step, value in dumped["intermediate"]},
    )
