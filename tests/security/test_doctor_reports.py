"""`tunemq doctor` finds problems that scheduler and nodes report and its probes cannot see."""

from __future__ import annotations

import secrets

import pytest

from tests.support.farms.examined_farm import ExaminedFarm, farm
from tests.support.farms.farm_service import Search
from tests.support.stores.store_roles import admin_of
from tests.support.waiting import eventually
from tunemq_scheduler.security.findings import Finding, FindingLevel

__all__ = ["farm"]

pytestmark = [pytest.mark.integration, pytest.mark.security]


def found_later(farm: ExaminedFarm, whose: str, **variables: str) -> Finding:
    """The finding about a user's or node's requests, once a store has failed for long enough."""
    found: list[Finding] = []

    def is_found() -> bool:
        findings = farm.examined(variables=variables).findings
        found[:] = [
            one for one in findings if one.level is FindingLevel.PROBLEM and whose in one.what
        ]
        return bool(found)

    eventually(is_found, every=3.0, within=120, message=lambda: str(farm))
    return found[0]


def test_doctor_with_a_node_whose_store_secret_is_wrong_names_the_node(farm: ExaminedFarm):
    with farm.worker("wrong", "--resources", '{"own": 1}', AWS_SECRET_ACCESS_KEY="not-the-secret"):
        farm.has_nodes("one", "wrong")
        farm.submit(Search(name="waits", trials=1, resources={"own": 1}))
        finding = found_later(farm, "node wrong")
        farm.tunemq("stop", "waits")
    assert finding.check == "store-requests", finding
    assert "store requests of node wrong have been failing for" in finding.what
    assert "SignatureDoesNotMatch" in finding.what
    assert "correct the worker's keys" in finding.fix


def test_doctor_with_an_idle_node_whose_store_secret_is_wrong_names_the_node(farm: ExaminedFarm):
    """Before any trial waits for it; `tunemq nodes` and the worker's terminal name it, too."""
    with farm.worker("idle", AWS_SECRET_ACCESS_KEY="not-the-secret"):
        farm.has_nodes("one", "idle")
        finding = found_later(farm, "node idle")
        nodes = farm.tunemq("nodes")
        said = (farm.folder / "idle" / "worker.log").read_text()
    assert finding.check == "store-requests", finding
    assert "SignatureDoesNotMatch" in finding.what
    assert "store requests have been failing for" in nodes
    assert "This worker cannot use the farm's store" in said
    assert "SignatureDoesNotMatch" in said
    assert not farm.examined().of("store-requests")


def test_doctor_with_a_changed_store_secret_of_the_scheduler_names_its_search(farm: ExaminedFarm):
    """The doctor reads the new one; the scheduler was not started again."""
    keys, new = farm.role_environ("scheduler"), secrets.token_hex(20)
    admin = admin_of(farm.server)
    farm.submit(Search(name="runs", trials=1, steps=100_000, step_s=0.2, save_every=1000))
    farm.wait_for_steps("runs", 1, 2)
    admin.user_add(keys["AWS_ACCESS_KEY_ID"], new)
    finding = found_later(farm, "process of runs", AWS_SECRET_ACCESS_KEY=new)
    admin.user_add(keys["AWS_ACCESS_KEY_ID"], keys["AWS_SECRET_ACCESS_KEY"])
    farm.tunemq("stop", "runs")
    assert finding.check == "store-requests", finding
    assert "store requests of the scheduler's process of runs have been failing for" in finding.what
    assert "start the scheduler again" in finding.fix
