from __future__ import annotations

import importlib
import random
import sys

import numpy as np
import pytest

from tunemq_workers.trial_process import seeding

#: The generator behind numpy's legacy functions.
STATE = np.random.mtrand._rand


@pytest.fixture(autouse=True)
def _random_state_as_before():
    finders, python, arrays = list(sys.meta_path), random.getstate(), STATE.get_state()
    yield
    sys.meta_path[:] = finders
    random.setstate(python)
    STATE.set_state(arrays)


def drawn():
    return random.random(), float(STATE.random_sample())


def test_a_trial_draws_the_same_numbers_each_time():
    seeding.seed_trial(1, 2)
    first = drawn()
    drawn()
    seeding.seed_trial(1, 2)

    assert drawn() == first


@pytest.mark.parametrize(("experiment", "trial"), [(1, 3), (2, 2), (12, 0), (0, 12), (-1, 2)])
def test_other_trials_and_other_experiments_draw_others(experiment, trial):
    seeding.seed_trial(1, 2)
    first = drawn()
    seeding.seed_trial(experiment, trial)

    assert not set(first) & set(drawn())


def test_the_seeds_are_the_same_in_every_version():
    seeds = seeding._Seeds(0, 0)

    assert (seeds.python, seeds.numpy, seeds.torch) == PINNED


PINNED = (1436902317634446008, 844470882, 2646756816439984489)


@pytest.fixture
def late_torch(tmp_path, monkeypatch):
    """A fake torch module that records its seeds, for a later import."""
    (tmp_path / "torch.py").write_text(
        "seeds = []\nmanual_seed = seeds.append\nfrom math import pi\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    yield
    sys.modules.pop("torch", None)


def test_a_library_that_is_imported_later_is_seeded_then(late_torch):
    seeding.seed_trial(5, 6)

    torch = importlib.import_module("torch")

    assert torch.seeds == [seeding._Seeds(5, 6).torch]
    assert torch.__loader__.get_source("torch").startswith("seeds")
    assert "exec_module" not in vars(torch.__loader__)


def test_only_the_newest_trial_of_a_reused_host_seeds_what_is_imported_later(late_torch):
    seeding.seed_trial(5, 6)
    seeding.seed_trial(5, 7)

    torch = importlib.import_module("torch")
    assert torch.seeds == [seeding._Seeds(5, 7).torch]

    seeding.seed_trial(5, 8)
    assert torch.seeds[1:] == [seeding._Seeds(5, 8).torch]


def test_a_library_that_is_not_installed_is_not_found_either(monkeypatch):
    monkeypatch.setitem(seeding._SEEDERS, "no_such_library", lambda module, seeds: None)
    seeding.seed_trial(1, 1)

    for _ in range(2):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("no_such_library")
