"""F07, seen from a node: the outbox keeps unjournalled events in bounded memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.farm_support import Scheduler, order
from tests.integration.node_fixtures import node, scheduler, server
from tests.support.waiting import eventually
from tunemq_shared.broker.redis_keys import EVERYTHING, LAST_SENT_BYTES, OUTBOX_BYTES, SENT_BYTES
from tunemq_shared.protocol.messages import ResultReported, SlotFreed
from tunemq_workers.broker.outbox import BLOCK_BYTES
from tunemq_workers.runtime.frames import MAX_EVENT_BYTES

__all__ = ["node", "scheduler", "server"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]

RESULT_BYTES = 2**18
#: Enough steps to fill the outbox twice.
STEPS = 2 * OUTBOX_BYTES // RESULT_BYTES


def large_results(config):
    from pathlib import Path

    from tunemq_shared.trial.session import report

    for step in range(config["steps"]):
        report({"step": step, "padding": "x" * config["size"]})
        Path(config["reached"]).write_text(f"{step + 1}")


def test_f07_trials_wait_while_their_node_has_no_memory_for_results(node, scheduler, tmp_path):
    reached = Path(tmp_path, "reached")
    config = {"steps": STEPS, "size": RESULT_BYTES, "reached": str(reached)}
    scheduler.assign(node.instance_id, order("a", scheduler.start(large_results, config)))
    most, looks = 0, 0

    def stands_still() -> bool:
        nonlocal most, looks
        steps = int(reached.read_text() or 0) if reached.exists() else 0
        most, looks = (steps, 0) if steps != most else (most, looks + 1)
        scheduler.client.xtrim(scheduler.key, maxlen=0)  # read, but not journalled
        # The first steps may be slow on a busy machine.
        return most > STEPS * 0.4 and looks > 200

    eventually(stands_still, message=node.log)
    assert most < STEPS * 0.75, f"{most} of {STEPS} steps"
    scheduler.journal(node.instance_id, most // 2)
    eventually(lambda: int(reached.read_text() or 0) > most + STEPS // 8, message=node.log)
    scheduler.journal(node.instance_id, EVERYTHING)
    # The remaining events are acknowledged in advance, so the trial runs to its end.
    eventually(lambda: int(reached.read_text() or 0) == STEPS, message=node.log)


def test_f07_search_that_journals_nothing_blocks_no_other_and_fills_no_redis(
    node, scheduler, server, tmp_path
):
    reached = Path(tmp_path, "reached")
    config = {"steps": STEPS, "size": RESULT_BYTES, "reached": str(reached)}
    (tmp_path / "two").mkdir()
    other = Scheduler(server, tmp_path / "two", "two")
    hangs = order("a", scheduler.start(large_results, config))
    scheduler.assign(node.instance_id, hangs)
    last, looks = "", 0

    def stands_still() -> bool:
        nonlocal last, looks
        steps = reached.read_text() if reached.exists() else ""
        last, looks = (steps, 0) if steps != last else (last, looks + 1)
        return int(steps or 0) > STEPS * 0.4 and looks > 200

    eventually(stands_still, message=node.log)
    in_redis = scheduler.client.memory_usage(scheduler.key, samples=0)
    assert in_redis < SENT_BYTES + MAX_EVENT_BYTES
    config = {"steps": 50, "size": RESULT_BYTES, "reached": str(tmp_path / "of two")}
    scheduler.assign(node.instance_id, hangs, order("b", other.start(large_results, config)))

    def has_ended() -> bool:
        other.journal(node.instance_id, len(other.events()))
        return bool(other.said(SlotFreed))

    eventually(has_ended, message=node.log)
    assert reached.read_text() == last, "it holds more than its share"


@pytest.mark.parametrize(
    ("steps", "is_all"), [(5 * SENT_BYTES // RESULT_BYTES, True), (10**6, False)]
)
def test_f24_node_that_is_stopped_sends_what_no_scheduler_has_read(
    node, scheduler, tmp_path, steps, is_all
):
    reached = Path(tmp_path, "reached")
    config = {"steps": steps, "size": RESULT_BYTES, "reached": str(reached)}
    scheduler.assign(node.instance_id, order("a", scheduler.start(large_results, config)))
    enough = min(steps, (LAST_SENT_BYTES + 8 * SENT_BYTES) // RESULT_BYTES)
    eventually(lambda: reached.exists() and int(reached.read_text() or 0) >= enough)
    assert len(scheduler.events()) <= SENT_BYTES // RESULT_BYTES + 8
    node.process.terminate()
    assert node.process.wait(60) == 0
    results = scheduler.said(ResultReported)
    assert ("node.reports_dropped" not in node.log()) == is_all
    if is_all:
        assert len(results) == steps
    else:
        assert len(results) * RESULT_BYTES >= LAST_SENT_BYTES - BLOCK_BYTES
        assert len(results) * RESULT_BYTES <= LAST_SENT_BYTES + BLOCK_BYTES + MAX_EVENT_BYTES
