"""Orders that no node could read end their search with the reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.plans import PLAN
from tunemq_scheduler.core.commands import ReattachTrial, StartTrial
from tunemq_scheduler.executors.celery_executor import CeleryTrialExecutor
from tunemq_shared.errors import ConfigError

ORDER = StartTrial("t1", 1, "n", 0, b"", {"cpu": 1.0}, (), 0, ())


class Sent(CeleryTrialExecutor):
    """Keeps the orders that would go to a node."""

    def __init__(self, plan: Any) -> None:
        self._plan = plan
        self.sent: list[Any] = []

    def _orders(self, incarnation: str) -> Any:
        keep = lambda *args, **_: self.sent.append(args)
        return SimpleNamespace(start=keep, reattach=keep, kill=keep)


@pytest.mark.parametrize(
    ("field", "told"), [("checkpoint_at_end", "checkpoint_at_end"), ("reuse", "reuse")]
)
@pytest.mark.parametrize("value", [None, "yes"])
def test_order_that_no_node_can_read_fails_its_search_and_is_not_sent(field, told, value):
    executor = Sent(msgspec.structs.replace(PLAN, **{field: value}))
    for send in (
        lambda: executor.start_trial(ORDER),
        lambda: executor.reattach_trial(
            ReattachTrial(ORDER, is_wanted=True, pause=False, stop=False)
        ),
    ):
        with pytest.raises(ConfigError, match=rf"No node can start trial t1: .*{told}"):
            send()
    assert executor.sent == []


def test_order_that_a_node_can_read_is_sent_as_it_is():
    executor = Sent(PLAN)
    executor.start_trial(ORDER)
    ((trial, epoch, horizon, start),) = executor.sent
    assert (trial, epoch, horizon) == ("t1", 1, ())
    assert start == PLAN.host_start(ORDER)
