"""The plan of an experiment that has no code and no folder, for tests that start no process."""

from __future__ import annotations

from typing import Final

from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_shared.protocol import messages as m

PLAN: Final = ExperimentPlan(
    experiment="x",
    experiment_id="0",
    events_key="",
    folder="/nowhere",
    trainable_name="train",
    code=m.BlobRef("", 0, ""),
    environment=m.Environment("", (), {}, ()),
)
