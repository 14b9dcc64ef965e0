"""`SyncConfig`: defaults, contradictions, and the choice of the syncer."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest

from tunemq_scheduler.experiment.select_syncer import copier_of
from tunemq_scheduler.output.syncing.background_syncer import BackgroundSyncer
from tunemq_scheduler.output.syncing.create_syncer import get_node_to_storage_syncer, make_syncing
from tunemq_scheduler.output.syncing.default_syncer import DefaultSyncer
from tunemq_scheduler.output.syncing.sync_config import SyncConfig
from tunemq_scheduler.output.syncing.syncer import DEFAULT_SYNC_PERIOD, DEFAULT_SYNC_TIMEOUT, Syncer
from tunemq_scheduler.settings.storage_settings import StorageLocation
from tunemq_shared.base.errors import ConfigError


class Idle(Syncer):
    """A user's syncer with its own kind of address."""

    def sync_up(self, local_dir: str, remote_dir: str, exclude: Any = None) -> bool:
        return True

    def sync_down(self, remote_dir: str, local_dir: str, exclude: Any = None) -> bool:
        return True

    def delete(self, remote_dir: str) -> bool:
        return True


@pytest.mark.parity(142)
def test_sync_period_and_timeout_have_defaults() -> None:
    assert (DEFAULT_SYNC_PERIOD, DEFAULT_SYNC_TIMEOUT) == (300, 1800)
    for syncer in (Idle(), DefaultSyncer()):
        assert (syncer.sync_period, syncer.sync_timeout) == (300, 1800)


