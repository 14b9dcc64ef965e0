"""S08: an attacker with write access to the bucket cannot replace a trial's checkpoint.

The forger has valid keys and makes no mistake: objects, sizes and hashes agree. Only the journal
shows that the checkpoint is not the original.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.commands import run_tunemq
from tests.support.searches.chain_searches import ChainSearch, chain_searches
from tests.support.stores.object_servers import ObjectServer
from tunemq_shared.checkpoints.open_store import open_objects
from tunemq_shared.objects.object_store import ObjectStore
from tunemq_shared.protocol import messages as m

pytestmark = [pytest.mark.faults, pytest.mark.integration, pytest.mark.security]


@pytest.fixture
def start(tmp_path: Path, minio: ObjectServer, bucket: str) -> Iterator[Callable[..., ChainSearch]]:
    yield from chain_searches(tmp_path, minio, bucket)


def forge(objects: ObjectStore, key: str, content: bytes) -> None:
    """Put another checkpoint in the place of one, with a manifest that is in order."""
    name = f"{key}/manifest.json"
    manifest = json.loads(objects.get_bytes(name, limit=2**20))
    (entry,) = [file for file in manifest["files"] if file["name"] == "payload"]
    sha256 = hashlib.sha256(content).hexdigest()
    del manifest["objects"][entry["sha256"]]
    entry |= {"size": len(content), "sha256": sha256}
    manifest["objects"][sha256] = f"{key}/{sha256}"
    objects.put_bytes(f"{key}/{sha256}", content)
    objects.put_bytes(name, json.dumps(manifest, indent=1).encode())


@pytest.mark.slow
def test_s08_forged_checkpoint_is_named_and_the_previous_one_used(start, tmp_path):
    search = start(trials=1, steps=30, save_every=10, step_s=0.05, kept=3, gate=20)
    trial = search.trial(0)
    before = search.wait_for(m.CheckpointCommitted, trial=trial, n=1).event
    forged = search.wait_for(m.CheckpointCommitted, trial=trial, n=2).event
    objects = open_objects(search.store_address())
    forge(objects, forged.key, b"the forger's")
    folder = search.folder / "search"
    told = run_tunemq(tmp_path, "checkpoints", "verify", str(folder), forged.key, code=1)
    assert "manifest.json is damaged: expected SHA-256" in told.stdout
    shutil.rmtree(folder / ".cache")
    assert search.kill_the_node()
    search.open_gate(30)
    found = search.wait_for(m.CheckpointDamaged, trial=trial).event
    assert search.ends() == 0, str(search)
    assert (found.key, found.instead) == (forged.key, before.key)
    assert forged.key in search.said.decode()
    assert "is damaged" in search.said.decode()
    search.is_undisturbed()
