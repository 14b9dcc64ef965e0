"""The library versions that a node reports."""

from __future__ import annotations

import importlib.metadata

from tunemq_workers.system.library_versions import installed_versions


def test_node_knows_the_versions_of_installed_libraries():
    found = installed_versions()
    assert found["numpy"] == importlib.metadata.version("numpy")
    assert found["scikit-learn"] == importlib.metadata.version("scikit-learn")


def test_first_folder_counts_and_libraries_that_trials_do_not_use_are_left_out(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, name in (
        (first, "torch-2.10.0+cu128.dist-info"),
        (second, "torch-1.0.dist-info"),
        (second, "scikit_learn-1.5.2.dist-info"),
        (second, "TensorFlow-2.20.0.dist-info"),
        (second, "jax-0.7.egg-info"),
        (second, "torchvision-0.2.dist-info"),
        (second, "numpy-is-fun"),
    ):
        (folder / name).mkdir(parents=True)
    paths = [str(tmp_path / "not-there"), str(first), str(second)]
    assert installed_versions(paths) == {
        "jax": "0.7",
        "scikit-learn": "1.5.2",
        "tensorflow": "2.20.0",
        "torch": "2.10.0+cu128",
    }
