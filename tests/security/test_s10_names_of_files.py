"""S10: no name in a manifest, a listing, a bundle or a request leads out of its folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.memory_objects import MemoryObjects
from tests.support.searches.checkpoints import KEY, info
from tests.support.stores.object_servers import ServedFolder
from tunemq_scheduler.experiment.bring_experiment import _bring_files
from tunemq_scheduler.transport.event_batches import EventBatch
from tunemq_shared.base.errors import CheckpointCorrupt, StoreError, TransportError
from tunemq_shared.base.retrying import CancelToken
from tunemq_shared.base.safe_names import is_safe_name
from tunemq_shared.checkpoints.manifest import MANIFEST, FileEntry, make_manifest
from tunemq_shared.checkpoints.object_checkpoints import download
from tunemq_shared.objects.object_store import ObjectInfo
from tunemq_shared.protocol import messages as m

pytestmark = pytest.mark.security

LEADING_OUT = [
    "../out",
    "../../out",
    "a/../../out",
    "/tmp/out",
    "//out",
    "./out",
    "a/./out",
    "a//out",
    "a/..",
    "..",
    ".",
    "",
    "a/",
    "a\0/out",
]
#: Odd, and on the file systems of nodes nothing but names.
ONLY_ODD = ["C:\\out", "..\\out", "\uff0e\uff0e\uff0fout", "Model", "model", "a\u2044out", "…/out"]


def manifest_of(*names: str, content: bytes = b"x") -> tuple[bytes, str]:
    sha256 = hashlib.sha256(content).hexdigest()
    files = tuple(FileEntry(name, len(content), sha256) for name in names)
    data = make_manifest(info(), files, (), {sha256: f"{KEY}/{sha256}"})
    return data, hashlib.sha256(data).hexdigest()


def stored(data: bytes, content: bytes = b"x") -> MemoryObjects:
    objects = MemoryObjects()
    objects.put_bytes(f"{KEY}/{hashlib.sha256(content).hexdigest()}", content)
    objects.put_bytes(f"{KEY}/{MANIFEST}", data)
    return objects


@pytest.mark.parametrize("name", LEADING_OUT)
def test_s10_a_manifest_with_a_name_that_leads_out_writes_nothing(tmp_path: Path, name: str):
    data, sha256 = manifest_of("fine", name)
    target = tmp_path / "cache" / KEY
    with pytest.raises(CheckpointCorrupt, match="is not the name of a file below it"):
        download(stored(data), KEY, sha256, target, CancelToken())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_s10_odd_names_are_files_of_their_own_below_the_folder(tmp_path: Path):
    data, sha256 = manifest_of(*ONLY_ODD)
    target = tmp_path / "cache" / KEY
    download(stored(data), KEY, sha256, target, CancelToken())
    files = target / "files"
    found = {str(path.relative_to(files)) for path in files.rglob("*") if path.is_file()}
    assert found == set(ONLY_ODD)
    assert all(is_safe_name(name) for name in ONLY_ODD)
    assert not (tmp_path / "out").exists()


def test_s10_a_link_in_the_cache_is_not_followed_when_a_checkpoint_is_put_there(tmp_path: Path):
    data, sha256 = manifest_of("model")
    target, outside = tmp_path / "cache" / KEY, tmp_path / "outside"
    outside.mkdir()
    target.parent.mkdir(parents=True)
    target.symlink_to(outside)
    with pytest.raises(StoreError, match="cannot be put into"):
        download(stored(data), KEY, sha256, target, CancelToken())
    assert list(outside.iterdir()) == []


@given(st.lists(st.sampled_from(["..", ".", "", "a", "b\0", "/", "c"]), max_size=5))
def test_s10_safe_name_stays_below_any_folder(parts: list[str]):
    name = "/".join(parts)
    if is_safe_name(name):
        assert os.path.normpath(f"/root/{name}") == f"/root/{name}"
        assert "\0" not in name


class Listing(MemoryObjects):
    """A store that lists keys which TuneMQ cannot have written."""

    def list(self, prefix: str = ""):
        yield from (ObjectInfo(key, 1, 0.0) for key in sorted(self.objects) if prefix in key)


@pytest.mark.parametrize("name", [name for name in LEADING_OUT if name])
def test_s10_an_experiment_brought_from_a_store_stays_in_its_folder(tmp_path: Path, name: str):
    objects, folder = Listing(), tmp_path / "results" / "search"
    folder.mkdir(parents=True)
    objects.objects[name] = b"x"
    with pytest.raises(StoreError, match="an object of the name"):
        _bring_files(objects, folder)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.integration
@pytest.mark.parametrize("name", [name for name in LEADING_OUT if name])
def test_s10_a_served_folder_has_no_object_of_such_a_name(shared_served: ServedFolder, name: str):
    elsewhere = _state(Path("/tmp/out"))  # may belong to another user
    before = sorted(path.name for path in shared_served.served.iterdir())
    with contextlib.suppress(Exception):  # refused by the client, or by the server
        shared_served.client()._put_object(shared_served.create_bucket(), name, b"x", {})
    assert sorted(path.name for path in shared_served.served.iterdir()) == before
    assert [path for path in shared_served.folder.iterdir() if path.name == "out"] == []
    assert _state(Path("/tmp/out")) == elsewhere


def _state(path: Path) -> tuple[int, int, int] | None:
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        return found.st_ino, found.st_mtime_ns, found.st_size
    return None


def batch(*events: m.NodeEvent) -> EventBatch:
    return EventBatch(m.BatchRead("node", 1, len(events), "1-0"), m.encode(list(events)))


@pytest.mark.parametrize(
    "key",
    [
        "journal/000001.turns",
        "journal/lock",
        "train_ab_00000/result.json",
        "train_ab_00000/checkpoint_1-000001/manifest.json",
        "train_ab_00001/checkpoint_1-000001",
        "ab_00000/checkpoint_2-000001",
        "ab_00000/checkpoint_1-000001\n",
        "ab_00000/checkpoint_1-\u0661\u0661\u0661\u0661\u0661\u0661",
        "../victim_ab_00000/checkpoint_1-000001",
        ".hidden_ab_00000/checkpoint_1-000001",
        "x/../../../victim",
        "checkpoint_1-000001",
        "",
    ],
)
def test_event_about_a_file_that_is_no_checkpoint_of_its_trial_is_refused(key: str) -> None:
    trial, attempt = "ab_00000", 1
    for event in (
        m.CheckpointLost(trial, attempt, key, "", 0.0),
        m.CheckpointWritten(trial, attempt, 1, 1, key, "hash", 1),
        m.CheckpointCommitted(trial, attempt, 1, 1, key, "hash", 1),
    ):
        with pytest.raises(TransportError, match="is no checkpoint of attempt 1 of trial"):
            batch(event).events()
    own = "train_ab_00000/checkpoint_1-000001"
    assert len(batch(m.CheckpointLost(trial, attempt, own, "", 0.0)).events()) == 2
