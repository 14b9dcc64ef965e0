"""A run checks its store before it changes files that another run may have there."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

import msgspec
import psutil
import pytest

from tests.support.stores.object_servers import ObjectServer
from tests.support.stores.own_store import own_bucket, server
from tests.support.waiting import eventually
from tunemq_scheduler.base.lease_holder import LeaseHolder
from tunemq_scheduler.storage import store_claim
from tunemq_scheduler.storage.last_run import RunRecord, store_record
from tunemq_scheduler.storage.store_claim import StoreClaim
from tunemq_shared.base.errors import ConfigError, RunSuperseded, StoreError
from tunemq_shared.base.retrying import CancelToken
from tunemq_shared.signing.key_files import journal_signer

__all__ = ["own_bucket", "server"]

pytestmark = pytest.mark.integration

SIGNER = journal_signer()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A function that advances the time."""
    now = [0.0]
    monkeypatch.setattr(store_claim, "_now", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    return passes


@pytest.fixture
def address(minio: ObjectServer, bucket: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in minio.environ.items():
        monkeypatch.setenv(name, value)
    return minio.address(bucket, "search")


def a_record(run: int = 1) -> RunRecord:
    return RunRecord(holder=LeaseHolder.this_process(), term=0, run=run, is_warm=False)


def connected_ports() -> set[int]:
    return {one.raddr.port for one in psutil.Process().net_connections("tcp") if one.raddr}


def test_claim_that_another_run_took_is_found_after_a_pause_and_stays_so(address, clock):
    first, second = StoreClaim(address, SIGNER), StoreClaim(address, SIGNER)
    first.write(a_record())
    second.write(a_record(2))
    first.check()  # the run checked a moment ago
    clock(store_claim.FRESH_S + 1)
    second.check()
    with pytest.raises(RunSuperseded, match=r"Another run of this search claimed s3://.*process"):
        first.check()
    with pytest.raises(RunSuperseded):
        first.check_known()


def test_expired_claim_check_is_repeated_at_once(address, clock):
    first, second = StoreClaim(address, SIGNER), StoreClaim(address, SIGNER)
    first.write(a_record())
    second.write(a_record(2))
    first.check()  # no time has passed
    first.expire()
    with pytest.raises(RunSuperseded):
        first.check()


def test_check_does_not_wait_for_the_check_of_another_thread(server, own_bucket):
    """A transfer's check may wait for a store that is away for as long as the transfer may."""
    claim = StoreClaim(server.address(own_bucket, "search"), SIGNER)
    claim.write(a_record())
    claim.expire()
    server.freeze()
    patient = CancelToken(600.0)

    def check(cancel: CancelToken) -> threading.Thread:
        def checks() -> None:
            with contextlib.suppress(StoreError):
                claim.check(cancel)

        thread = threading.Thread(target=checks, daemon=True)
        thread.start()
        return thread

    waiting = check(patient)
    eventually(lambda: server.port in connected_ports())
    brief = check(CancelToken(1.0))
    brief.join(60)
    assert waiting.is_alive()
    assert not brief.is_alive()
    patient.cancel()
    server.thaw()
    waiting.join()


def test_superseded_run_does_not_write_over_the_record_of_the_later_one(address):
    first, second, later = StoreClaim(address, SIGNER), StoreClaim(address, SIGNER), a_record(2)
    first.write(a_record())
    second.write(later)
    with pytest.raises(RunSuperseded):
        first.write(a_record())
    assert second.stored() == later


def test_unreadable_claim_record_permits_no_removal(address, clock, minio, bucket):
    claim = StoreClaim(address, SIGNER)
    claim.write(a_record())
    clock(store_claim.FRESH_S + 1)
    with minio.objects(bucket, "search") as objects:
        objects.put_bytes("journal/last_run", b"nonsense")
        with pytest.raises(StoreError, match="last_run"):
            claim.check()
        store_record(objects, a_record(2), SIGNER)
    with pytest.raises(RunSuperseded):
        claim.check()


def test_run_without_a_store_checks_no_claim():
    claim = StoreClaim("", SIGNER)
    claim.write(a_record())
    claim.check()


def test_claim_of_another_search_is_refused_and_names_the_holder(address):
    first, other = StoreClaim(address, SIGNER), StoreClaim(address, SIGNER)
    record = msgspec.structs.replace(a_record(), experiment_id="aaaaa")
    first.write(record)
    with pytest.raises(ConfigError, match=rf"Another search has .*process {os.getpid()} on"):
        other.write(msgspec.structs.replace(a_record(), experiment_id="bbbbb"))
    assert first.stored() == record
    first.expire()
    first.check()


def test_claim_that_another_search_wrote_at_the_same_moment_leaves_one(address):
    first, other = StoreClaim(address, SIGNER), StoreClaim(address, SIGNER)
    first.write(msgspec.structs.replace(a_record(), experiment_id="aaaaa"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(other, "stored", lambda *_: None)  # as it was before the first one wrote
        other.write(msgspec.structs.replace(a_record(), experiment_id="bbbbb"))
    for claim in (first, other):
        claim.expire()
    with pytest.raises(RunSuperseded, match="Another search claimed"):
        first.check()
    other.check()
