"""The contract of `Syncer`, checked on the default one at each kind of address and on a user's.

An implementation runs the suite by subclassing `SyncerContract` with ``syncer`` and ``remote``
fixtures.
"""

from __future__ import annotations

import copy
import fnmatch
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.searches.checkpoints import contents
from tests.support.stores.object_servers import ObjectServer
from tunemq_scheduler.output.syncing.default_syncer import DefaultSyncer
from tunemq_scheduler.output.syncing.destinations import join
from tunemq_scheduler.output.syncing.syncer import Syncer
from tunemq_shared.base.errors import TuneError

DAY_S = 24 * 60 * 60


def aged(folder: Path, by_s: float = DAY_S) -> None:
    """Set back the modification times of the files by ``by_s`` seconds."""
    for path in folder.rglob("*"):
        if path.is_file():
            then = path.stat().st_mtime - by_s
            os.utime(path, (then, then))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "result.json").write_bytes(b'{"loss": 1}\n')
    (folder / "deep" / "er" / "weights").write_bytes(os.urandom(3 * 2**20 + 17))
    (folder / "deep" / "nothing").touch()
    (folder / "Zahl + 1, 100 % größer.txt").write_bytes(b"odd")
    aged(folder)
    return folder


class SyncerContract:
    """The test suite of the contract."""

    @pytest.fixture
    def target(self, tmp_path: Path) -> Path:
        return tmp_path / "target"

    @pytest.fixture
    def there(self, syncer: Syncer, remote: str, target: Path) -> Callable[[], dict[str, bytes]]:
        """Return a function that downloads the destination with another syncer."""

        def found() -> dict[str, bytes]:
            shutil.rmtree(target, ignore_errors=True)
            other = copy.deepcopy(syncer)
            assert other.sync_down(remote, str(target))
            other.wait()
            other.close()
            return contents(target)

        return found

    @pytest.mark.parity(152, 159)
    def test_uploaded_files_come_down_equal(
        self, syncer: Syncer, remote: str, source: Path, there: Callable[[], dict[str, bytes]]
    ) -> None:
        assert syncer.sync_up(str(source), remote) is True
        syncer.wait()
        assert there() == contents(source)

    def test_changed_files_go_up_and_files_removed_here_stay_there(
        self, syncer: Syncer, remote: str, source: Path, there: Callable[[], dict[str, bytes]]
    ) -> None:
        syncer.sync_up(str(source), remote)
        syncer.wait()
        before = contents(source)
        (source / "result.json").write_bytes(b'{"loss": 1}\n{"loss": 2}\n')
        (source / "new").write_bytes(b"new")
        (source / "deep" / "nothing").unlink()
        syncer.sync_up(str(source), remote)
        syncer.wait()
        assert there() == {**before, **contents(source)}

    def test_changed_files_replace_older_ones_on_the_way_down(
        self, syncer: Syncer, remote: str, source: Path, target: Path
    ) -> None:
        for content in (b"first", b"second, longer"):
            (source / "result.json").write_bytes(content)
            syncer.sync_up(str(source), remote)
            syncer.wait()
            syncer.sync_down(remote, str(target))
            syncer.wait()
            assert contents(target) == contents(source)

    def test_file_damaged_here_comes_down_again(
        self, syncer: Syncer, remote: str, source: Path, target: Path
    ) -> None:
        syncer.sync_up(str(source), remote)
        syncer.wait()
        for _ in range(2):
            syncer.sync_down(remote, str(target))
            syncer.wait()
            assert contents(target) == contents(source)
            (target / "result.json").unlink()
            (target / "deep" / "er" / "weights").write_bytes(b"spoilt")

    @pytest.mark.parity(144, 160)
    def test_excludes_apply_in_both_directions(
        self, syncer: Syncer, remote: str, source: Path, there: Callable[[], dict[str, bytes]]
    ) -> None:
        for name in ("checkpoint_1/a", "deep/checkpoint_2/b/c", "checkpoint_tmp9"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(b"x")
        everything = contents(source)
        syncer.sync_up(str(source), remote, ["./checkpoint_tmp*", "*/checkpoint_*"])
        syncer.wait()
        kept = {
            name: content
            for name, content in everything.items()
            if not name.startswith(("checkpoint_tmp", "deep/checkpoint_2"))
        }
        assert there() == kept
        local = Path(f"{source}_down")
        syncer.sync_down(remote, str(local), exclude=["checkpoint_1", "*.json"])
        syncer.wait()
        del kept["checkpoint_1/a"], kept["result.json"]
        assert contents(local) == kept

    @pytest.mark.parity(152)
    def test_deleting_removes_all_files_at_the_address_and_none_beside_it(
        self, syncer: Syncer, remote: str, source: Path, there: Callable[[], dict[str, bytes]]
    ) -> None:
        for name in ("checkpoint_1", "checkpoint_10"):
            (source / name).mkdir()
            (source / name / "weights").write_bytes(name.encode())
        syncer.sync_up(str(source), remote)
        syncer.wait()
        for _ in range(2):
            assert syncer.delete(join(remote, "checkpoint_1"))
            syncer.wait()
        left = contents(source)
        del left["checkpoint_1/weights"]
        assert there() == left

    def test_deleted_files_go_up_again(
        self, syncer: Syncer, remote: str, source: Path, there: Callable[[], dict[str, bytes]]
    ) -> None:
        (source / "größer").mkdir()
        (source / "größer" / "a").write_bytes(b"a")
        aged(source)
        for gone in (remote, join(remote, "deep"), join(remote, "größer")):
            syncer.sync_up(str(source), remote)
            syncer.wait()
            syncer.delete(gone)
            syncer.wait()
            syncer.sync_up(str(source), remote)
            syncer.wait()
            assert there() == contents(source)

    def test_missing_source_is_reported_and_brings_down_nothing(
        self, syncer: Syncer, remote: str, target: Path
    ) -> None:
        def fetch() -> None:
            syncer.sync_down(join(remote, "nowhere"), str(target))
            syncer.wait()

        with pytest.raises((TuneError, OSError), match="nowhere"):
            fetch()

    def test_missing_local_folder_is_an_error_that_names_it(
        self, syncer: Syncer, remote: str, source: Path
    ) -> None:
        def send() -> None:
            syncer.sync_up(str(source / "missing"), remote)
            syncer.wait()

        with pytest.raises((TuneError, OSError), match="missing"):
            send()

    @pytest.mark.parity(153)
    def test_waiting_for_nothing_returns_at_once(self, syncer: Syncer) -> None:
        syncer.wait()
        syncer.wait_or_retry()

    @pytest.mark.parity(153)
    def test_waiting_or_retrying_returns_when_all_files_are_there(
        self, syncer: Syncer, remote: str, source: Path, there: Callable[[], dict[str, bytes]]
    ) -> None:
        syncer.sync_up(str(source), remote)
        syncer.wait_or_retry()
        assert there() == contents(source)

    @pytest.mark.parity(154)
    def test_sync_is_due_once_in_a_period_in_each_direction(
        self, syncer: Syncer, remote: str, source: Path, target: Path
    ) -> None:
        syncer.sync_period = 1000
        assert syncer.sync_up_if_needed(str(source), remote) is True
        syncer.wait()
        assert syncer.sync_up_if_needed(str(source), remote) is False
        assert syncer.sync_down_if_needed(remote, str(target)) is True
        syncer.wait()
        assert syncer.sync_down_if_needed(remote, str(target)) is False
        syncer.reset()
        assert syncer.sync_up_if_needed(str(source), remote) is True
        syncer.wait()

    @pytest.mark.parity(156)
    def test_copied_syncer_behaves_the_same(
        self, syncer: Syncer, remote: str, source: Path, there: Callable[[], dict[str, bytes]]
    ) -> None:
        syncer.sync_period = 17
        syncer.sync_up_if_needed(str(source), remote)
        for other in (copy.deepcopy(syncer), pickle.loads(pickle.dumps(syncer))):
            assert (other.sync_period, other.sync_timeout) == (17, syncer.sync_timeout)
            other.wait()  # the upload in flight belongs to the original
            assert other.sync_up_if_needed(str(source), remote) is True
            other.wait()
            other.close()
        syncer.wait()
        assert there() == contents(source)

    @pytest.mark.parity(156)
    def test_syncer_can_be_closed_twice(self, syncer: Syncer) -> None:
        syncer.close()
        syncer.close()

    @pytest.mark.parity(157)
    def test_syncer_knows_its_kind_of_address(self, syncer: Syncer, remote: str) -> None:
        assert syncer.validate_upload_dir(remote) is True
        assert syncer.validate_upload_dir("") is True
        assert syncer.validate_upload_dir(None) is True
        with pytest.raises(ValueError, match=r"upload_dir='bucket/prefix'.* s3://bucket/prefix"):
            syncer.validate_upload_dir("bucket/prefix")


class TestOnAPath(SyncerContract):
    """The default syncer with a folder, for instance on NFS."""

    @pytest.fixture
    def syncer(self) -> Iterator[Syncer]:
        syncer = DefaultSyncer()
        yield syncer
        syncer.close()

    @pytest.fixture
    def remote(self, tmp_path: Path) -> str:
        return str(tmp_path / "mounted" / "experiment? a")


class TestOnAFileAddress(TestOnAPath):
    """The default syncer with the address of a folder."""

    @pytest.fixture
    def remote(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/mounted/experiment%20a"


class TestOnMinio(TestOnAPath):
    """The default syncer with an object store."""

    @pytest.fixture
    def remote(self, minio: ObjectServer, bucket: str) -> str:
        return minio.address(bucket, "results/experiment")


class CopyingSyncer(Syncer):
    """A syncer as a user might write it: it copies at once, with the standard library."""

    def sync_up(
        self, local_dir: str, remote_dir: str, exclude: Sequence[str] | None = None
    ) -> bool:
        self._copy(local_dir, remote_dir.removeprefix("mine://"), exclude or ())
        return True

    def sync_down(
        self, remote_dir: str, local_dir: str, exclude: Sequence[str] | None = None
    ) -> bool:
        self._copy(remote_dir.removeprefix("mine://"), local_dir, exclude or ())
        return True

    def delete(self, remote_dir: str) -> bool:
        shutil.rmtree(remote_dir.removeprefix("mine://"), ignore_errors=True)
        return True

    def _copy(self, source: str, target: str, exclude: Sequence[str]) -> None:
        def left_out(folder: str, names: list[str]) -> list[str]:
            paths = {name: os.path.relpath(os.path.join(folder, name), source) for name in names}
            patterns = [pattern.removeprefix("./") for pattern in exclude]
            return [
                name
                for name, path in paths.items()
                if any(fnmatch.fnmatch(path, pattern) for pattern in patterns)
            ]

        shutil.copytree(source, target, ignore=left_out, dirs_exist_ok=True)


class TestOfTheUsers(SyncerContract):
    """A user's syncer."""

    @pytest.fixture
    def syncer(self) -> Syncer:
        return CopyingSyncer()

    @pytest.fixture
    def remote(self, tmp_path: Path) -> str:
        return f"mine://{tmp_path}/elsewhere/experiment"