@pytest.mark.parity(145)
def test_sync_config_has_defaults_and_is_immutable() -> None:
    config = SyncConfig()
    assert dataclasses.asdict(config) == {
        "upload_dir": None,
        "syncer": "auto",
        "sync_period": 300,
        "sync_timeout": 1800,
        "sync_artifacts": True,
        "sync_on_checkpoint": True,
        "uploads_waiting": 1,
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.sync_period = 1


@pytest.mark.parity(146)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"upload_dir": "s3://b", "syncer": None},
            r"syncer=None\) .*upload_dir='s3://b' needs one",
        ),
        ({"syncer": Idle()}, r"upload_dir=None\) .*needs to be told where to"),
        ({"upload_dir": ""}, "upload_dir=''.*an address or a path, or None"),
        ({"upload_dir": Path("/a")}, r"upload_dir=PosixPath\('/a'\).*an address"),
        ({"syncer": "rsync {source} {target}"}, "syncer='rsync.*'auto', None, or an object"),
        ({"syncer": Idle}, "syncer=<class .*Idle.*an object whose class derives"),
        ({"sync_period": -1}, "sync_period=-1.*seconds, 0 for no pause"),
        ({"sync_period": float("nan")}, "sync_period=nan"),
        ({"sync_period": "5m"}, "sync_period='5m'"),
        ({"sync_timeout": 0}, "sync_timeout=0.*seconds above 0"),
        ({"sync_timeout": float("inf")}, "sync_timeout=inf"),
        ({"sync_artifacts": 1}, "sync_artifacts=1.*True or False"),
        ({"sync_on_checkpoint": None}, "sync_on_checkpoint=None.*True or False"),
        ({"uploads_waiting": -1}, "uploads_waiting=-1.*a whole number from 0"),
        ({"uploads_waiting": True}, "uploads_waiting=True.*a whole number from 0"),
    ],
)
def test_sync_config_with_an_invalid_setting_is_rejected_with_its_name(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        SyncConfig(**settings)
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parity(149, 157)
@pytest.mark.parametrize(
    ("upload_dir", "message"),
    [
        (None, None),
        ("s3://bucket/prefix", None),
        ("file:///mnt/x", None),
        ("/mnt/x", None),
        ("~/x", None),
        ("gs://bucket", r"upload_dir='gs://bucket': the scheme gs:// is unknown; use s3://bucket"),
        ("bucket/prefix", "neither an address nor an absolute path; give s3://bucket/prefix"),
    ],
)
def test_upload_dir_of_an_unknown_kind_is_rejected_with_a_hint(
    upload_dir: str | None, message: str | None
) -> None:
    config = SyncConfig(upload_dir=upload_dir)
    if message is None:
        assert config.validate_upload_dir() is True
        return
    with pytest.raises(ValueError, match=message):
        config.validate_upload_dir()


@pytest.mark.parity(149)
def test_custom_syncer_validates_its_destinations() -> None:
    class Choosy(Idle):
        @classmethod
        def validate_upload_dir(cls, upload_dir: str | None) -> bool:
            if upload_dir != "gs://mine":
                raise ValueError("not mine")
            return True

    assert SyncConfig(upload_dir="gs://any", syncer=Idle()).validate_upload_dir() is True
    assert SyncConfig(upload_dir="gs://mine", syncer=Choosy()).validate_upload_dir() is True
    with pytest.raises(ValueError, match="not mine"):
        SyncConfig(upload_dir="gs://other", syncer=Choosy()).validate_upload_dir()


@pytest.mark.parity(161)
def test_sync_config_gives_a_syncer_or_none_or_an_error() -> None:
    assert get_node_to_storage_syncer(SyncConfig()) is None
    assert get_node_to_storage_syncer(SyncConfig(syncer=None)) is None
    default = get_node_to_storage_syncer(
        SyncConfig(upload_dir="s3://b", sync_period=7, sync_timeout=8)
    )
    assert isinstance(default, DefaultSyncer)
    assert (default.sync_period, default.sync_timeout) == (7, 8)
    own = Idle()
    assert get_node_to_storage_syncer(SyncConfig(upload_dir="x://b", syncer=own)) is own
    with pytest.raises(ValueError, match="functions and command templates are not taken"):
        SyncConfig(upload_dir="s3://b", syncer=print)


@pytest.mark.parity(147, 148)
def test_sync_config_without_a_destination_or_syncer_copies_nothing() -> None:
    assert copier_of(SyncConfig(), "e", StorageLocation("/e", "")) is None
    assert copier_of(SyncConfig(syncer=None), "e", StorageLocation("/e", "s3://b/e")) is None


@pytest.mark.parity(147)
def test_checkpoint_store_receives_the_other_files_too(tmp_path: Path) -> None:
    here = str(tmp_path / "e")
    store = "s3://b/e?endpoint=http://h:1"
    for config in (SyncConfig(), SyncConfig(upload_dir="s3://b")):
        callback = make_syncing(config, store, "e", here)
        assert (callback.remote_dir, callback.carries_checkpoints) == (store, False)


@pytest.mark.parity(147)
def test_upload_dir_without_a_checkpoint_store_receives_the_checkpoints_too(tmp_path: Path) -> None:
    here = str(tmp_path / "e")
    own = make_syncing(SyncConfig(upload_dir="x://b?k=v", syncer=Idle()), "", "e", here)
    assert (own.remote_dir, own.carries_checkpoints) == ("x://b/e?k=v", True)
    there = tmp_path / "there"
    path = make_syncing(SyncConfig(upload_dir=f"file://{there}"), "", "e", here)
    assert (path.remote_dir, path.carries_checkpoints) == (f"file://{there}/e", True)
    assert (there / "e").is_dir()


def test_unusable_destination_is_rejected_before_anything_starts(tmp_path: Path) -> None:
    here = tmp_path / "results" / "e"
    (tmp_path / "file").touch()
    for upload_dir, message in (
        (str(tmp_path / "file"), "cannot be used: Not a directory.*folder that you may write"),
        (str(tmp_path / "results"), "one is inside the other; choose another upload_dir"),
        (str(here), "one is inside the other; choose another upload_dir"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_syncing(SyncConfig(upload_dir=upload_dir), "", "e", str(here))


def test_syncer_that_cannot_be_copied_is_rejected(tmp_path: Path) -> None:
    class Locked(Idle):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    with pytest.raises(ConfigError, match=r"cannot be copied, .*lock.*__getstate__"):
        make_syncing(SyncConfig(upload_dir="x://b", syncer=Locked()), "", "e", str(tmp_path))


def test_base_class_of_the_default_syncer_can_be_subclassed() -> None:
    assert issubclass(DefaultSyncer, BackgroundSyncer)
    assert issubclass(BackgroundSyncer, Syncer)
