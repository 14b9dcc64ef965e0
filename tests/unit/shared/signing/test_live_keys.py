"""A process's keys follow its file, and always suffice for its role."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.keys import key_folder, of_submitter
from tests.support.waiting import eventually
from tunemq_scheduler.security.key_folder import KeyFolder
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.signing import live_keys as module
from tunemq_shared.signing.key_files import KEYS_VARIABLE
from tunemq_shared.signing.live_keys import KeyRole, LiveKeys, find_keys
from tunemq_shared.signing.message_signing import InvalidSignature


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    return key_folder(tmp_path / "keys", "ada", "ben")


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch):
    monkeypatch.setattr(module, "_POLL_INTERVAL_S", 0.0)


def path_of(folder: KeyFolder, role: KeyRole) -> str:
    return str(folder.path / role.value)


def looked(keys: LiveKeys) -> str:
    """Check the file as often as needed and return the messages."""
    return keys.look() + keys.look()


def test_without_a_file_no_message_is_signed(monkeypatch):
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    for keys in (LiveKeys.none(), find_keys(None, KeyRole.WORKER)):
        assert not keys.is_signed
        assert not keys.orders.is_signed
        assert not keys.submitter("anybody").is_signed
        assert keys.look() == ""


def test_option_takes_precedence_over_the_variable(folder, monkeypatch):
    monkeypatch.setenv(KEYS_VARIABLE, of_submitter(folder, "ada"))
    assert find_keys(None, KeyRole.SUBMITTER).submitters == ("ada",)
    assert find_keys(of_submitter(folder, "ben"), KeyRole.SUBMITTER).submitters == ("ben",)
    with pytest.raises(ConfigError, match="--keys is empty"):
        find_keys("", KeyRole.SUBMITTER)
    monkeypatch.setenv(KEYS_VARIABLE, "")
    with pytest.raises(ConfigError, match=f"{KEYS_VARIABLE} is empty: give the path .* unset it"):
        find_keys(None, KeyRole.SCHEDULER)


def test_embedded_mode_looks_for_no_keys(folder, monkeypatch):
    monkeypatch.setenv(KEYS_VARIABLE, path_of(folder, KeyRole.SCHEDULER))
    assert not LiveKeys.none().is_signed


@pytest.mark.parametrize(
    ("role", "file", "said"),
    [
        (KeyRole.SCHEDULER, "ada.toml", r"no keys in \[orders\], which a scheduler needs"),
        (KeyRole.WORKER, "ada.toml", r"no keys in \[orders\].*is worker\.toml in the folder"),
        (
            KeyRole.WORKER,
            "scheduler.toml",
            r"keys of submitters.*give the worker the file worker\.t",
        ),
        (
            KeyRole.SCHEDULER,
            "worker.toml",
            r"is that of a worker.*Give the scheduler the file scheduler\.toml",
        ),
        (KeyRole.SUBMITTER, "worker.toml", r"no keys in \[submitters\.NAME\]"),
    ],
)
def test_wrong_file_is_named_and_so_is_the_right_one(folder, role, file, said):
    with pytest.raises(ConfigError, match=said):
        LiveKeys(str(folder.path / file), role)


def test_file_has_the_keys_that_its_process_needs(folder):
    scheduler = LiveKeys(path_of(folder, KeyRole.SCHEDULER), KeyRole.SCHEDULER)
    worker = LiveKeys(path_of(folder, KeyRole.WORKER), KeyRole.WORKER)
    ada = LiveKeys(of_submitter(folder, "ada"), KeyRole.SUBMITTER)

    assert worker.orders.open(scheduler.orders.close(b"order")) == b"order"
    assert scheduler.events.open(worker.events.close(b"event")) == b"event"
    assert scheduler.submitter("ada").open(ada.submitter("ada").close(b"ask")) == b"ask"
    with pytest.raises(InvalidSignature):
        ada.submitter("ben")
    with pytest.raises(InvalidSignature):
        scheduler.submitter("ben").open(ada.submitter("ada").close(b"ask"))


def test_changed_keys_reach_signers_in_use(folder):
    keys = LiveKeys(path_of(folder, KeyRole.WORKER), KeyRole.WORKER)
    message_signer, before = keys.orders, keys.orders.signer
    folder.rotate()
    assert keys.look() == ""  # the file may be incomplete
    line = keys.look()
    assert "was read again" in line
    assert before.hex() in line
    assert (keys.version, message_signer.signer) == (1, before)
    folder.promote()
    assert looked(keys)
    assert message_signer.signer != before
    assert message_signer.believes(before)
    folder.drop()
    assert looked(keys)
    assert not message_signer.believes(before)
    assert keys.version == 3
    assert looked(keys) == ""


def test_half_written_file_is_not_read(folder, tmp_path):
    path = Path(path_of(folder, KeyRole.SCHEDULER))
    keys = LiveKeys(str(path), KeyRole.SCHEDULER)
    folder.add(["eve"])
    whole = path.read_bytes()
    for size in range(100, len(whole), 50):
        path.write_bytes(whole[:size])
        assert keys.look() == ""
    path.write_bytes(whole)
    assert "of 3 submitters" in looked(keys)
    assert keys.submitter("eve").is_signed


@pytest.mark.parametrize("damage", ["gone", "readable", "rubbish", "unsigned", "of another"])
def test_invalid_file_changes_no_keys_and_is_reported_once(folder, damage):
    path = Path(path_of(folder, KeyRole.WORKER))
    keys = LiveKeys(str(path), KeyRole.WORKER)
    signer, text = keys.orders.signer, path.read_text()
    if damage == "gone":
        path.unlink()
    elif damage == "readable":
        before = path.stat().st_ctime_ns  # some file systems keep the same timestamp for 10 ms
        eventually(lambda: path.chmod(0o644) or path.stat().st_ctime_ns != before)
    elif damage == "rubbish":
        path.write_text("[")
    elif damage == "unsigned":
        path.write_text("")
    else:
        path.write_text(Path(of_submitter(folder, "ada")).read_text())
    line = looked(keys)
    assert str(path) in line
    assert "stay in use" in line
    assert looked(keys) == ""
    assert (keys.version, keys.orders.signer) == (0, signer)

    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(text)
    assert looked(keys) == ""
    folder.rotate()
    assert "was read again" in looked(keys)


def test_file_is_checked_at_most_once_a_second(folder, monkeypatch):
    monkeypatch.setattr(module, "_POLL_INTERVAL_S", 3600.0)
    keys = LiveKeys(path_of(folder, KeyRole.WORKER), KeyRole.WORKER)
    folder.rotate()
    monkeypatch.setattr(module, "_seen", lambda _path: 1 / 0)
    assert looked(keys) == ""
