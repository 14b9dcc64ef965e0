"""Limits the threads of BLAS and OpenMP libraries in a trial to the number of its CPUs.

Environment variables limit libraries that are loaded later, threadpoolctl those that are preloaded.
A limit in the user's own environment takes precedence over the trial's CPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

_OPENMP: Final = "OMP_NUM_THREADS"
_BLAS: Final = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
VARIABLES: Final = (_OPENMP, *_BLAS, "NUMEXPR_NUM_THREADS")

#: The variables of a forkserver: a library that starts threads while it is preloaded would make
#: every child hang.
SINGLE: Final = dict.fromkeys(VARIABLES, "1")

#: Parts of the file names of libraries that threadpoolctl can limit.
_LIBRARIES: Final = (
    "openblas",
    "mkl_rt",
    "blis",
    "flexiblas",
    "libgomp",
    "libomp",
    "libiomp",
    "vcomp",
)


def for_resources(resources: Mapping[str, float]) -> int:
    """Return the number of threads for a trial: its CPUs, rounded down, at least 1."""
    return max(1, int(resources.get("cpu", 1)))


def variables(threads: int, given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for ``threads`` threads; those in ``given`` are kept."""
    return {name: given.get(name, str(threads)) for name in VARIABLES}


def mapped_libraries() -> list[str]:
    """Return the paths of the BLAS and OpenMP libraries in this process."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        paths = {line.split(maxsplit=5)[-1].rstrip("\n") for line in file if ".so" in line}
    return sorted(p for p in paths if any(part in p.rpartition("/")[2] for part in _LIBRARIES))


class LoadedLibraries:
    """The libraries that a forkserver has loaded; found once, limited in each child."""

    def __init__(self) -> None:
        self._controller: Any = None
        if mapped_libraries():
            from threadpoolctl import ThreadpoolController

            self._controller = ThreadpoolController()

    def limit(self, threads: int, given: Mapping[str, str]) -> None:
        """Limit each library to ``threads`` threads, or as the variables in ``given`` say."""
        torch = sys.modules.get("torch")
        openmp = _number(given, (_OPENMP,), threads)
        if self._controller is not None:
            self._controller.limit(limits={"openmp": openmp, "blas": _number(given, _BLAS, openmp)})
        if torch is not None:
            torch.set_num_threads(openmp)


def _number(given: Mapping[str, str], names: tuple[str, ...], otherwise: int) -> int:
    for name in names:
        # OpenMP allows a list with one number per nesting level.
        first = given.get(name, "").partition(",")[0].strip()
        if first.isdigit() and int(first) > 0:
            return int(first)
    return otherwise
