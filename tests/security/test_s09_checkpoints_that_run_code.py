"""S09: only the user's code that requests a checkpoint loads its contents."""

from __future__ import annotations

import contextlib
import os
import pickle
from functools import partial
from pathlib import Path

import pytest

import tunemq as tune
from tests.support.commands import run_tunemq
from tests.support.searches.searches import fit
from tests.support.stores.object_servers import ObjectServer
from tunemq_shared.base.errors import CheckpointError
from tunemq_shared.checkpoints.open_store import join

pytestmark = [pytest.mark.integration, pytest.mark.security]

#: File names of checkpoints that come from a dict or from torch.
NAMES = ("checkpoint_dict.pkl", "model.pt", "state.pkl")


class Touches:
    """Makes a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self):
        return os.mkdir, (self._path,)


def saver(config):
    evil = pickle.dumps(Touches(config["marker"]))
    Path("evil").mkdir(exist_ok=True)
    for name in NAMES:
        Path("evil", name).write_bytes(evil)
    for step in range(3):
        tune.report({"step": step}, checkpoint=tune.Checkpoint.from_directory("evil"))


@pytest.mark.parametrize("storage", ["folder", "store"])
def test_s09_scheduler_nodes_and_commands_load_nothing_of_a_checkpoint(
    tmp_path: Path, minio: ObjectServer, bucket: str, storage: str
):
    marker = tmp_path / "it ran"
    place = minio.address(bucket, "results") if storage == "store" else str(tmp_path / "results")
    grid = fit(
        saver,
        {"marker": str(marker)},
        name="evil",
        storage_path=place,
        metric="step",
        mode="max",
    )
    (result,) = grid
    assert result.metrics["step"] == 2
    assert len(result.best_checkpoints) == 3
    run = partial(run_tunemq, tmp_path)
    experiment = join(place, "evil")
    assert "3 checkpoints" in run("checkpoints", "list", experiment).stdout
    assert "3 of 3 checkpoints are whole" in run("checkpoints", "verify", experiment).stdout
    run("checkpoints", "get", experiment, result.trial_name, "copy")
    assert (tmp_path / "copy" / "model.pt").read_bytes() == pickle.dumps(Touches(str(marker)))
    run("journal", "show", grid.experiment_path)
    assert not marker.exists()
    with result.checkpoint.as_directory():
        assert not marker.exists()
    with contextlib.suppress(CheckpointError):  # it is no dict
        result.checkpoint.to_dict()  # the caller asks to unpickle it
    assert marker.exists()
