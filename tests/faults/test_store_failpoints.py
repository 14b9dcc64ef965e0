"""A process of a search is killed at each failpoint, before and after each durable step."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.failpoints import FAILPOINTS
from tests.support.searches.chain_searches import ChainSearch, chain_searches
from tests.support.stores.object_servers import ObjectServer

pytestmark = [pytest.mark.faults, pytest.mark.integration]

#: The pass at which a process of each kind is killed: late enough for each to make progress.
TIMES = {"host": 2, "node": 6, "transfers": 4, "scheduler": 5}
#: Several of these belong to one upload.
TIMES_OF_OBJECTS = dict.fromkeys(
    ("upload.before_object", "upload.within_object", "upload.after_object"), 10
)
#: The process that reaches the failpoints of a search with a store, by the first part of the name;
#: `test_failpoints` and `test_journal_kills` cover the other failpoints.
WHO = {
    "cache": "host",
    "written": "host",
    "node": "node",
    "upload": "transfers",
    "download": "transfers",
    "delete": "scheduler",
    "journal": "scheduler",
}
OF_CHECKPOINTS = [name for name in FAILPOINTS if name.partition(".")[0] in WHO.keys() - {"journal"}]


@pytest.fixture
def start(tmp_path: Path, minio: ObjectServer, bucket: str) -> Iterator[Callable[..., ChainSearch]]:
    yield from chain_searches(tmp_path, minio, bucket)


def test_there_is_a_failpoint_before_and_after_each_durable_step() -> None:
    assert len(FAILPOINTS) >= 12
    for name in FAILPOINTS:
        part, _, step = name.partition(".")
        if step.startswith("before_"):
            rest = step.removeprefix("before_")
            assert f"{part}.after_{rest}" in FAILPOINTS or f"{part}.within_{rest}" in FAILPOINTS


@pytest.mark.parametrize("name", [*OF_CHECKPOINTS, "journal.before_append", "journal.after_append"])
def test_f19_a_kill_leaves_no_half_checkpoint_and_no_orphan(start, name: str) -> None:
    who = WHO[name.partition(".")[0]]
    # Large objects have parts of 16 MiB. A node downloads only when a trial moves to it.
    payload = 17 * 2**20 if name == "upload.within_object" else 30_000
    times = TIMES_OF_OBJECTS.get(name, TIMES[who])
    search = start(
        trials=2,
        steps=15,
        payload=payload,
        step_s=0.01,
        kept=1,
        variables={"TUNEMQ_FAILPOINTS": f"{name}=kill@{times}"},
    )
    code = search.ends(within=200)
    if who == "scheduler":
        assert code == -signal.SIGKILL, str(search)
        search.leaves_nothing()
    else:
        assert code == 0, str(search)
        search.is_undisturbed()
        search.left_nothing_in_the_store()
    search.is_whole()
