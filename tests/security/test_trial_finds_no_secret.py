"""A trial that searches for the farm's keys wherever it can look finds none of them.

Each search proves that it can find: a key that was planted in all these places turns up in each.
"""

from __future__ import annotations

import platform
import secrets
import sys
from pathlib import Path

import pytest

from tests.integration.farm_support import order
from tests.security.guarded_farm import farm
from tests.security.key_search import halves_of, saving, searching
from tests.support.other_users import NOBODY, open_folder, reachable
from tests.support.waiting import eventually, need
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


#: Runs a program as a login does that has a key in the kernel's session keyring.
LOGIN = """
import ctypes, os, sys
from tunemq_shared.system.process_attributes import leave_session_keyring
leave_session_keyring()
libc = ctypes.CDLL(None, use_errno=True)
ticket = libc.syscall({add_key}, b"user", b"ticket", b"of the login", 12, {session})
assert ticket > 0, os.strerror(ctypes.get_errno())
os.execvp(sys.argv[1], sys.argv[1:])
"""
SYSTEM_CALLS = {"x86_64": (248, 250), "aarch64": (217, 219)}
SESSION_KEYRING, SEARCH, READ = -3, 10, 11


def reads_the_keyring(config):
    import ctypes

    from tunemq_shared.trial.session import report

    libc, text = ctypes.CDLL(None), ctypes.create_string_buffer(12)
    key = libc.syscall(config["keyctl"], SEARCH, SESSION_KEYRING, b"user", b"ticket", 0)
    libc.syscall(config["keyctl"], READ, key, text, len(text))
    report({"read": text.value.decode()})


@pytest.mark.parametrize(
    ("options", "read"),
    [([], "of the login"), (["--trial-user", f"{NOBODY}:{NOBODY}"], "")],
    ids=["own user", "another user"],
)
def test_trial_has_the_keyring_of_the_login_only_as_the_workers_own_user(farm, options, read):
    numbers = SYSTEM_CALLS.get(platform.machine())
    need("a known processor", numbers)
    add_key, keyctl = numbers
    login = LOGIN.format(add_key=add_key, session=SESSION_KEYRING)
    instance_id = farm.start([sys.executable, "-c", login, *reachable()], *options)
    farm.scheduler.assign(instance_id, order("t", farm.order(reads_the_keyring, 0, keyctl=keyctl)))
    said = farm.scheduler.said
    eventually(lambda: said(ResultReported) or said(TrialFailed), within=60, message=farm.story)
    assert [event.metrics["read"] for event in said(ResultReported)] == [read], farm.story()


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
