"""Ray Tune's older interface for functions: a ``reporter`` argument, and `checkpoint_dir`.

Both use the running trial's session; the next report saves a checkpoint that is set here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tunemq_shared.base.errors import CheckpointError
from tunemq_shared.checkpoints.checkpoint import Checkpoint
from tunemq_shared.checkpoints.checkpoint_markers import (
    CheckpointForm,
    find_checkpoint_folder,
    form_within,
)
from tunemq_shared.trial.session import TrialSession, running


class StatusReporter:
    """Reports a step's metrics, given as keywords; waits as `tune.report` does."""

    def __init__(self, session: TrialSession) -> None:
        self._session = session
        self._set: str | dict[str, Any] | None = None
        self._set_as_new = False

    def __call__(self, **metrics: Any) -> None:
        """Report a result, with the checkpoint that was set since the last one."""
        self._session.report(metrics)

    def make_checkpoint_dir(self, step: int) -> str:
        """Make a folder for the checkpoint of ``step``; `set_checkpoint` takes paths in it."""
        return self._session.make_checkpoint_folder(step)

    def set_checkpoint(
        self, checkpoint: str | dict[str, Any] | Checkpoint, is_new: bool = True
    ) -> None:
        """Make ``checkpoint`` the newest one; if it is new, the next report saves it.

        A `Checkpoint` stands for the dict that it was made from, else for its folder.

        Raises:
            CheckpointError: It is not a `Checkpoint`, a dict, or a path in a folder of
                `make_checkpoint_dir`.
        """
        if is_new:
            self._session.offer(*_formed(checkpoint))
        if isinstance(checkpoint, Checkpoint):
            checkpoint = checkpoint.to_dict() if checkpoint.is_dict else checkpoint.path
        self._set, self._set_as_new = checkpoint, is_new

    def has_new_checkpoint(self) -> bool:
        """Whether a checkpoint was set that no report has saved yet."""
        return self._session.has_offered

    def get_checkpoint(self) -> str | dict[str, Any] | None:
        """The newest checkpoint in the form in which it was set; None before the first."""
        if self._set is not None and (self.has_new_checkpoint() or not self._set_as_new):
            return self._set
        kept = self._session.newest_checkpoint()
        return None if kept is None else kept.given_back()

    @property
    def logdir(self) -> str:
        """The trial's folder."""
        return self._session.context.get_trial_dir()

    @property
    def trial_name(self) -> str:
        """The trial's name."""
        return self._session.context.get_trial_name()

    @property
    def trial_id(self) -> str:
        """The trial's id."""
        return self._session.trial


def _formed(checkpoint: str | dict[str, Any] | Checkpoint) -> tuple[Checkpoint, CheckpointForm]:
    """The checkpoint to save, and the form in which it is restored."""
    if isinstance(checkpoint, dict):
        checkpoint = Checkpoint.from_dict(checkpoint)
    if isinstance(checkpoint, Checkpoint):
        return checkpoint, CheckpointForm(as_dict=checkpoint.is_dict)
    if isinstance(checkpoint, str):
        folder = find_checkpoint_folder(checkpoint)
        return Checkpoint.from_directory(folder), form_within(folder, checkpoint)
    raise CheckpointError(
        f"A checkpoint is a Checkpoint, a path (str) or a dict, not "
        f"{type(checkpoint).__qualname__}."
    )


@contextmanager
def checkpoint_dir(step: int) -> Iterator[str]:
    """Make a folder for the checkpoint of ``step``; the next report saves it."""
    reporter = StatusReporter(running("checkpoint_dir"))
    folder = reporter.make_checkpoint_dir(step)
    yield folder
    reporter.set_checkpoint(folder)
