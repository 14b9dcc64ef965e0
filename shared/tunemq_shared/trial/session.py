"""The functions of user code about its trial: `report`, `get_context`, `get_checkpoint`.

A process runs one trial at a time; the runner makes its `TrialSession` the current one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tunemq_shared.base.errors import TuneError
from tunemq_shared.checkpoints.checkpoint import Checkpoint
from tunemq_shared.checkpoints.checkpoint_sink import CheckpointSink
from tunemq_shared.trial.metrics import named
from tunemq_shared.trial.trial_context import TuneContext
from tunemq_shared.trial.trial_session import TrialSession

__all__ = [
    "CheckpointSink",
    "TrialSession",
    "active",
    "current",
    "get_checkpoint",
    "get_context",
    "report",
    "running",
]

_current: TrialSession | None = None


def current() -> TrialSession | None:
    """The session of the trial that runs in this process, or None."""
    return _current


@contextmanager
def active(session: TrialSession) -> Iterator[TrialSession]:
    """Make ``session`` the current one, for the functions that user code calls."""
    global _current
    before, _current = _current, session
    try:
        yield session
    finally:
        _current = before


def running(caller: str) -> TrialSession:
    """The session of the running trial, for the public function ``caller``.

    Raises:
        TuneError: No trial runs in this process.
    """
    if _current is None:
        raise TuneError(
            f"{caller}() was called outside of a trial. Call it in the function that you give to "
            f"Tuner(...); to try that function, run Tuner(...).fit() with num_samples=1."
        )
    return _current


def report(
    metrics: dict[str, Any] | None = None, *, checkpoint: Checkpoint | None = None, **kwargs: Any
) -> None:
    """Report a result of the running trial, optionally with the checkpoint that contains it.

    Call it once per step. Metrics may also be given as keywords. It returns when the next step may
    begin: it blocks while the trial scheduler has to decide whether the trial continues, while the
    node's memory for results is full, and with a checkpoint while it is copied and its uploads are
    behind. If the trial must end it does not return, and ``finally`` blocks run. Several threads of
    the trial's process may call it: their reports become successive steps. A signal handler may not
    during a report: let it set a flag. The trial keeps its slot until the function returns: where
    it ends in a thread, end the others.

    Args:
        metrics: Numbers, strings, booleans, None, and lists and dicts of these, by name.
        checkpoint: A folder of files to continue from after a failure; saved before this returns.

    Raises:
        MetricError: A metric is invalid; says which one, and how to fix it.
        StoreError: The checkpoint could not be saved.
        TuneError: No trial runs in this process, or a signal handler called it during a report.

    Example:
        >>> from tunemq import Checkpoint, report
        >>> def train(config):
        ...     for step in range(10):
        ...         loss = config["lr"] / (step + 1)
        ...         report({"loss": loss}, checkpoint=Checkpoint.from_dict({"step": step}))
    """
    session = running("report")
    if type(metrics) is not dict:
        metrics = {} if metrics is None else named(metrics)
    if kwargs:
        metrics = metrics | kwargs
    session.report(metrics, checkpoint)


def get_context() -> TuneContext:
    """The running trial's names, folder and resources.

    Raises:
        TuneError: No trial runs in this process.

    Example:
        >>> from tunemq import get_context
        >>> def train(config):
        ...     print(get_context().get_trial_name(), get_context().get_trial_dir())
    """
    return running("get_context").context


def get_checkpoint() -> Checkpoint | None:
    """The newest checkpoint of the running trial, or the restored one; None for a fresh start.

    Raises:
        StoreError: Its files cannot be read.
        TuneError: No trial runs in this process.

    Example:
        >>> from tunemq import get_checkpoint
        >>> def train(config):
        ...     checkpoint = get_checkpoint()
        ...     begin = checkpoint.to_dict()["step"] if checkpoint is not None else 0
    """
    session = running("get_checkpoint")
    with session.one_thread():  # others may get newer ones, and end this copy
        kept = session.newest_checkpoint()
        return None if kept is None else Checkpoint.from_directory(str(kept.path))
