"""A trial that searches for the farm's keys wherever it can look finds none of them.

Each search proves that it can find: a key that was planted in all these places turns up in each.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from tests.integration.farm_support import order
from tests.security.guarded_farm import farm
from tests.security.key_search import halves_of, saving, searching
from tests.support.other_users import NOBODY, open_folder, reachable
from tests.support.waiting import eventually
from tunemq_shared.protocol.messages import (
    CheckpointCommitted,
    ResultReported,
    TrialFailed,
)

__all__ = ["farm", "open_folder"]

pytestmark = pytest.mark.security

#: Where a key that is planted is found.
EVERYWHERE = {
    "file",
    "os.environ",
    "other cmdline",
    "other descriptor",
    "other environ",
    "other memory",
    "own descriptor",
    "own memory",
}


def test_a_trial_that_runs_as_another_user_than_the_worker_finds_no_key_of_the_farm(farm):
    found = searched(farm, reachable(), "--trial-user", f"{NOBODY}:{NOBODY}")
    assert found["user"] == NOBODY
    assert found["groups"] == [NOBODY]
    assert found["rights"] == {
        "CapEff": "0" * 16,
        "CapPrm": "0" * 16,
        "NoNewPrivs": "1",
        "Uid": "\t".join([str(NOBODY)] * 4),
    }


def test_a_trial_that_runs_as_the_workers_own_user_finds_no_key_of_the_farm(farm):
    found = searched(farm, reachable(NOBODY), owner=NOBODY)
    assert found["user"] == NOBODY


def environ_of(pid):
    """A process's environment; empty if it has just ended with its trial."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def searched(farm, before, *options, owner=0):
    """The findings of a trial on a node with all keys; they must contain no key."""
    instance_id = farm.start(before, *options, owner=owner)
    first = order("saving", farm.order(saving, 0))
    farm.scheduler.assign(instance_id, first)
    said = farm.scheduler.said
    eventually(lambda: said(CheckpointCommitted), within=60, message=farm.story)
    # All keys are in use, and in this moment in the memory of processes of the node.
    held = b"".join(map(environ_of, farm.process_tree()))
    assert all(key.encode() in held for key in farm.keys.values())

    planted = secrets.token_hex(20)
    config = {
        "keys": {name: halves_of(key) for name, key in farm.keys.items()},
        "planted": halves_of(planted),
        "folders": [str(farm.folder)],
    }
    farm.scheduler.assign(instance_id, first, order("t", farm.order(searching, 1, **config)))

    def results():
        return [event for event in said(ResultReported) if event.trial == "t"]

    eventually(lambda: results() or said(TrialFailed), within=120, message=farm.story)
    assert not said(TrialFailed), farm.story()
    found = results()[0].metrics
    assert set(found["found"].pop("planted")) >= EVERYWHERE
    assert found["found"] == {}
    # It was not let in; it did not just look elsewhere.
    own = {"mem", "environ", "pidfd_getfd"}
    assert all(found["rejected"].get(kind) for kind in own), found
    return found
