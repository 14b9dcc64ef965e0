"""F09: a node can reach Redis, but not the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.proxies.tcp_proxy import TcpProxy
from tests.support.searches.chain_searches import ChainSearch
from tests.support.stores.object_servers import ObjectServer
from tunemq_shared.protocol import messages as m

pytestmark = [pytest.mark.faults, pytest.mark.integration]


@pytest.fixture
def way() -> Iterator[Callable[[ObjectServer], TcpProxy]]:
    """A function that puts a proxy in front of a store."""
    made: list[TcpProxy] = []

    def make(server: ObjectServer) -> TcpProxy:
        made.append(TcpProxy(("127.0.0.1", server.port)))
        return made[-1]

    yield make
    for proxy in made:
        proxy.close()


def through(proxy: TcpProxy, minio: ObjectServer, bucket: str) -> tuple[str, dict[str, str]]:
    """Return a storage address that leads through the proxy only, and its environment variables."""
    address = minio.address(bucket, "x").replace(f":{minio.port}", f":{proxy.port}")
    return address, {"TUNEMQ_S3_ENDPOINT": f"http://127.0.0.1:{proxy.port}"}


@pytest.mark.parametrize("how", ["hold", pytest.param("silent", marks=pytest.mark.soak), "cut"])
def test_f09_results_are_recorded_during_a_store_outage_and_checkpoints_follow(
    tmp_path: Path, minio: ObjectServer, bucket: str, way, how: str
) -> None:
    proxy = way(minio)
    address, variables = through(proxy, minio, bucket)
    search = ChainSearch(
        tmp_path,
        storage=address,
        trials=2,
        steps=40,
        save_every=5,
        step_s=0.05,
        gate=12,
        variables=variables,
    )
    try:
        trial = search.trial(0)
        search.wait_for(m.CheckpointCommitted, trial=trial, within=60)
        if how == "hold":
            proxy.hold()
        elif how == "silent":
            proxy.go_silent()
        else:
            proxy.cut(stay=True)
        # The checkpoint of step 15 and the results behind it are reported without the store.
        search.open_gate(40)
        search.wait_for(m.ResultReported, trial=trial, step=19, within=60)
        written = search.all_of(m.CheckpointWritten)
        committed = search.all_of(m.CheckpointCommitted)
        assert len(written) > len(committed)
        # Current checkpoints: those committed before the outage, and those on the node's disk.
        assert not search.all_of(m.CheckpointLost)
        proxy.heal()
        assert search.ends(within=90) == 0, str(search)
        search.is_undisturbed()
        assert search.all_of(m.TrialFailed) == search.all_of(m.TrialProcessDied) == []
        search.is_whole()
        search.left_nothing_in_the_store()
        search.leaves_nothing()
    finally:
        search.close()


def test_f09_checkpoint_that_never_arrives_ends_its_trial_and_the_previous_stays(
    tmp_path: Path, minio: ObjectServer, bucket: str, way
) -> None:
    proxy = way(minio)
    address, variables = through(proxy, minio, bucket)
    search = ChainSearch(
        tmp_path,
        storage=address,
        trials=1,
        steps=300,
        save_every=5,
        step_s=0.05,
        max_storage_failures=0,
        sync_timeout=7.0,  # a machine that stands still for some seconds uploads in that, too
        variables=variables,
    )
    try:
        search.wait_for(m.CheckpointCommitted, trial=search.trial(0), within=60)
        proxy.cut(stay=True)
        failed = search.wait_for(m.TrialFailed, within=60).event
        assert failed.kind == "storage"
        proxy.heal()
        assert search.ends(within=90) == 0, str(search)
        (result,) = search.results()
        newest = max(event.step for event in search.all_of(m.CheckpointCommitted))
        assert result["status"] == "ERROR"
        # Results count even without a checkpoint behind them.
        assert result["recorded"][-1] > newest
        assert max(result["checkpoints"]) == newest
        search.is_restorable()
    finally:
        search.close()
