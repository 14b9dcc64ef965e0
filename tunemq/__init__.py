"""Public names of TuneMQ, imported lazily: ``import tunemq as tune``.

Importing this module imports no other module of TuneMQ and no library; each name is imported on its
first use (PEP 562). The reason: every forked trial process imports this module again, and so does
every script that needs a single function. `_HOMES` says where each name is defined.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tunemq_scheduler.api.run import run
    from tunemq_scheduler.api.tuner import Tuner
    from tunemq_scheduler.output.syncing.sync_config import SyncConfig
    from tunemq_scheduler.results.callback import Callback
    from tunemq_scheduler.results.result import Result
    from tunemq_scheduler.results.result_grid import ResultGrid
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
    from tunemq_scheduler.settings.config import (
        CheckpointConfig,
        FailureConfig,
        RunConfig,
        TuneConfig,
    )
    from tunemq_scheduler.settings.printed_line_policy import LogPolicy
    from tunemq_scheduler.settings.trial_limit_settings import TrialLimits
    from tunemq_scheduler.stopping.stopper import Stopper
    from tunemq_shared.base.errors import TuneError
    from tunemq_shared.checkpoints.checkpoint import Checkpoint
    from tunemq_shared.executables.executable import executable
    from tunemq_shared.trainable.parameters import with_parameters
    from tunemq_shared.trainable.resources import PlacementGroupFactory, with_resources
    from tunemq_shared.trainable.trainable import Trainable
    from tunemq_shared.trial.session import get_checkpoint, get_context, report

__version__ = "0.1.0.dev0"

#: Module -> the public names that it defines. A test compares it with the imports above.
_HOMES: Final[dict[str, tuple[str, ...]]] = {
    "tunemq_scheduler.results.callback": ("Callback",),
    "tunemq_scheduler.settings.config": (
        "CheckpointConfig",
        "FailureConfig",
        "RunConfig",
        "TuneConfig",
    ),
    "tunemq_scheduler.settings.trial_limit_settings": ("TrialLimits",),
    "tunemq_scheduler.settings.printed_line_policy": ("LogPolicy",),
    "tunemq_scheduler.results.result": ("Result",),
    "tunemq_scheduler.results.result_grid": ("ResultGrid",),
    "tunemq_scheduler.api.run": ("run",),
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
    "tunemq_scheduler.stopping.stopper": ("Stopper",),
    "tunemq_scheduler.output.syncing.sync_config": ("SyncConfig",),
    "tunemq_scheduler.api.tuner": ("Tuner",),
    "tunemq_shared.checkpoints.checkpoint": ("Checkpoint",),
    "tunemq_shared.base.errors": ("TuneError",),
    "tunemq_shared.executables.executable": ("executable",),
    "tunemq_shared.trainable.parameters": ("with_parameters",),
    "tunemq_shared.trainable.resources": ("PlacementGroupFactory", "with_resources"),
    "tunemq_shared.trial.session": ("get_checkpoint", "get_context", "report"),
    "tunemq_shared.trainable.trainable": ("Trainable",),
}
_HOME_OF: Final = {name: module for module, names in _HOMES.items() for name in names}

#: Submodules, loaded on first use: Ray Tune's names, and `testing`.
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
        "testing",
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
    """Import a public name on its first use and cache it."""
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return the public names, for completion in an interactive session."""
    return sorted({*__all__, *_SUBMODULES, "__version__"})
