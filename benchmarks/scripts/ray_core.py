"""The cost of a decision of Ray Tune's ASHA; prints it as a line of JSON."""

from __future__ import annotations

from asha_decision import asha_decisions_us
from measured import tell
from ray.tune.schedulers import ASHAScheduler


def ready_asha() -> ASHAScheduler:
    scheduler = ASHAScheduler(max_t=100, grace_period=10, reduction_factor=3)
    scheduler.set_search_properties("loss", "min")
    return scheduler


if __name__ == "__main__":
    tell({"asha_us": asha_decisions_us(ready_asha)})
