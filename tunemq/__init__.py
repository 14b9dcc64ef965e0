"""The public names, found lazily: ``import tunemq as tune``.

Nothing of ours, and no library, is imported before a name is asked for (PEP 562), because this
module is imported again in every trial host that forks, and by every script that only wants one
function. There is no logic here: each name lives where `_HOMES` says.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tunemq_scheduler.callback import Callback
    from tunemq_scheduler.config import CheckpointConfig, FailureConfig, RunConfig, TuneConfig
    from tunemq_scheduler.limits import TrialLimits
    from tunemq_scheduler.log_policy import LogPolicy
    from tunemq_scheduler.result import Result
    from tunemq_scheduler.result_grid import ResultGrid
    from tunemq_scheduler.run import run
    from tunemq_scheduler.schedulers import create_scheduler
    from tunemq_scheduler.search import create_searcher
    from tunemq_scheduler.search.domains import (
        choice,
        grid_search,
        lograndint,
        loguniform,
        qlograndint,
        qloguniform,
        qrandint,
        qrandn,
        quniform,
        randint,
        randn,
        sample_from,
        uniform,
    )
    from tunemq_scheduler.stopper import Stopper
    from tunemq_scheduler.syncing.config import SyncConfig
    from tunemq_scheduler.tuner import Tuner
    from tunemq_shared.checkpoint import Checkpoint
    from tunemq_shared.errors import TuneError
    from tunemq_shared.executables.executable import executable
    from tunemq_shared.parameters import with_parameters
    from tunemq_shared.resources import PlacementGroupFactory, with_resources
    from tunemq_shared.session import get_checkpoint, get_context, report
    from tunemq_shared.trainable import Trainable

__version__ = "0.1.0.dev0"

#: Module -> the public names that live there. A test holds it equal to the imports above.
_HOMES: Final[dict[str, tuple[str, ...]]] = {
    "tunemq_scheduler.callback": ("Callback",),
    "tunemq_scheduler.config": ("CheckpointConfig", "FailureConfig", "RunConfig", "TuneConfig"),
    "tunemq_scheduler.limits": ("TrialLimits",),
    "tunemq_scheduler.log_policy": ("LogPolicy",),
    "tunemq_scheduler.result": ("Result",),
    "tunemq_scheduler.result_grid": ("ResultGrid",),
    "tunemq_scheduler.run": ("run",),
    "tunemq_scheduler.schedulers": ("create_scheduler",),
    "tunemq_scheduler.search": ("create_searcher",),
    "tunemq_scheduler.search.domains": (
        "choice",
        "grid_search",
        "lograndint",
        "loguniform",
        "qlograndint",
        "qloguniform",
        "qrandint",
        "qrandn",
        "quniform",
        "randint",
        "randn",
        "sample_from",
        "uniform",
    ),
    "tunemq_scheduler.stopper": ("Stopper",),
    "tunemq_scheduler.syncing.config": ("SyncConfig",),
    "tunemq_scheduler.tuner": ("Tuner",),
    "tunemq_shared.checkpoint": ("Checkpoint",),
    "tunemq_shared.errors": ("TuneError",),
    "tunemq_shared.executables.executable": ("executable",),
    "tunemq_shared.parameters": ("with_parameters",),
    "tunemq_shared.resources": ("PlacementGroupFactory", "with_resources"),
    "tunemq_shared.session": ("get_checkpoint", "get_context", "report"),
    "tunemq_shared.trainable": ("Trainable",),
}
_HOME_OF: Final = {name: module for module, names in _HOMES.items() for name in names}

#: Ray Tune's sub-modules that are here too: ``tune.schedulers`` works without an import of its own.
_SUBMODULES: Final = frozenset(
    {
        "callback",
        "error",
        "experiment",
        "logger",
        "result_grid",
        "schedulers",
        "search",
        "stopper",
        "syncer",
        "trainable",
    }
)

__all__ = [
    "Callback",
    "Checkpoint",
    "CheckpointConfig",
    "FailureConfig",
    "LogPolicy",
    "PlacementGroupFactory",
    "Result",
    "ResultGrid",
    "RunConfig",
    "Stopper",
    "SyncConfig",
    "Trainable",
    "TrialLimits",
    "TuneConfig",
    "TuneError",
    "Tuner",
    "choice",
    "create_scheduler",
    "create_searcher",
    "executable",
    "get_checkpoint",
    "get_context",
    "grid_search",
    "lograndint",
    "loguniform",
    "qlograndint",
    "qloguniform",
    "qrandint",
    "qrandn",
    "quniform",
    "randint",
    "randn",
    "report",
    "run",
    "sample_from",
    "uniform",
    "with_parameters",
    "with_resources",
]


def __getattr__(name: str) -> Any:
    """The public name, imported on its first use and kept."""
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """The public names, for completion in an interactive session."""
    return sorted({*__all__, *_SUBMODULES, "__version__"})
