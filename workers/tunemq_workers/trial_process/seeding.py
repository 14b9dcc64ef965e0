"""Random seeds of a trial: different in each trial, the same in each run of the experiment.

Without them two forks of one process draw the same numbers. `random` is seeded at once, and so are
numpy and torch if they are imported; otherwise they are seeded right after their import.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from operator import methodcaller
from types import ModuleType
from typing import Any, Final

#: By module, the function that seeds it, and the bits of its seed. numpy imports its random module
#: only when it is used; torch also seeds CUDA, without initialising it.
_SEEDERS: Final = {"numpy.random": ("seed", 32), "torch": ("manual_seed", 63)}

_Seeder = Callable[[ModuleType], object]


def seed_trial(experiment_seed: int, trial_number: int) -> None:
    """Seed `random`, numpy and torch for a trial, also if they are imported later."""
    for finder in [finder for finder in sys.meta_path if isinstance(finder, _SeedOnImport)]:
        sys.meta_path.remove(finder)
    # Seeding from a string uses SHA-512, so seeds of neighbouring trials are unrelated, and gives
    # the same numbers in every version of Python.
    source = random.Random(f"tunemq {experiment_seed} {trial_number}")
    random.seed(source.getrandbits(64))
    later: dict[str, _Seeder] = {}
    for name, (function, bits) in _SEEDERS.items():
        seeder = methodcaller(function, source.getrandbits(bits))
        if (module := sys.modules.get(name)) is None:
            later[name] = seeder
        else:
            seeder(module)
    if later:
        sys.meta_path.insert(0, _SeedOnImport(later))


class _SeedOnImport:
    """A finder that uses the other finders, and seeds a module after its code has run."""

    def __init__(self, seeders: dict[str, _Seeder]) -> None:
        self._seeders = seeders

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        seeder = self._seeders.pop(name, None)
        if seeder is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._seed_after(spec.loader, seeder)
                return spec
        self._seeders[name] = seeder  # not installed now; perhaps later
        return None

    def _seed_after(self, loader: Any, seeder: _Seeder) -> None:
        # Patch the loader instead of wrapping it: other code checks its type and asks it for
        # sources.
        execute = loader.exec_module

        def execute_and_seed(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            seeder(module)

        loader.exec_module = execute_and_seed
