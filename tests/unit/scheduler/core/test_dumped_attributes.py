"""Each attribute of the runner's state is in the snapshot; a new one that is not fails here."""

from __future__ import annotations

from tunemq_scheduler.core.checkpoint_limits import ExperimentLimits
from tunemq_scheduler.core.nodes.slots import SlotTable
from tunemq_scheduler.core.placement.placement import Placement
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.runner_snapshot import _State
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.core.trials.kept_checkpoints import (
    CheckpointManager,
    RetentionPolicy,
    TrialCheckpoint,
)

#: Attributes of a runner beside its state: wiring, and data that is stored elsewhere.
WIRING = {"_usage", "commands", "placement"}
ELSEWHERE = {"finished", "_changed"}
#: Attributes that are derived from the others.
WORKED_OUT = {"left_behind", "awaited"}
#: Attributes that the snapshot stores under other names.
RENAMED = {"queue": {"pending", "paused", "passed_over"}}


def test_runner_dump_holds_each_attribute_of_the_runner() -> None:
    has = set(vars(TrialRunner(RunnerSettings())))
    known = has - WIRING - ELSEWHERE - WORKED_OUT - set(RENAMED)
    written = set(_State.__struct_fields__) - {"version"} - set().union(*RENAMED.values())
    assert written == known


def test_runner_dump_holds_each_attribute_of_its_parts() -> None:
    runner = TrialRunner(RunnerSettings())
    assert set(vars(SlotTable())) == {"placement", "_held", "_on_node", "_attempts"}
    assert set(vars(Placement())) == {
        "_nodes",
        "_buckets",
        "_in_bucket",
        "_aside",
        "_reserved",
        "_reserves",
        "_touched",
        "_could_hold",  # derived from the nodes
    }
    assert set(vars(runner.queue)) == {
        "_is_apart",
        "_line_is_over",
        "freed",
        "_due",
        "_now",
        "_trials",
        # The position of each trial in the queue, which is derived from the trial.
        "_places",
        "_lines",
        "_later",
        "_fell_with",
        "_tickets",
    }
    assert set(vars(runner.book)) == {
        "_settings",
        "_live",
        "_forget",
        "_references",
        "_limits",
        "_orders",
        "_writers",
        "_uploads",
    }
    assert set(vars(ExperimentLimits(RetentionPolicy()))) == {
        "_rule",
        "_is_active",
        "_entries",
        "_worst",
        "_best",
        "_bytes",
        "_may_go",
    }
    assert set(CheckpointManager.__slots__) == {"_attempt", "_kept", "rule", "uploading"}
    assert TrialCheckpoint.__struct_fields__[-2:] == ("is_wanted", "is_damaged")
