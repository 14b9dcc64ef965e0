"""Fake trials and results for tests of loggers and displays."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tunemq_scheduler.core.trial_decisions import TrialDecision


class FakeTrial:
    """Has the attributes of a `TrialView`, which a test may change."""

    def __init__(self, number: int = 0, folder: str | Path = "", **config: Any) -> None:
        self.number = number
        self.trial_id = f"ab12_{number:05d}"
        self.trial_name = f"train_{self.trial_id}"
        self.local_path = os.path.join(folder, self.trial_name)
        self.config: dict[str, Any] = config or {"lr": 0.1, "act": "relu"}
        self.evaluated_params = dict(self.config)
        self.status = "RUNNING"
        self.last_result: dict[str, Any] = {}
        self.attempt = 1
        self.num_failures = 0
        self.hostname, self.node = "node-a", ""
        self.waits = ("", "")
        self.decisions: tuple[TrialDecision, ...] = ()

    def __str__(self) -> str:
        return self.trial_name

    def result(self, step: int = 1, **metrics: Any) -> dict[str, Any]:
        """Return a complete result and make it the trial's last one."""
        self.last_result = {
            **metrics,
            "training_iteration": step,
            "time_total_s": 0.5 * step,
            "timesteps_total": None,
            "done": False,
            "trial_id": self.trial_id,
            "hostname": self.hostname,
            "config": self.config,
        }
        return self.last_result
