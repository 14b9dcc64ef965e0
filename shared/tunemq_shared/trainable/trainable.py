"""`Trainable`: the class form of a trainable, with `setup` once and `step` repeatedly.

A `Trainable` knows nothing of processes or transports, and can be stepped by hand. In a trial,
`tunemq_shared.trainable.run_trial` steps it and counts its iterations.
"""
# ruff: noqa: ARG002, ARG003  methods that subclasses override name their arguments

from __future__ import annotations

import copy
import logging
import os
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from tunemq_shared.base.errors import CheckpointError, TrainableError
from tunemq_shared.checkpoints.checkpoint import Checkpoint
from tunemq_shared.checkpoints.checkpoint_bytes import bytes_to_folder, folder_to_bytes
from tunemq_shared.checkpoints.checkpoint_markers import (
    AS_FOLDER,
    TEMPORARY_PREFIX,
    CheckpointForm,
    form_within,
    is_null,
    make_checkpoint_folder,
    read_notes,
    remove,
    write_notes,
)
from tunemq_shared.protocol.messages import TrialStarted
from tunemq_shared.trainable.function_signatures import function_form
from tunemq_shared.trial.metrics import check_metrics
from tunemq_shared.trial.progress import TrialProgress
from tunemq_shared.trial.results import ResultTemplate, full_result
from tunemq_shared.trial.session import current
from tunemq_shared.trial.trial_context import TuneContext

logger = logging.getLogger(__name__)

#: Seconds; a slower `setup` is worth reusing for the next trial.
SLOW_SETUP_S: Final = 10.0
#: The formats of `Trainable.export_model`.
EXPORT_FORMATS: Final = ("checkpoint", "model", "h5")


