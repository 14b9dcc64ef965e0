from __future__ import annotations

import os
import pwd
import subprocess
import sys

import pytest

from tunemq_shared.base.errors import ConfigError
from tunemq_workers.system import trial_user
from tunemq_workers.system.trial_user import UserAccount, find_account, own_files


@pytest.fixture(autouse=True)
def as_root(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)


@pytest.fixture
def ann(monkeypatch):
    entry = pwd.struct_passwd(("ann", "x", 1234, 2345, "", "/home/ann", "/bin/sh"))

    def by_name(name):
        if name != "ann":
            raise KeyError(name)
        return entry

    def by_number(uid):
        if uid != 1234:
            raise KeyError(uid)
        return entry

    monkeypatch.setattr(trial_user.pwd, "getpwnam", by_name)
    monkeypatch.setattr(trial_user.pwd, "getpwuid", by_number)
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: [gid, 44])
    return UserAccount("ann", 1234, 2345, (2345, 44), "/home/ann")


@pytest.mark.parametrize("text", ["ann", "1234"])
def test_user_is_named_or_numbered_and_has_all_its_groups(ann, text):
    assert find_account(text) == ann


@pytest.mark.parametrize("text", ["ann:77", "1234:77"])
def test_named_group_is_the_only_one(ann, text):
    assert find_account(text) == ann._replace(gid=77, groups=(77,))


def test_number_without_a_user_needs_a_group(ann):
    assert find_account("5:6") == UserAccount("5", 5, 6, (6,), "/")
    with pytest.raises(ConfigError, match="pass its group, too: 5:5"):
        find_account("5")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ben", "'ben', a user that this machine does not know; name one of /etc/passwd"),
        ("ben:5", "a user that this machine does not know"),
        ("", "a user that this machine does not know"),
        ("ann:staff", "pass a group as a number"),
        ("99999999999999999999:5", "a user that this machine does not know"),
        ("4294967295:5", "a user that this machine does not know"),
        ("0:5", "is root"),
    ],
)
def test_invalid_user_is_rejected_with_the_fix(ann, text, why):
    with pytest.raises(ConfigError, match=why):
        find_account(text)


def test_root_is_rejected():
    with pytest.raises(ConfigError, match="--trial-user is root, which is root"):
        find_account("root")


def test_only_root_may_run_trials_as_another_user(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="only a worker that root starts"):
        find_account("ann")


def test_variables_of_the_nodes_login_are_not_passed_to_the_trial_user(ann):
    own = {
        "HOME": "/root",
        "USER": "root",
        "LOGNAME": "root",
        "MAIL": "/var/mail/root",
        "XDG_RUNTIME_DIR": "/run/user/0",
        "SUDO_USER": "me",
        "PATH": "/bin",
    }
    expected = {"HOME": "/home/ann", "USER": "ann", "LOGNAME": "ann", "PATH": "/bin"}
    assert ann.variables(own) == expected


def test_without_a_trial_user_files_are_opened_as_usual(monkeypatch):
    monkeypatch.undo()  # as the tests' own user
    with own_files():
        assert os.path.exists("/")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root acts for another user")
def test_program_that_replaces_a_node_keeps_the_variables_of_the_dynamic_linker():
    """glibc drops some where the kernel sees a change of the user (secure execution)."""
    script = (
        "import os, sys\n"
        "from tunemq_workers.system.trial_user import act_for, find_account, own_files\n"
        "act_for(find_account('54321:54321'))\n"
        "with own_files():\n"
        "    os.execv('/bin/sh', ['sh', '-c', 'echo $TMPDIR; echo $LD_LIBRARY_PATH'])\n"
    )
    variables = {"TMPDIR": "/var/tmp", "LD_LIBRARY_PATH": "/nowhere"}
    said = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.split() == list(variables.values())
