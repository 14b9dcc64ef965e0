"""Searches that end badly, one after the other on a farm: none stands in the way of another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.farm_processes import Command, Farm, farms
from tests.support import eventually
from tunemq_shared import messages as m
from tunemq_shared import wire

pytestmark = [pytest.mark.faults, pytest.mark.slow]


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[Farm]:
    yield from farms(tmp_path)


def another_search(farm: Farm) -> Command:
    """Start a short search of another name."""
    executed = farm.folder / "executed by another"
    executed.mkdir()
    options = farm.folder / "another.json"
    options.write_text(
        json.dumps({"executed": str(executed), "trials": 1, "steps": 20, "step_s": 0.05})
    )
    return farm.scheduler("--name", "another", variables={"FARM_TEST_OPTIONS": str(options)})


def streams(farm: Farm) -> dict[str, int]:
    """The events streams that there are, and in how many seconds they expire; -1 never."""
    keys = farm.redis.client.keys(wire.events("*"))
    return {key.decode(): farm.redis.client.ttl(key) for key in keys}


def kept_for(farm: Farm, stream: str) -> list[bytes]:
    """What replies to nodes say of how far the events of a stream are journalled.

    A node that has forgotten the stream removes that by itself, at any moment.
    """
    client, field = farm.redis.client, wire.journalled(stream)
    said = [client.hget(key, field) for key in client.keys(wire.reply("*"))]
    return [one for one in said if one is not None]


def test_f03_a_search_goes_on_after_another_one_had_its_farm_meanwhile(farm):
    farm.worker("one")
    farm.scheduler(trials=2, steps=120, save_every=10, step_s=0.05, gate=60)
    farm.wait_for_steps(2, 25, within=60)
    farm.schedulers[0].kill()
    (abandoned,) = streams(farm)
    another = another_search(farm)
    eventually(lambda: (farm.redis.client.get(wire.STREAMS) or b"").decode() != abandoned)
    # Nodes keep what nobody has journalled for as long as its stream is there.
    assert abandoned not in streams(farm)
    assert another.ends(60) == 0, farm
    eventually(lambda: not kept_for(farm, abandoned))
    farm.open_gate(120)
    assert farm.scheduler().ends(90) == 0, farm
    farm.nothing_is_missing_or_doubled(2, 120)
    assert [event.is_cold for event in farm.all_of(m.ExperimentResumed)] == [True]
    assert all(ttl >= 0 for ttl in streams(farm).values()), streams(farm)


@pytest.mark.soak
def test_f03_a_search_that_took_its_farm_back_is_taken_over_again(farm):
    """The stream that it began then is its own for all that follow it."""
    farm.worker("one")
    farm.scheduler(trials=2, steps=150, save_every=10, step_s=0.05)
    farm.wait_for_steps(2, 15, within=60)
    farm.schedulers[0].kill()
    another = another_search(farm)
    another.says("another")
    another.kill()
    farm.scheduler()
    farm.wait_for_steps(2, 50, within=60)
    eventually(lambda: farm.all_of(m.ExperimentResumed), within=30)
    farm.schedulers[-1].kill()
    assert farm.scheduler().ends(90) == 0, farm
    farm.nothing_is_missing_or_doubled(2, 150)


def test_f03_a_search_that_ended_in_front_of_its_goodbye_says_it_later(farm):
    farm.worker("one")
    first = farm.scheduler(trials=1, steps=30, step_s=0.01, gate=20)
    farm.wait_for_steps(1, 1, within=60)
    # It says no goodbye that the next one would not know of, and leaves as if it was killed then.
    in_the_way = farm.results / "search" / "journal" / "scheduler.new"
    in_the_way.mkdir()
    farm.open_gate(30)
    assert first.ends(60) == 0, farm
    in_the_way.rmdir()
    assert farm.all_of(m.TrialFinished)
    ((stream, ttl),) = streams(farm).items()
    assert ttl == -1
    assert farm.scheduler().ends(60) == 0, farm
    assert streams(farm)[stream] >= 0
    for said in kept_for(farm, stream):  # none where the node has forgotten the search by itself
        assert said == str(wire.EVERYTHING).encode()
    # It is over for whoever comes next, and that is said without any node.
    farm.workers["one"].kill()
    assert farm.scheduler().ends(60) == 0, farm
    farm.nothing_is_missing_or_doubled(1, 30)


def test_f03_an_idle_scheduler_that_was_replaced_ends(farm):
    first = farm.scheduler(trials=1, steps=3, step_s=0.01)
    first.says("There is no worker")
    # What a successor does that found the lease run out.
    farm.redis.client.incrby(wire.TERM, 10)
    assert first.ends(60) == 75, farm
    assert "another one took its place" in first.said
