"""What a version wrote that did not know GPUs one by one is read by this one."""

from __future__ import annotations

import msgspec

from tests.unit.scheduler.stories import Story
from tunemq_scheduler.core.runner import TrialRunner
from tunemq_scheduler.core.snapshot import dump
from tunemq_shared import messages as m

JOINED = m.NodeJoined("g.1", "g", "host", "127.0.0.1", {"cpu": 4.0, "gpu": 2.0})


def test_a_snapshot_without_gpus_is_read_and_its_trials_hold_some_of_them() -> None:
    story = Story()
    story.tell(JOINED)
    story.tell(m.ConfigSuggested(0, "a", b"", "", {"cpu": 1.0, "gpu": 1.0}))
    story.choose("a")
    state = msgspec.msgpack.decode(dump(story.runner))
    for name in ("offers", "giving_way", "passed_over"):
        del state[name]
    placement, held, on_node, _ = state["slots"]
    state["slots"] = [placement[:3], held, on_node]
    state["nodes"] = [node[:6] for node in state["nodes"]]
    for trial in state["live"]:
        del trial["preemptions"]

    runner = TrialRunner.load(story.settings, msgspec.msgpack.encode(state), {})

    assert runner.slots.held_by("a", 1).devices == {"0": 1.0}
    assert runner.placement.free == {"cpu": 5.0, "gpu": 1.0}
    assert runner.placement.fit({"gpu": 2.0}) is None
    runner.handle(m.TrialFinished("a", 1))
    runner.handle(m.HostFreed("a", 1))
    assert runner.placement.fit({"gpu": 2.0}) == "g.1"


def test_a_node_that_joined_before_is_read() -> None:
    entry = msgspec.msgpack.decode(m.encode([m.Entry(JOINED)]))
    event, answers = entry[0]
    assert event[0] == "joined"
    before = msgspec.msgpack.encode([[event[:6], answers]])
    assert m.decode_entries(before) == [m.Entry(JOINED)]
