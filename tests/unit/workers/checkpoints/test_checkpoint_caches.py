"""Which checkpoints a node keeps on its disk, and for how long."""

from __future__ import annotations

import os
import shutil
from urllib.parse import quote

import pytest

from tests.unit.workers.fake_checkpoint_node import KEY, World, committed_ref, elsewhere
from tunemq_shared.broker import redis_keys
from tunemq_workers.checkpoints import cache_folders
from tunemq_workers.checkpoints.cache_disk import LeftoverCheckpoint
from tunemq_workers.checkpoints.checkpoint_messages import FetchAnswer


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def root_of(world):
    return str(world.folder / "node" / quote(KEY, safe=""))


LARGE = 50_000


def bytes_of(count):
    return os.urandom(count)


def test_cache_above_its_size_limit_removes_the_least_recently_used_first(tmp_path):
    world = World(tmp_path, cache_bytes=3 * (LARGE + 20_000))
    process = world.process()
    keys = []
    for _ in range(6):
        keys.append(process.save(bytes_of(LARGE)))
        world.finish(keys[-1])
    assert world.cache.size <= world.cache_bytes
    left = world.on_disk()
    assert left == keys[-len(left) :]
    assert len(left) >= 2


def test_cache_keeps_the_newest_two_copies_of_each_trial(world):
    process = world.process()
    keys = []
    for _ in range(5):
        keys.append(process.save(bytes_of(LARGE)))
        world.finish(keys[-1])
        assert world.on_disk() == keys[-2:]
    assert world.committed == keys


def test_older_fetched_copy_stays_as_long_as_its_process(world):
    process = world.process()
    keys = [process.save() for _ in range(2)]
    for key in keys:
        world.finish(key)
    old = elsewhere(world, "t/checkpoint_0-000001")
    reader = world.process("other", restore=(old,))
    reader.fetch(old)
    world.finish(old.key)
    assert world.on_disk() == [old.key, *keys]
    newer = process.save()
    world.finish(newer)
    assert world.on_disk() == [old.key, keys[1], newer]
    reader.die()
    assert world.on_disk() == [keys[1], newer]


def test_newest_copy_of_each_trial_is_removed_last(tmp_path):
    world = World(tmp_path, cache_bytes=3 * (LARGE + 20_000))
    process = world.process("a")
    newest = [process.save(bytes_of(LARGE))]
    world.finish(newest[0])
    process.die()
    other = world.process("b")
    for _ in range(6):
        newest[1:] = [other.save(bytes_of(LARGE))]
        world.finish(newest[1])
    assert set(newest) <= set(world.on_disk())


def test_checkpoint_in_use_by_a_process_stays_even_if_the_disk_is_full(tmp_path):
    world = World(tmp_path, cache_bytes=0)
    ref = elsewhere(world)
    process = world.process(restore=(ref,))
    process.fetch(ref)
    world.finish(ref.key)
    keys = [process.save(), process.save()]
    for key in keys:
        world.finish(key)
    assert world.on_disk() == sorted([ref.key, keys[-1]])  # the next may link to the last
    process.die()
    assert world.on_disk() == []


def test_uncommitted_checkpoint_stays(tmp_path):
    world = World(tmp_path, cache_bytes=0)
    process = world.process()
    keys = [process.save(), process.save()]
    process.die()
    assert world.on_disk() == keys


def test_files_shared_by_checkpoints_count_once(world):
    process = world.process()
    weights = bytes_of(10 * LARGE)
    for n in range(4):
        world.finish(process.save(weights, changing=bytes([n])))
    assert 10 * LARGE < world.cache.size < 20 * LARGE


def test_dead_process_leaves_no_unreported_files(world):
    process = world.process()
    told = process.save()
    process.ask()
    root = root_of(world)
    os.makedirs(os.path.join(root, "t", "checkpoint_1-000002", "files"))
    os.makedirs(os.path.join(root, ".staging"), exist_ok=True)
    with open(os.path.join(root, "t", "checkpoint_1-000002", "manifest.json"), "w") as file:
        file.write("whole, but not reported")
    process.die()
    assert world.on_disk() == [told]


def test_next_node_takes_over_committed_checkpoints_and_removes_the_rest(world):
    process = world.process()
    keys = [process.save(), process.save()]
    world.finish(keys[0])
    ref = committed_ref(world, keys[0])
    world.begin()
    assert world.on_disk() == keys[:1]
    assert world.process(attempt=2, restore=(ref,)).fetch(ref) == FetchAnswer(root_of(world))
    assert world.transfers.downloads == []
    assert world.cache.size > 0


@pytest.mark.parametrize("name", [b"\xff", b"", b"a/../b", b"\xc3\xa9", b"a b"])
def test_folder_that_a_trial_made_among_experiments_is_left_alone(world, name):
    os.makedirs(os.fsencode(world.folder / "node") + b"/tunemq%3Aevents%3A" + name.split(b"/")[0])
    world.begin()
    assert all(key.encode("ascii") for key in world.checkpoints.kept)
    assert len(world.checkpoints.kept) == (name == b"a/../b")


