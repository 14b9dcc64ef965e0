"""Key files change together; after every step each role can verify what another signs."""

from __future__ import annotations

import os
import stat
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.keys import key_folder
from tunemq_scheduler.security.key_folder import KeyFolder
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.signing.key_files import SUBMITTER_NAME, KeyFile, read_key_file
from tunemq_shared.signing.message_signing import MessageSigner


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    return key_folder(tmp_path / "keys", "ada", "ben")


def all_files(folder: KeyFolder) -> dict[str, KeyFile]:
    return {path.name: read_key_file(path) for path in folder.path.iterdir()}


def test_each_role_gets_only_the_keys_it_needs(folder):
    files = all_files(folder)
    whole = files["scheduler.toml"]

    assert set(files) == {"scheduler.toml", "worker.toml", "ada.toml", "ben.toml"}
    assert files["worker.toml"] == KeyFile(orders=whole.orders, events=whole.events)
    assert files["ada.toml"] == KeyFile(submitters={"ada": whole.submitters["ada"]})
    secrets = [
        key.secret
        for its in (whole.orders, whole.events, *whole.submitters.values())
        for key in its
    ]
    assert len(set(secrets)) == len(secrets) == 4


def test_only_the_owner_can_read_or_enter(folder, tmp_path):
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    for path in folder.path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    open_folder = tmp_path / "open"
    open_folder.mkdir(mode=0o755)
    for path in key_folder(open_folder).path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_existing_keys_are_kept(folder):
    before = all_files(folder)
    with pytest.raises(ConfigError, match=r"there are keys in .* already"):
        folder.create(["eve"])
    assert all_files(folder) == before


@pytest.mark.parametrize("name", ["scheduler", "worker", "", "a/b", "..\n", "x" * 65, "a\x1b[31m"])
def test_invalid_names_are_rejected(folder, tmp_path, name):
    with pytest.raises(ConfigError, match="a submitter cannot be called"):
        folder.add([name])
    with pytest.raises(ConfigError, match="a submitter cannot be called"):
        KeyFolder(str(tmp_path / "other")).create([name])
    assert not (tmp_path / "other").exists()


@given(st.sets(st.from_regex(SUBMITTER_NAME, fullmatch=True), min_size=1, max_size=3))
def test_every_valid_name_round_trips(tmp_path_factory, names):
    names -= {"scheduler", "worker"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)  # do not measure the disk's speed
        folder = key_folder(tmp_path_factory.mktemp("names"), *names, "ann")
    assert set(folder.keys().submitters) == {*names, "ann"}
    for name in names:
        assert list(read_key_file(folder.path / f"{name}.toml").submitters) == [name]


def test_only_changed_files_are_to_be_copied(folder):
    assert folder.add(["eve"]) == ["scheduler.toml", "eve.toml"]
    assert folder.rotate(["worker"]) == ["scheduler.toml", "worker.toml"]
    assert folder.rotate(["ada"]) == ["scheduler.toml", "ada.toml"]
    assert folder.promote() == ["scheduler.toml", "worker.toml", "ada.toml"]
    assert folder.remove(["eve"]) == ["scheduler.toml"]
    assert not (folder.path / "eve.toml").exists()


def test_roles_understand_each_other_between_two_steps(folder):
    """While files are copied, some machines have those of one step and others those of the next."""
    steps = [all_files(folder)]
    for change in (folder.rotate, folder.promote, folder.drop):
        change()
        steps.append(all_files(folder))
    for one, next_one in pairwise(steps):
        for files, others in ((one, next_one), (next_one, one)):
            head, worker, ada = (
                files[name] for name in ("scheduler.toml", "worker.toml", "ada.toml")
            )
            other_worker, other_ada = others["worker.toml"], others["ada.toml"]
            understand(head.orders_signer(), other_worker.orders_signer())
            understand(other_worker.events_signer(), head.events_signer())
            understand(head.submitter_signer("ada"), other_ada.submitter_signer("ada"))
            understand(other_ada.submitter_signer("ada"), head.submitter_signer("ada"))
            assert worker.orders == head.orders
            assert ada.submitters["ada"] == head.submitters["ada"]
    first, last = (files["scheduler.toml"] for files in (steps[0], steps[-1]))
    assert not {key.secret for key in first.orders} & {key.secret for key in last.orders}
    assert len(last.orders) == len(last.submitters["ben"]) == 1


def understand(one: MessageSigner, other: MessageSigner) -> None:
    assert other.open(one.close(b"said", b"place"), b"place") == b"said"


def test_steps_in_the_wrong_order_are_rejected_with_the_right_one(folder):
    with pytest.raises(ConfigError, match="nothing to drop"):
        folder.drop()
    with pytest.raises(ConfigError, match=r"signs already.*tunemq keys rotate"):
        folder.promote()
    folder.rotate()
    with pytest.raises(ConfigError, match=r"second key in .orders. already.*promote"):
        folder.rotate()
    with pytest.raises(ConfigError, match=r"does not sign yet.*promote"):
        folder.drop()
    folder.promote()
    with pytest.raises(ConfigError, match=r"signs already.*tunemq keys drop"):
        folder.promote()
    folder.drop()


def test_submitter_added_in_between_blocks_no_step(folder):
    folder.rotate()
    folder.add(["eve"])
    folder.promote()
    folder.drop()
    assert {len(its) for its in folder.keys().submitters.values()} == {1}


def test_unknown_names_are_reported_with_the_known_ones(folder):
    for change in (folder.rotate, folder.promote, folder.drop, folder.remove):
        with pytest.raises(
            ConfigError, match=r"no keys of 'eve' in .* of worker, journals, ada, ben"
        ):
            change(["eve"])
    with pytest.raises(ConfigError, match="ada has keys already"):
        folder.add(["ada"])


def test_folder_without_keys_is_reported(tmp_path):
    with pytest.raises(ConfigError, match="tunemq keys new"):
        KeyFolder(str(tmp_path / "missing")).rotate()
    with pytest.raises(ConfigError, match=r"scheduler\.toml cannot be read"):
        KeyFolder(str(tmp_path)).add(["ada"])


def test_interrupted_command_can_be_repeated(folder):
    """The file with all keys is written last, so the repeated command overwrites the others."""
    before = (folder.path / "scheduler.toml").read_bytes()
    folder.rotate()
    (folder.path / "scheduler.toml").write_bytes(before)
    (folder.path / ".scheduler.toml.new").write_bytes(b"half")

    folder.rotate()

    files = all_files(folder)
    assert files["worker.toml"].orders == files["scheduler.toml"].orders
    assert files["ada.toml"].submitters["ada"] == files["scheduler.toml"].submitters["ada"]