class Trainable:
    """Base of class trainables; define `setup`, `step`, `save_checkpoint` and `load_checkpoint`.

    Args:
        config: The trial's configuration; `setup` gets a copy.
        logdir: The trial's folder; by default that of the running trial, else a new temporary one.

    Example:
        >>> from tunemq import Trainable
        >>> class Counts(Trainable):
        ...     def setup(self, config):
        ...         self.count = config["start"]
        ...     def step(self):
        ...         self.count += 1
        ...         return {"count": self.count, "done": self.count >= 10}
        ...     def save_checkpoint(self, checkpoint_dir):
        ...         return {"count": self.count}
        ...     def load_checkpoint(self, checkpoint):
        ...         self.count = checkpoint["count"]
        >>> Counts({"start": 1}).train()["count"]
        2
    """

    #: The name of its trials; by default the class's name.
    _name: ClassVar[str | None] = None

    def __init__(self, config: dict[str, Any] | None = None, logdir: str | None = None) -> None:
        self.config: dict[str, Any] = {} if config is None else config
        self._progress = TrialProgress()
        self._logdir = logdir
        self._temporary: list[str] = []
        self._enter()
        began = time.monotonic()
        self.setup(copy.deepcopy(self.config))
        took_s = time.monotonic() - began
        if took_s > SLOW_SETUP_S:
            logger.warning(
                "%s.setup() took %.1f s. With TuneConfig(reuse_actors=True) and a reset_config() "
                "that returns True, trials share one object and pay for it once.",
                type(self).__name__,
                took_s,
            )

    # --- what a subclass defines ---

    def setup(self, config: dict[str, Any]) -> None:
        """Prepare for the first step; by default nothing."""

    def step(self) -> dict[str, Any]:
        """Train for one iteration and return its metrics."""
        raise TrainableError(f"{type(self).__name__} does not define step().")

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any] | str | Checkpoint | None:
        """Write the state below ``checkpoint_dir``, and return nothing or a path in it.

        Or return the state as a dict or a `Checkpoint`, and write nothing.
        """
        raise TrainableError(
            f"{type(self).__name__} cannot be saved, because it does not define "
            "save_checkpoint(). Define it; without it, request no checkpoints in "
            "CheckpointConfig, and use no scheduler that pauses trials."
        )

    def load_checkpoint(self, checkpoint: dict[str, Any] | str) -> None:
        """Restore the return value of `save_checkpoint`: the dict or path, else the folder."""
        raise TrainableError(
            f"{type(self).__name__} cannot be restored, because it does not define "
            "load_checkpoint()."
        )

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Become a new trial with ``new_config``, without `setup`; returns False if it cannot."""
        return False

    def cleanup(self) -> None:
        """Release what `setup` acquired; called when no step will follow."""

    def log_result(self, result: dict[str, Any]) -> None:
        """Called with each complete result before it is reported; by default does nothing."""

    def _export_model(self, export_formats: list[str], export_dir: str) -> dict[str, str]:
        """Write the model in each format below ``export_dir``; returns their paths by format."""
        return {}

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> Any:
        """The resources of a trial if the user requests none; None for the default."""
        return None

    @classmethod
    def resource_help(cls, config: dict[str, Any]) -> str:
        """Advice that is shown when no node can run a trial of ``config``."""
        return ""

    # --- what callers use ---

    def checked_step(self) -> dict[str, Any]:
        """Run one `step` and check that it returns a dict.

        Raises:
            TrainableError: It returned another type.
        """
        metrics = self.step()
        if isinstance(metrics, dict):
            return metrics
        raise TrainableError(
            f"{type(self).__name__}.step() returned {type(metrics).__qualname__}; return a dict of "
            f"metrics, such as {{'loss': 0.1}}."
        )

    def train(self) -> dict[str, Any]:
        """Train for one iteration and return its complete result, automatic keys included.

        Raises:
            MetricError: A metric is invalid.
            TrainableError: `step` did not return a dict.
        """
        began = time.monotonic()
        metrics = self.checked_step()
        elapsed_s = time.monotonic() - began
        plain = check_metrics(metrics, step=self.iteration + 1)
        event = self._progress.advance(self.trial_id, 0, plain, elapsed_s)
        result = full_result(event, self.frame())
        self.log_result(result)
        return result

    def frame(self) -> ResultTemplate:
        """The part that all results of this object share."""
        started = TrialStarted(
            self.trial_id, 0, os.getpid(), socket.gethostname(), "127.0.0.1", time.time()
        )
        return ResultTemplate(started, self.config)

    def save(self, checkpoint_dir: str | None = None) -> str:
        """Write a checkpoint with the training progress; returns its folder.

        Args:
            checkpoint_dir: By default ``checkpoint_<iteration>`` in `logdir`.

        Raises:
            CheckpointError: `save_checkpoint` returned a path elsewhere, or another type.
        """
        folder = checkpoint_dir or make_checkpoint_folder(self.logdir, self.iteration)
        os.makedirs(folder, exist_ok=True)
        form = self._written(folder)
        write_notes(folder, self._progress.state() | form.state())
        return folder

    def _written(self, folder: str) -> CheckpointForm:
        """Let `save_checkpoint` fill ``folder``; returns the form of its return value."""
        returned = self.save_checkpoint(folder)
        if returned is None:
            return AS_FOLDER
        if isinstance(returned, dict):
            returned = Checkpoint.from_dict(returned)
        if isinstance(returned, Checkpoint):
            returned.to_directory(folder)
            return CheckpointForm(as_dict=returned.is_dict)
        if not isinstance(returned, (str, os.PathLike)):
            raise CheckpointError(
                f"{type(self).__name__}.save_checkpoint() returned {type(returned).__qualname__}; "
                f"return a path in the folder, a dict, a Checkpoint, or nothing."
            )
        return form_within(folder, os.fspath(returned))

    def restore(self, checkpoint_path: str | Path | Checkpoint) -> None:
        """Continue from a checkpoint; counts since the restore start at 0.

        A folder that `save` did not write counts as the state of an untrained model; a null
        checkpoint changes nothing.

        Raises:
            CheckpointError: Its notes are damaged.
        """
        path = checkpoint_path.path if isinstance(checkpoint_path, Checkpoint) else checkpoint_path
        folder = str(path)
        if is_null(folder):
            return
        notes = read_notes(folder)
        self.load_checkpoint(CheckpointForm.noted(notes, folder).given_back(folder))
        self._progress.restore(notes)

    def save_to_object(self) -> bytes:
        """Save a checkpoint to memory, for `restore_from_object`."""
        with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX) as parent:
            return folder_to_bytes(self._save_below(parent))

    def _save_below(self, parent: str) -> str:
        """Write a checkpoint and its notes into a new folder below ``parent``."""
        return self.save(make_checkpoint_folder(parent, self.iteration))

    def restore_from_object(self, obj: bytes) -> None:
        """Continue from the result of `save_to_object`; its files stay until this trial ends.

        Raises:
            CheckpointError: ``obj`` is not such a result.
        """
        folder = bytes_to_folder(obj, self.logdir)
        self._temporary.append(folder)
        self.restore(folder)

    def reset(self, new_config: dict[str, Any], logdir: str | None = None) -> bool:
        """Become a new trial through `reset_config`; returns False if this object cannot."""
        self._remove_temporary()
        self._logdir = logdir
        self._enter()
        if not self.reset_config(copy.deepcopy(new_config)):
            return False
        self.config = new_config
        self._progress.clear()
        return True

    def stop(self) -> None:
        """Release everything; no step follows."""
        try:
            self.cleanup()
        finally:
            self._remove_temporary()

    def _remove_temporary(self) -> None:
        """Remove the folders that `restore_from_object` made."""
        while self._temporary:
            remove(self._temporary.pop())

    def export_model(
        self, export_formats: str | Sequence[str], export_dir: str | None = None
    ) -> dict[str, str]:
        """Export the model; returns the path of each written format.

        Raises:
            TrainableError: A format is none of ``checkpoint``, ``model``, ``h5``.
        """
        given = [export_formats] if isinstance(export_formats, str) else export_formats
        wanted = [name.strip().lower() for name in given]
        for name in wanted:
            if name not in EXPORT_FORMATS:
                raise TrainableError(
                    f"{name!r} is not an export format; use {', '.join(EXPORT_FORMATS)}."
                )
        return self._export_model(wanted, export_dir or self.logdir)

    def get_state(self) -> dict[str, Any]:
        """The training progress, in plain values."""
        return self._progress.state()

    def get_config(self) -> dict[str, Any]:
        """The trial's configuration."""
        return self.config

    def follow(self, progress: TrialProgress) -> None:
        """Let the caller count: `iteration` reads ``progress`` from now on."""
        self._progress = progress

    def _enter(self) -> None:
        """Find the trial that this object belongs to."""
        session = current()
        self._context: TuneContext | None = None if session is None else session.context

    @property
    def iteration(self) -> int:
        """The number of trained iterations, including those before restores."""
        return self._progress.iteration

    @property
    def training_iteration(self) -> int:
        """The same as `iteration`."""
        return self._progress.iteration

    @property
    def trial_id(self) -> str:
        """The trial's id; ``default`` outside of a trial."""
        return "default" if self._context is None else self._context.get_trial_id()

    @property
    def trial_name(self) -> str:
        """The trial's name; ``default`` outside of a trial."""
        return "default" if self._context is None else self._context.get_trial_name()

    @property
    def trial_resources(self) -> dict[str, float]:
        """The resources that the trial has; empty outside of a trial."""
        return {} if self._context is None else self._context.get_trial_resources()

    @property
    def logdir(self) -> str:
        """The trial's folder; outside of a trial a temporary one, made on first use."""
        if self._logdir is None:
            if self._context is None:
                self._logdir = tempfile.mkdtemp(prefix="tunemq_trainable_")
            else:
                self._logdir = self._context.get_trial_dir()
        return self._logdir


def validate_trainable(trainable: object) -> None:
    """Raise TrainableError unless it is a Trainable class or a function of an accepted form."""
    if isinstance(trainable, type):
        if issubclass(trainable, Trainable):
            return
        raise TrainableError(
            f"The class {trainable.__qualname__} is not a trainable: derive it from tune.Trainable."
        )
    if isinstance(trainable, Trainable):
        raise TrainableError(
            f"The trainable is an object of {type(trainable).__qualname__}; give the class itself."
        )
    if not callable(trainable):
        raise TrainableError(
            f"The trainable is {type(trainable).__qualname__} {trainable!r}; give a function of a "
            f"config or a subclass of tune.Trainable."
        )
    function_form(trainable)
