"""Settings for checkpoints and storage: their meaning, and the rejected values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tunemq_scheduler.api.run import _checkpoint_config, run
from tunemq_scheduler.output.syncing.sync_config import SyncConfig
from tunemq_scheduler.output.terminal.reporter import CLIReporter, ProgressReporter
from tunemq_scheduler.settings.config import CheckpointConfig, RunConfig, TuneConfig
from tunemq_scheduler.settings.storage_settings import storage_of
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.checkpoints.checkpoint import Checkpoint


@pytest.mark.parametrize(
    ("given", "number"),
    [
        (1000, 1000),
        ("1000B", 1000),
        ("10kb", 10_000),
        ("10GiB", 10 * 2**30),
        ("1.5 MiB", 3 * 2**19),
        ("2TB", 2 * 10**12),
        (None, None),
    ],
)
def test_byte_limit_is_a_number_or_a_text_with_a_unit(given, number):
    assert CheckpointConfig(max_bytes=given).byte_limit == number


@pytest.mark.parametrize("given", [0, -1, "0MB", "ten", "10 boxes", 1.5, True])
def test_other_byte_limits_are_rejected(given):
    with pytest.raises(ConfigError, match=r"CheckpointConfig\(max_bytes="):
        CheckpointConfig(max_bytes=given)


@pytest.mark.parametrize("name", ["num_to_keep", "num_to_keep_in_experiment"])
@pytest.mark.parametrize("given", [0, -1, 1.0, True])
def test_number_of_checkpoints_to_keep_is_a_positive_integer(name, given):
    with pytest.raises(ConfigError, match=name):
        CheckpointConfig(**{name: given})


def test_resume_from_checkpoint_is_an_existing_folder(tmp_path):
    RunConfig(resume_from_checkpoint=str(tmp_path))
    RunConfig(resume_from_checkpoint=Checkpoint.from_dict({"n": 1}))
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint=.*nowhere.*folder"):
        RunConfig(resume_from_checkpoint=tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="resume_from_checkpoint=3"):
        RunConfig(resume_from_checkpoint=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [0, -2, True, 2.5, None])
def test_num_samples_is_a_positive_integer_or_endless(given):
    assert TuneConfig(num_samples=-1).num_samples == -1
    with pytest.raises(ConfigError, match=r"TuneConfig\(num_samples="):
        TuneConfig(num_samples=given)


def test_run_config_settings_of_another_type_are_rejected_with_their_names():
    with pytest.raises(ConfigError, match=r"sync_config=5\) is invalid: give a SyncConfig"):
        RunConfig(sync_config=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="storage_path=5"):
        RunConfig(storage_path=5)  # type: ignore[arg-type]


# --- destinations ---------------------------------------------------------------------------------

ADDRESS = "s3://bucket/prefix?endpoint=http://127.0.0.1:9000&region=us-east-1&path_style=true"


def test_local_results_folder_is_the_store(tmp_path):
    for given in (str(tmp_path), tmp_path, f"file://{tmp_path}"):
        assert storage_of(RunConfig(storage_path=given)) == (str(tmp_path), "")


def test_results_for_a_bucket_are_written_to_the_local_results_folder_first(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEMQ_RESULTS", str(tmp_path))
    place = storage_of(RunConfig(storage_path=ADDRESS))
    assert place.folder == str(tmp_path)
    assert place.store == ADDRESS


@pytest.mark.parity(146)
def test_upload_dir_is_the_older_way_to_name_the_bucket(tmp_path):
    sync = SyncConfig(upload_dir=ADDRESS)
    place = storage_of(RunConfig(storage_path=str(tmp_path), sync_config=sync))
    assert place == (str(tmp_path), ADDRESS)
    with pytest.raises(ConfigError, match=r"storage_path=.*upload_dir=.*leave one of them out"):
        storage_of(RunConfig(storage_path=ADDRESS, sync_config=sync))


@pytest.mark.parametrize("given", ["gs://bucket/prefix", "file://elsewhere/folder", "ftp://x/y"])
def test_address_of_an_unknown_kind_is_rejected_with_the_known_kinds(given):
    with pytest.raises(ConfigError, match="s3://bucket/prefix"):
        storage_of(RunConfig(storage_path=given))


def test_address_that_lost_a_slash_in_a_path_makes_no_folder():
    with pytest.raises(ConfigError, match="give it as a str"):
        storage_of(RunConfig(storage_path=Path("s3://bucket/prefix")))


# --- the older names ------------------------------------------------------------------------------


def older(**changes: Any) -> dict[str, Any]:
    return {
        "keep_checkpoints_num": None,
        "checkpoint_score_attr": None,
        "checkpoint_freq": 0,
        "checkpoint_at_end": False,
        **changes,
    }


@pytest.mark.parity(107)
def test_older_checkpoint_names_equal_checkpoint_config():
    given = older(keep_checkpoints_num=3, checkpoint_freq=2, checkpoint_at_end=True)
    assert _checkpoint_config(None, **given) == CheckpointConfig(
        num_to_keep=3, checkpoint_frequency=2, checkpoint_at_end=True
    )
    assert _checkpoint_config(None, **older()) == CheckpointConfig()


@pytest.mark.parity(107)
def test_min_before_a_score_means_that_lower_is_better():
    assert _checkpoint_config(None, **older(checkpoint_score_attr="min-loss")) == CheckpointConfig(
        checkpoint_score_attribute="loss", checkpoint_score_order="min"
    )
    assert _checkpoint_config(None, **older(checkpoint_score_attr="minutes")) == CheckpointConfig(
        checkpoint_score_attribute="minutes"
    )


@pytest.mark.parity(146)
def test_two_names_for_one_setting_are_rejected_with_both():
    with pytest.raises(ConfigError, match="checkpoint_config and keep_checkpoints_num=2"):
        _checkpoint_config(CheckpointConfig(), **older(keep_checkpoints_num=2))
    with pytest.raises(ConfigError, match="storage_path='a' and local_dir='b'"):
        run(lambda config: None, storage_path="a", local_dir="b")


@pytest.mark.parametrize(
    ("make", "name"),
    [(TuneConfig, "reuse_actors"), (CheckpointConfig, "checkpoint_at_end")],
)
def test_flag_that_is_no_bool_is_rejected_and_none_is_its_default(make, name):
    for value, means in ((None, False), (True, True), (np.bool_(1), True), (np.bool_(0), False)):
        assert getattr(make(**{name: value}), name) is means
    for value in ("yes", 1, 0.0, [], np.int64(1)):
        with pytest.raises(ConfigError, match=rf"{name}=.* is invalid: give True or False"):
            make(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("name", 5), ("name", b"x"), ("preload", "numpy"), ("preload", [3]), ("preload", 3)],
        *[("progress_reporter", 4), ("progress_reporter", ProgressReporter)],
    ],
)
def test_run_config_field_of_another_type_is_rejected_with_its_name(name, value):
    with pytest.raises(ConfigError, match=rf"^RunConfig\({name}=.* is invalid: give"):
        RunConfig(**{name: value})


@pytest.mark.parametrize("name", ["a/b", "/etc", "a\\b", "../../elsewhere"])
def test_experiment_name_with_a_folder_in_it_is_rejected_with_the_fix(name):
    with pytest.raises(
        ConfigError, match=r"RunConfig\(name=.*storage_path is for the parent folder"
    ):
        RunConfig(name=name)


@pytest.mark.parametrize("reporter", [None, CLIReporter(), ProgressReporter()])
def test_run_config_takes_a_progress_reporter(reporter):
    assert RunConfig(progress_reporter=reporter).progress_reporter is reporter
