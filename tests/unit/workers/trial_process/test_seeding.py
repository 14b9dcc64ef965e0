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


def test_trial_draws_the_same_numbers_each_time():
    seeding.seed_trial(1, 2)
    first = drawn()
    drawn()
    seeding.seed_trial(1, 2)

    assert drawn() == first


@pytest.mark.parametrize(("experiment", "trial"), [(1, 3), (2, 2), (12, 0), (0, 12), (-1, 2)])
def test_other_trials_and_experiments_draw_other_numbers(experiment, trial):
    seeding.seed_trial(1, 2)
    first = drawn()
    seeding.seed_trial(experiment, trial)

    assert not set(first) & set(drawn())


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


def torch_seed(experiment, trial):
    source = random.Random(f"tunemq {experiment} {trial}")
    return [source.getrandbits(bits) for bits in (64, 32, 63)][-1]


def test_seeds_are_the_same_in_every_version(late_torch):
    random.seed(1436902317634446008)
    STATE.seed(844470882)
    expected = drawn()
    seeding.seed_trial(0, 0)
    assert drawn() == expected
    assert importlib.import_module("torch").seeds == [2646756816439984489]


def test_library_imported_later_is_seeded_then(late_torch):
    seeding.seed_trial(5, 6)

    torch = importlib.import_module("torch")

    assert torch.seeds == [torch_seed(5, 6)]
    assert torch.__loader__.get_source("torch").startswith("seeds")
    assert "exec_module" not in vars(torch.__loader__)


def test_only_the_newest_trial_of_a_reused_process_seeds_later_imports(late_torch):
    seeding.seed_trial(5, 6)
    seeding.seed_trial(5, 7)

    torch = importlib.import_module("torch")
    assert torch.seeds == [torch_seed(5, 7)]

    seeding.seed_trial(5, 8)
    assert torch.seeds[1:] == [torch_seed(5, 8)]


def test_missing_library_stays_missing(monkeypatch):
    monkeypatch.setitem(seeding._SEEDERS, "no_such_library", ("seed", 8))
    seeding.seed_trial(1, 1)

    for _ in range(2):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("no_such_library")
