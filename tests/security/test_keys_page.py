"""docs/security.md: its commands work as described, and the names in it exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.support.commands import run_tunemq
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol.rejection_counter import OFTEN_HONEST
from tunemq_shared.signing.key_files import read_key_file
from tunemq_shared.signing.live_keys import KeyRole
from tunemq_shared.signing.message_signing import HEAD_BYTES

pytestmark = pytest.mark.security

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    """The commands of the page about keys, as they are typed on the head."""
    lines = re.findall(r"^head\$ +(tunemq keys .*)$", PAGE, re.MULTILINE)
    return [shlex.split(line)[1:] for line in lines]


def test_commands_of_the_keys_page_work_as_described(tmp_path):
    said = {" ".join(command[1:]): run_tunemq(tmp_path, *command).stdout for command in commands()}

    new = said["new keys ada ben"]
    for file in (KeyRole.SCHEDULER.value, KeyRole.WORKER.value, "ada.toml", "ben.toml"):
        assert str(tmp_path / "keys" / file) in new
        assert f"`{file}`" in PAGE or file == "ben.toml"
    assert "tunemq scheduler --keys scheduler.toml" in new
    assert "tunemq worker --keys worker.toml" in new
    assert "export TUNEMQ_KEYS=ada.toml" in new
    assert "scheduler.toml" in said["remove keys ben"]
    assert "tunemq keys promote keys" in said["rotate keys"]
    assert "tunemq keys drop keys" in said["promote keys"]
    shown = said["show keys"]
    assert [line.split()[0] for line in shown.splitlines()] == [
        *("orders", "events", "journals"),
        *("ada", "eve"),
    ]
    keys = read_key_file(tmp_path / "keys" / "scheduler.toml")
    assert set(keys.submitters) == {"ada", "eve"}
    assert len(keys.orders) == 1
    assert keys.orders[0].id.hex() not in shown  # it was changed since


def test_no_command_prints_a_secret(tmp_path):
    said = "".join(run_tunemq(tmp_path, *command).stdout for command in commands())
    secrets = re.findall(r'"(.*)"', (tmp_path / "keys" / "scheduler.toml").read_text())
    assert secrets
    assert not any(secret[:12] in said for secret in secrets)
    for command in (["show", "keys", "--json"], ["show", "keys/ada.toml"]):
        out = run_tunemq(tmp_path, "keys", *command).stdout
        assert "ada" in out
        assert not any(secret[:12] in out for secret in secrets)


def test_keys_command_reports_a_mistake_in_one_line_with_the_fix(tmp_path):
    run_tunemq(tmp_path, "keys", "new", "keys")
    again = run_tunemq(tmp_path, "keys", "new", "keys", code=64).stderr
    assert "there are keys in" in again
    assert again.count("\n") == 1
    (tmp_path / "keys" / "scheduler.toml").chmod(0o644)
    readable = run_tunemq(tmp_path, "keys", "rotate", "keys", code=64).stderr
    assert f"chmod 600 {tmp_path / 'keys' / 'scheduler.toml'}" in readable
    assert "tunemq keys new" in run_tunemq(tmp_path, "keys", "show", "none", code=64).stderr
    run_tunemq(tmp_path, "ls", "--redis", "redis://127.0.0.1:1", "--keys", "no", code=64)


def test_the_numbers_of_the_page_are_those_of_the_code():
    assert f"more than {redis_keys.REQUEST_TTL_S} seconds old" in PAGE
    assert f"or {redis_keys.CLOCK_TOLERANCE_S} seconds ahead" in PAGE
    assert f"a head of {HEAD_BYTES} bytes" in PAGE


def test_rejection_reasons_of_honest_machines_are_on_the_keys_page():
    assert not [reason for reason in OFTEN_HONEST if f"`{reason}`" not in PAGE]
