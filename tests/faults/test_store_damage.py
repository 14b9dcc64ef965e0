"""Damaged checkpoints in the store or in a node's cache."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.searches.chain import executed
from tests.support.searches.chain_searches import ChainSearch, chain_searches
from tests.support.stores.object_servers import ObjectServer
from tests.support.waiting import eventually
from tunemq_shared.checkpoints.open_store import open_objects
from tunemq_shared.objects.object_store import ObjectStore
from tunemq_shared.protocol import messages as m

pytestmark = [pytest.mark.faults, pytest.mark.integration]


@pytest.fixture
def start(tmp_path: Path, minio: ObjectServer, bucket: str) -> Iterator[Callable[..., ChainSearch]]:
    yield from chain_searches(tmp_path, minio, bucket)


def payloads(objects: ObjectStore, key: str) -> str:
    """The key of the object with a checkpoint's payload."""
    manifest = json.loads(objects.get_bytes(f"{key}/manifest.json", limit=2**20))
    (sha256,) = [file["sha256"] for file in manifest["files"] if file["name"] == "payload"]
    return manifest["objects"][sha256]


def vanishes(folder: Path) -> bool:
    """Remove a folder that another process may be using; return whether it is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def flip(objects: ObjectStore, damaged: str, before: str) -> None:
    data = bytearray(objects.get_bytes(damaged, limit=2**24))
    data[len(data) // 2] ^= 1
    objects.put_bytes(damaged, bytes(data))


def truncate(objects: ObjectStore, damaged: str, before: str) -> None:
    objects.put_bytes(damaged, objects.get_bytes(damaged, limit=2**24)[:-1])


def remove(objects: ObjectStore, damaged: str, before: str) -> None:
    objects.delete([damaged])


def swap(objects: ObjectStore, damaged: str, before: str) -> None:
    objects.put_bytes(damaged, objects.get_bytes(before, limit=2**24))


@pytest.mark.parity(103, 105)
@pytest.mark.parametrize("damage", [flip, truncate, remove, swap])
def test_f20_damage_in_the_store_is_found_and_the_previous_checkpoint_used(start, damage) -> None:
    search = start(trials=1, steps=30, save_every=10, step_s=0.05, kept=3, gate=20)
    trial = search.trial(0)
    before = search.wait_for(m.CheckpointCommitted, trial=trial, n=1).event
    damaged = search.wait_for(m.CheckpointCommitted, trial=trial, n=2).event
    folder = search.folder / "search"
    objects = open_objects(search.store_address())
    damage(objects, payloads(objects, damaged.key), payloads(objects, before.key))
    eventually(lambda: vanishes(folder / ".cache"))
    assert search.kill_the_node()
    search.open_gate(30)
    found = search.wait_for(m.CheckpointDamaged, trial=trial).event
    assert search.ends() == 0, str(search)

    assert (found.key, found.instead) == (damaged.key, before.key)
    said = search.said.decode()
    assert damaged.key in said
    assert before.key in said
    search.is_undisturbed()
    search.journal_gives_the_state()
    search.is_whole()


def test_f20_with_every_checkpoint_in_the_store_damaged_the_trial_ends_in_error(start) -> None:
    search = start(trials=1, steps=30, save_every=10, step_s=0.05, kept=3, gate=20)
    trial = search.trial(0)
    both = [search.wait_for(m.CheckpointCommitted, trial=trial, n=n).event for n in (1, 2)]
    objects = open_objects(search.store_address())
    for one in both:
        flip(objects, payloads(objects, one.key), "")
    eventually(lambda: vanishes(search.folder / "search" / ".cache"))
    assert search.kill_the_node()
    search.open_gate(30)
    assert search.ends() == 0, str(search)

    (result,) = search.results()
    assert result["status"] == "ERROR", str(search)
    assert result["step"] == 20, "recorded results stay"
    said = search.said.decode()
    assert "restart_errored=True" in said, str(search)
    (failed,) = search.all_of(m.TrialFailed)
    assert all(one.key in failed.error for one in both)
    assert max(executed(search.folder / "executed").popitem()[1]) == 20


def test_f20_damaged_cache_of_a_node_is_repaired_from_the_store(start) -> None:
    search = start(trials=1, steps=30, save_every=5, step_s=0.05, kept=3, gate=12)
    trial = search.trial(0)
    newest = search.wait_for(m.CheckpointCommitted, trial=trial, n=2).event
    file = search.folder / "search" / ".cache" / newest.key / "files" / "payload"
    os.chmod(file, 0o644)
    with file.open("r+b") as opened:
        opened.seek(5_000)
        opened.write(b"damaged")
    killed = search.trial_pids()
    search.kill(killed[0])
    search.open_gate(30)
    assert search.ends() == 0, str(search)

    assert search.all_of(m.CheckpointDamaged) == []
    assert len(search.all_of(m.TrialProcessDied)) == 1
    assert max(search.repeats(), default=0) <= search.save_every, search.repeats()
    search.is_undisturbed()
