"""`TuneContext`: what a running trial can ask about itself."""

from __future__ import annotations

from tunemq_shared.protocol.messages import TrialSpec


class TuneContext:
    """Names, folder and resources of the running trial.

    To TuneMQ a trial is one process, whatever it starts itself, so ranks are 0 and sizes are 1:
    code written for distributed training runs unchanged.
    """

    def __init__(self, trial: str, start: TrialSpec) -> None:
        self._trial = trial
        self._start = start

    def get_experiment_name(self) -> str:
        """The experiment's name."""
        return self._start.experiment

    def get_trial_id(self) -> str:
        """The trial's id, unique in its experiment."""
        return self._trial

    def get_trial_name(self) -> str:
        """The trial's name, as tables and folders show it."""
        return self._start.trial_name

    def get_trial_number(self) -> int:
        """The trial's number in its experiment, from 0."""
        return self._start.trial_number

    def get_trial_dir(self) -> str:
        """The trial's folder on this machine."""
        return self._start.folder

    def get_trial_resources(self) -> dict[str, float]:
        """The trial's resources, such as ``{"cpu": 2, "gpu": 0.5}``."""
        return dict(self._start.resources)

    def get_world_size(self) -> int:
        """The number of processes of the trial: 1."""
        return 1

    def get_world_rank(self) -> int:
        """This process's rank in the trial: 0."""
        return 0

    def get_local_world_size(self) -> int:
        """The number of processes of the trial on this machine: 1."""
        return 1

    def get_local_rank(self) -> int:
        """This process's rank on this machine: 0."""
        return 0

    def get_node_rank(self) -> int:
        """This machine's rank in the trial: 0."""
        return 0
