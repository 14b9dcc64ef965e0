"""kill -9 of trial processes and nodes whose checkpoints are in a real object store."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.searches.chain_searches import ChainSearch, chain_searches
from tests.support.stores.object_servers import ObjectServer
from tunemq_shared.protocol import messages as m

pytestmark = [pytest.mark.faults, pytest.mark.integration]

Start = Callable[..., ChainSearch]
#: A node's death also repeats waiting and running uploads.
INTERVALS_OF_A_NODE = 3


@pytest.fixture
def start(tmp_path: Path, minio: ObjectServer, bucket: str) -> Iterator[Start]:
    yield from chain_searches(tmp_path, minio, bucket)


def kill_trials(search: ChainSearch, kills: int, chance: random.Random) -> int:
    done = 0
    while done < kills and search.pause(chance, 0.05, 0.4):
        done += search.kill_a_trial(chance)
    return done


def check(search: ChainSearch, most_repeated: int) -> None:
    assert search.ends(within=200) == 0, str(search)
    search.is_undisturbed()
    assert max(search.repeats(), default=0) <= most_repeated, (search.repeats(), search)
    search.journal_gives_the_state()
    search.leaves_nothing()


@pytest.mark.parametrize("form", ["function", "class"])
def test_killed_trial_process_repeats_at_most_one_interval(start: Start, form: str) -> None:
    chance = random.Random(form)
    search = start(trials=3, steps=60, save_every=4, form=form, gate=40)
    assert kill_trials(search, 4, chance) == 4, str(search)
    search.open_gate(60)
    kill_trials(search, 2, chance)
    check(search, search.save_every)


def test_a_killed_node_repeats_at_most_three_intervals(start: Start) -> None:
    chance = random.Random(1)
    search = start(trials=2, steps=60, save_every=3, step_s=0.03, gate=40)
    for _ in range(2):
        assert search.pause(chance, 0.8, 1.2), str(search)
        search.kill_the_node()
    search.open_gate(60)
    check(search, INTERVALS_OF_A_NODE * search.save_every)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("round_", range(10))
def test_fifty_killed_trial_processes_and_nodes_lose_no_checkpoint(
    start: Start, round_: int
) -> None:
    chance = random.Random(round_)
    form = chance.choice(["function", "class"])
    search = start(trials=3, steps=150, save_every=5, form=form, step_s=0.02)
    assert kill_trials(search, 5, chance) == 5, str(search)
    check(search, search.save_every)

    search = start(trials=2, steps=250, save_every=5, form=form, step_s=0.03)
    nodes = 0
    while nodes < 5 and search.pause(chance, 0.5, 1.5):
        nodes += search.kill_the_node()
    assert nodes == 5, str(search)
    check(search, INTERVALS_OF_A_NODE * search.save_every)


def test_script_that_is_killed_is_restored_from_its_bucket_with_its_last_checkpoints(
    start: Start,
) -> None:
    """Only the last checkpoint is kept, and nothing of the script's machine."""
    options = {"trials": 2, "steps": 30, "save_every": 1, "kept": 1}
    first = start(gate=20, **options)
    for number in range(2):
        first.wait_for(m.ResultReported, trial=first.trial(number), step=20)
    first.open_gate(30)
    first.wait_for(m.ResultReported, trial=first.trial(0), step=22)
    first.process.kill()

    second = start(same_place=first, restores=True, **options)

    assert second.ends() == 0, str(second)
    second.is_undisturbed()
