from __future__ import annotations

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from tunemq_workers.trial_process import thread_limits


@pytest.mark.parametrize(("cpus", "expected"), [(0, 1), (0.5, 1), (1, 1), (2.9, 2), (8, 8)])
def test_trial_has_as_many_threads_as_cpus_and_at_least_one(cpus, expected):
    assert thread_limits.for_resources({"cpu": cpus}) == expected


def test_trial_that_asks_for_no_cpus_has_one_thread():
    assert thread_limits.for_resources({"gpu": 1.0}) == 1


def test_setting_of_the_user_for_a_library_stays():
    said = thread_limits.variables(4, {"MKL_NUM_THREADS": "7", "PATH": "/bin"})

    assert said["MKL_NUM_THREADS"] == "7"
    assert {v for name, v in said.items() if name != "MKL_NUM_THREADS"} == {"4"}
    assert "PATH" not in said


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 1),
        ({"OMP_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "2,1"}, 2),
        ({"OMP_NUM_THREADS": "many"}, 1),
        ({"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "1"}, 2),
    ],
)
def test_loaded_libraries_get_the_setting_of_the_user_or_the_trials_cpus(given, expected):
    pytest.importorskip("numpy")
    with threadpool_limits(1):  # restores the limits at its end
        thread_limits.LoadedLibraries().limit(1, given)
        numbers = {lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"}

    assert numbers == {expected}
