"""10,000 GPUs, and ten times fewer nodes or more experiments: each event costs the same.

The tests use no clock: they count executed lines of Python, and bytes between processes.
`benchmarks/scripts/farm_scale.py` times the same farm; docs/scaling.md explains the results.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.simulation.cost_meters import Lines, Meter
from tests.simulation.large_farm import LargeFarm
from tests.simulation.large_nodes import GPUS

#: Nodes and experiments.
SMALL, MANY_NODES, MANY_EXPERIMENTS = (125, 4), (1_250, 4), (125, 40)
#: The cost of these must not grow with the number of nodes or experiments. (That of others does:
#: the supervisor checks each lease twice a second, and each turn each experiment's socket and each
#: node's orders.)
LOCAL = ("experiment: turn", "relay: from experiments", "redis: read")


class Found(NamedTuple):
    """Counts on one farm.

    Attributes:
        result: by part, lines per result.
        said: bytes from experiments to the supervisor per result.
        offer: by part, lines per offer while one experiment ends and another takes its place.
    """

    result: dict[str, float]
    said: float
    offer: dict[str, float]


def counted(nodes: int, experiments: int) -> Found:
    lines = Lines()
    meter = Meter(lines)
    farm = LargeFarm(nodes, experiments, meter)
    try:
        # By then results come evenly, and each trial has had its first.
        farm.run(35.0)
        assert farm.held() == nodes * GPUS
        farm.start_anew()
        said = farm.said()
        with lines.counted():
            while farm.nodes.seen["results"] < 300:
                farm.run(0.25)
        results = farm.nodes.seen["results"]
        per_result = {name: spent / results for name, spent in meter.spent.items()}
        said = (farm.said() - said) / results
        farm.start_anew()
        farm.stop(next(iter(farm.experiments.values())))
        farm.submit({"cpu": 1.0, "gpu": 1.0})
        with lines.counted():
            farm.run(1.0)
        assert farm.held() == nodes * GPUS
        offers = farm.seen["offers"]
        per_offer = {name: spent / offers for name, spent in meter.spent.items()}
        return Found(per_result, said, per_offer)
    finally:
        farm.close()


@pytest.fixture(scope="module")
def small() -> Found:
    return counted(*SMALL)


@pytest.mark.parametrize(
    "size", [pytest.param(MANY_NODES, marks=pytest.mark.soak), MANY_EXPERIMENTS]
)
def test_a_result_and_an_offer_cost_the_same_on_a_farm_ten_times_as_large(
    small: Found, size: tuple[int, int]
) -> None:
    large = counted(*size)

    for part in LOCAL:
        assert large.result[part] < 1.2 * small.result[part], part
    assert large.said < 1.2 * small.said
    for part in ("allocator: offers", "allocator: usage", "experiment: turn"):
        assert large.offer[part] < 1.2 * small.offer[part], part
