"""Names and creation of folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunemq_scheduler.storage.folders import (
    MAX_NAME_BYTES,
    experiment_name,
    farm_results_folder,
    make_experiment_folder,
    make_trial_folder,
    replace_file,
    results_folder,
    safe_name,
)
from tunemq_shared.base.errors import ConfigError, StoreError


@pytest.mark.parametrize(
    ("given_name", "safe"),
    [
        ("train", "train"),
        ("<lambda>", "lambda"),
        ('a/b(c)<d>:"e"\\f|g?h*', "abcdefgh"),
        ("my run\t2", "my_run_2"),
        ("../../etc/passwd", "etcpasswd"),
        ("-rf", "rf"),
        ("ends.", "ends"),
        ("\x1b[31mred\x00", "31mred"),
        ("NUL", "_NUL"),
        ("com1.txt", "_com1.txt"),
        ("größe", "größe"),
        ("", "trial"),
        ("???", "trial"),
        ("\ud800x", "x"),
    ],
)
def test_folder_names_keep_only_characters_valid_on_every_system(given_name, safe):
    assert safe_name(given_name, "trial") == safe


@pytest.mark.parity(87)
@given(st.text())
def test_any_text_becomes_a_valid_folder_name(text):
    name = safe_name(text, "trial")
    assert name not in {"", ".", ".."}
    assert len(name.encode()) <= MAX_NAME_BYTES + 1
    assert not set(name) & set('/()<>:"\\|?*\x00\n')
    assert safe_name(name, "trial") == name


def test_long_name_is_cut_between_two_characters():
    assert len(safe_name("ü" * 200, "trial").encode()) == MAX_NAME_BYTES


def test_experiment_is_named_after_its_trainable_and_start_time():
    name = experiment_name("train<x>", 0.0)
    assert name.startswith("trainx_19")
    assert len(name) == len("trainx_1970-01-01_00-00-00")


@pytest.mark.parity(93)
def test_results_folder_is_the_setting_then_the_variable_then_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("TUNEMQ_RESULTS", str(tmp_path))
    assert results_folder("~/runs") == "/home/ada/runs"
    assert results_folder(None) == str(tmp_path)
    monkeypatch.delenv("TUNEMQ_RESULTS")
    assert results_folder(None) == "/home/ada/tunemq_results"


def test_generated_name_never_enters_an_older_folder(tmp_path):
    made = [make_experiment_folder(str(tmp_path), "run", is_new=True) for _ in range(3)]
    assert [os.path.basename(path) for path in made] == ["run", "run_2", "run_3"]


def test_chosen_name_enters_its_folder_again(tmp_path):
    first = make_experiment_folder(str(tmp_path / "new"), "run", is_new=False)
    assert make_experiment_folder(str(tmp_path / "new"), "run", is_new=False) == first


@pytest.mark.parity(149)
def test_results_folder_that_cannot_be_made_is_named_with_reason_and_fix(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        make_experiment_folder(str(tmp_path / "file"), "run", is_new=True)
    told = str(caught.value)
    assert f"{tmp_path}/file/run cannot be used: " in told
    assert "File exists" in told or "Not a directory" in told
    assert "RunConfig(storage_path=...) or $TUNEMQ_RESULTS" in told


def test_file_in_place_of_the_experiment_folder_is_rejected(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="File exists"):
        make_experiment_folder(str(tmp_path), "run", is_new=False)


def test_folder_without_permission_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="no permission to write"):
        make_experiment_folder(str(tmp_path), "run", is_new=True)


@pytest.mark.parity(90)
def test_trial_folder_is_made_with_its_parents_and_only_once(tmp_path):
    path = tmp_path / "experiment" / "trial"
    make_trial_folder(str(path))
    make_trial_folder(str(path))
    assert path.is_dir()


def test_trial_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "storage").write_text("")
    with pytest.raises(StoreError, match="trial cannot be made: Not a directory"):
        make_trial_folder(str(tmp_path / "storage" / "trial"))


@pytest.mark.parametrize("put", [Path.touch, lambda path: path.symlink_to("/")])
def test_file_with_the_name_of_a_trial_folder_is_moved_aside(put, tmp_path):
    put(tmp_path / "trial")

    make_trial_folder(str(tmp_path / "trial"))

    assert sorted(os.listdir(tmp_path)) == ["trial", "trial.not-a-file"]
    assert (tmp_path / "trial").is_dir()
    assert not (tmp_path / "trial").is_symlink()


def test_folder_with_the_name_of_a_file_is_moved_aside(tmp_path):
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "inner").write_text("")

    replace_file(str(tmp_path / "file"), b"new")

    assert (tmp_path / "file").read_bytes() == b"new"
    assert (tmp_path / "file.not-a-file" / "inner").exists()


def test_name_that_is_taken_elsewhere_gets_a_number(tmp_path):
    (tmp_path / "run_3").mkdir()
    taken = {"run", "run_2"}
    made = make_experiment_folder(str(tmp_path), "run", is_new=True, is_taken=taken.__contains__)
    assert made == str(tmp_path / "run_4")
    assert sorted(os.listdir(tmp_path)) == ["run_3", "run_4"]


def test_results_folder_may_be_a_file_address(tmp_path):
    assert results_folder(f"file://{tmp_path}/with%20space") == str(tmp_path / "with space")
    with pytest.raises(ConfigError, match="file:///path"):
        results_folder("file://elsewhere/folder")


def test_farm_results_are_in_its_store_if_that_is_a_folder(monkeypatch):
    monkeypatch.setenv("TUNEMQ_RESULTS", "/mine")
    assert farm_results_folder(None, "/shared/farm") == "/shared/farm"
    assert farm_results_folder("/shared/farm/", "file:///shared/farm") == "/shared/farm"
    assert farm_results_folder("/results", "s3://bucket/farm") == "/results"
    assert farm_results_folder(None, "s3://bucket/farm") == "/mine"
    assert farm_results_folder(None, None) == "/mine"


@pytest.mark.parametrize("store", ["tunemq/farm", "s3//tunemq/farm", "./farm"])
def test_farm_store_that_is_a_relative_folder_is_rejected(store):
    with pytest.raises(ConfigError, match=f"--store {store} is a folder only as seen from where"):
        farm_results_folder(None, store)
    assert farm_results_folder(None, "~/farm") == os.path.expanduser("~/farm")


def test_farm_with_two_results_folders_is_rejected():
    with pytest.raises(ConfigError, match=r"--store /shared/farm is a folder.*--results /results"):
        farm_results_folder("/results", "/shared/farm")
    with pytest.raises(ConfigError, match="--results s3://bucket is no folder"):
        farm_results_folder("s3://bucket", None)
