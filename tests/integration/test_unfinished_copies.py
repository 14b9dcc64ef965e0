"""A search that ended while its store was away, and is started again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tunemq as tune
from tests.support.searches.searches import fit
from tests.support.stores.object_servers import ObjectServer
from tests.support.stores.own_store import own_bucket, server
from tunemq.syncer import SyncConfig
from tunemq_scheduler.journal.fetch_copy import fetch_journal
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.journal.journal_reader import recover
from tunemq_scheduler.storage.last_run import read_record
from tunemq_shared.signing.key_files import journal_signer

__all__ = ["own_bucket", "server"]

pytestmark = pytest.mark.integration


class StopsTheServer(tune.Callback):
    """Takes the store away when the last result has come."""

    def __init__(self, server: ObjectServer) -> None:
        self.server = server

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a restored search does not need it

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self.server.stop()


def reports_twice(config: dict[str, Any]) -> None:
    for loss in (2, 1):
        tune.report({"loss": loss})


def test_restore_copies_what_the_store_lacks_of_a_search_that_ended_while_it_was_away(
    server: ObjectServer, own_bucket: str, tmp_path: Path
) -> None:
    address = server.address(own_bucket, "results")
    grid = fit(
        reports_twice,
        storage_path=address,
        name="e",
        callbacks=[StopsTheServer(server)],
        sync_config=SyncConfig(sync_timeout=1),
    )
    server.start()
    local = recover(Path(grid.experiment_path, FILE_NAME))
    again = tune.Tuner.restore(grid.experiment_path, reports_twice).fit()
    assert len(again) == 1
    with server.objects(own_bucket, "results/e") as objects:
        copied = fetch_journal(objects, tmp_path / "copied", journal_signer())
        rows = objects.get_bytes(f"{Path(grid[0].path).name}/result.json", limit=10_000)
    assert copied.turn >= local.turn
    assert len(rows.splitlines()) == 2
    assert read_record(grid.experiment_path).is_copied