def test_next_node_opens_the_newest_left_folders_only_and_one_after_another(world, monkeypatch):
    """A trial can make any number of folders that look like the node's."""
    monkeypatch.setattr(cache_folders, "_MOST_OPENED", 2)
    for age in range(5):
        folder = world.folder / "node" / f"tunemq%3Aevents%3A{age}"
        folder.mkdir(parents=True)
        os.utime(folder, (1000 - age, 1000 - age))
    (world.folder / "node" / ".tunemq-trash-1").mkdir()
    world.begin(settles=False)
    most = 0
    while world.disk.done:
        most = max(most, len(world.disk.done))
        world.disk.done.pop(0)()
    assert most == 1
    assert set(world.checkpoints.kept) == {"tunemq:events:0", "tunemq:events:1"}
    left = sorted(path.name for path in (world.folder / "node").iterdir())
    assert left == ["tunemq%3Aevents%3A0", "tunemq%3Aevents%3A1"]


def test_left_folder_that_a_trial_uses_before_its_turn_stays(world, monkeypatch):
    process = world.process()
    key = process.save()
    world.finish(key)
    monkeypatch.setattr(cache_folders, "_MOST_OPENED", 0)
    world.begin(settles=False)
    ref = committed_ref(world, key)
    assert world.process(attempt=2, restore=(ref,)).fetch(ref) == FetchAnswer(root_of(world))
    assert world.on_disk() == [key]


def test_next_node_removes_a_manifest_that_is_too_large_without_reading_it(world):
    process = world.process()
    key = process.save()
    world.finish(key)
    os.truncate(os.path.join(root_of(world), key, "committed.json"), 2**40)  # a hole of 1 TiB
    world.begin()
    assert world.on_disk() == []


def test_checkpoints_taken_over_count_once(world):
    process = world.process()
    keys = [process.save(bytes_of(LARGE)), process.save(bytes_of(LARGE))]
    for key in keys:
        world.finish(key)
    taken = world.cache.size
    world.begin()
    assert world.cache.size == pytest.approx(taken, abs=2**14)
    for key in keys:
        world.cache.discard(world.cache.find(root_of(world), key))
    world.disk.settle()
    assert world.cache.size == 0


def test_next_node_ignores_files_of_others(world):
    (world.folder / "node" / "photos").mkdir(parents=True)
    world.begin()
    assert world.checkpoints.kept == ()
    assert (world.folder / "node" / "photos").exists()


def test_cache_of_an_experiment_is_removed_when_the_scheduler_no_longer_needs_it(world):
    process = world.process()
    world.finish(process.save())
    process.die()
    forget = world.checkpoints.forget_all_but
    assert world.checkpoints.kept == (KEY,)
    assert forget(set(), {KEY: 17}, set()) == set()
    assert forget({KEY}, {KEY: redis_keys.EVERYTHING}, set()) == set()
    assert forget(set(), {KEY: redis_keys.EVERYTHING}, set()) == {KEY}
    world.disk.settle()
    assert list((world.folder / "node").iterdir()) == []
    assert world.checkpoints.kept == ()
    assert len(world.cache) == world.cache.size == 0


def test_cache_that_the_scheduler_chose_is_left_to_it(world, tmp_path):
    process = world.process(cache=str(tmp_path / "its own"))
    key = process.save()
    world.finish(key)
    process.die()
    over = world.checkpoints.forget_all_but(set(), {KEY: redis_keys.EVERYTHING}, set())
    world.disk.settle()
    assert over == {KEY}
    assert (tmp_path / "its own" / key).exists()
    assert len(world.cache) == 0


def test_default_limit_of_the_cache_is_a_tenth_of_the_disk(tmp_path):
    world = World(tmp_path, cache_bytes=None, uploads_bytes=None)
    process = world.process()
    process.save()
    assert process.ask()
    share = shutil.disk_usage(tmp_path).total // 10
    assert (world.limits.copies, world.limits.uploads) == (share, share)


@pytest.mark.parametrize(("given", "share"), [(2**20, 2**20 // 10), (2**80, None)])
def test_default_limit_of_the_cache_is_a_tenth_of_what_the_node_may_use_of_its_disk(
    tmp_path, given, share
):
    world = World(tmp_path, cache_bytes=None, uploads_bytes=None, disk_bytes=given)
    assert world.process().ask()
    share = share or shutil.disk_usage(tmp_path).total // 10
    assert (world.limits.copies, world.limits.uploads) == (share, share)


def test_size_stays_right_where_new_files_have_the_inodes_of_removed_ones(world):
    """A file system gives the number of a removed file to a new one."""
    for number, inodes in enumerate(({(1, 7): 100}, {(1, 7): 5000, (1, 8): 1}), 1):
        key = f"t/checkpoint_1-{number:06d}"
        world.cache.take_over("root", [LeftoverCheckpoint(key, "h", 0.0, inodes)])
    assert world.cache.size == 5001
    world.cache.forget("root")
    assert world.cache.size == 0
