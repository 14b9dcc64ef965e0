"""The executor that runs a trial in the script's own thread."""

from __future__ import annotations

import queue

from tests.support.searches.plans import PLAN
from tunemq_scheduler.core.commands import StartTrial
from tunemq_scheduler.transport.in_process_executor import InProcessExecutor, _Queues
from tunemq_shared.protocol import messages as m


def test_closing_ends_a_trial_that_waits_for_its_next_order() -> None:
    executor = InProcessExecutor({"cpu": 1.0})
    executor.open(PLAN)
    executor.start_trial(StartTrial("t", 3, "here", 0, b"", {"cpu": 1.0}, (), 0, None))
    executor.close()
    waiting = _Queues(queue.SimpleQueue(), executor._notices)
    assert waiting.wait() == m.TrialOrder("t", 3, (), stop=True)
