"""A key file is accepted only if it is valid and no other user can read or write it."""

from __future__ import annotations

import base64
import hmac
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.signing.key_files import KeyFile, check_private, read_key_file
from tunemq_shared.signing.message_signing import InvalidSignature

ONE, TWO, THREE, SIX = (base64.b64encode(bytes([n]) * 32).decode() for n in (1, 2, 3, 6))
WHOLE = f"""
[orders]
00000000000000a2 = "{TWO}"
00000000000000a1 = "{ONE}"

[events]
00000000000000b1 = "{THREE}"

[submitters.ada]
00000000000000c1 = "{base64.b64encode(b"4" * 32).decode()}"

[submitters."ben o. x"]
00000000000000c2 = "{base64.b64encode(b"5" * 32).decode()}"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "scheduler.toml"
    path.touch(mode=0o600)
    return path


def test_keys_are_read_in_the_order_of_the_file(path):
    path.write_text(WHOLE)
    keys = read_key_file(path)

    assert [key.id.hex() for key in keys.orders] == ["00000000000000a2", "00000000000000a1"]
    assert keys.orders_signer().signer.hex() == "00000000000000a2"
    assert keys.events[0].secret == b"\3" * 32
    assert list(keys.submitters) == ["ada", "ben o. x"]
    assert keys.submitter_signer("ada").open(keys.submitter_signer("ada").close(b"x")) == b"x"


def test_keys_of_a_searchs_journals_are_those_that_the_page_describes(path):
    path.write_text(f'{WHOLE}\n[journals]\n00000000000000d1 = "{SIX}"\n')
    (key,) = read_key_file(path).journal_keys("digits")

    secret = hmac.digest(b"\6" * 32, b"journals of the search digits", "sha256")
    assert (key.id.hex(), key.secret) == ("00000000000000d1", secret)


def test_user_without_keys_cannot_sign(path):
    path.write_text(WHOLE)
    with pytest.raises(InvalidSignature, match="'eve'") as found:
        read_key_file(path).submitter_signer("eve")
    assert found.value.reason == "unknown_submitter"
    assert not KeyFile().submitter_signer("eve").is_signed


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o666, 0o601])
def test_file_that_others_may_use_is_rejected_with_the_fix(path, mode):
    path.write_text(WHOLE)
    path.chmod(mode)
    for look in (read_key_file, check_private):
        with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 600 {path}"):
            look(path)
    path.chmod(0o400)
    check_private(path)
    assert read_key_file(path).orders


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_file_of_another_user_is_rejected(path):
    path.write_text(WHOLE)
    os.chown(path, 4711, -1)
    with pytest.raises(ConfigError, match=f"belongs to user 4711.*chown 0 {path}"):
        read_key_file(path)


def test_path_that_is_no_file_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.toml cannot be read.*tunemq keys new"):
        read_key_file(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="is no file"):
        read_key_file(tmp_path)
    os.mkfifo(tmp_path / "pipe", mode=0o600)
    with pytest.raises(ConfigError, match="is no file"):  # and opening it does not block
        read_key_file(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no keys"),
        ("[orders]", "has no keys"),
        ("orders = 3", "orders is no table"),
        ("[order]\nx = 1", "'order', which is not known"),
        (f'[orders]\nkey = "{ONE}"', "no id of a key"),
        (f'[orders]\n00000000000000A1 = "{ONE}"', "no id of a key"),
        ('[orders]\n00000000000000a1 = "c2hvcnQ="', "not the base64 of 32 bytes"),
        ('[orders]\n00000000000000a1 = "%%%"', "not the base64 of 32 bytes"),
        ("[orders]\n00000000000000a1 = 7", "not the base64 of 32 bytes"),
        ("[submitters.ada]", r"no key in \[submitters.ada\]"),
        ("submitters = 1", "submitters is no table"),
        ("[submitters]\nada = 1", "submitters.ada is no table"),
        (f'[submitters."a/b"]\n00000000000000a1 = "{ONE}"', "'a/b' is no name"),
        (f'[submitters.a.b]\n00000000000000a1 = "{ONE}"', "no id of a key"),
        ("[orders", "is invalid"),
        ("\udcff", "is no text"),
        ("x" * (2**20 + 1), "more than 1048576 bytes"),
        (
            f'[orders]\n00000000000000a1 = "{ONE}"\n[events]\n00000000000000a1 = "{TWO}"',
            "a1 st.*no",
        ),
        (
            f'[orders]\n00000000000000a1 = "{ONE}"\n[events]\n00000000000000a2 = "{ONE}"',
            "a2 st.*no",
        ),
    ],
)
def test_error_is_named_and_no_secret_is_shown(path, text, said):
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=said) as found:
        read_key_file(path)
    assert str(path) in str(found.value)
    assert ONE[:8] not in str(found.value)


@given(st.binary(max_size=400) | st.text(max_size=200).map(str.encode))
def test_any_file_is_read_or_rejected(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.touch(mode=0o600)
    path.write_bytes(data)
    with pytest.raises(ConfigError):
        read_key_file(path)


@given(st.integers(0, len(WHOLE)), st.integers(0, 255))
def test_one_changed_byte_gives_keys_or_an_error_without_a_secret(tmp_path_factory, place, byte):
    path = tmp_path_factory.getbasetemp() / "changed.toml"
    path.touch(mode=0o600)
    data = bytearray(WHOLE.encode() + b"\n")
    data[place] = byte
    path.write_bytes(data)
    try:
        assert not read_key_file(path).is_empty
    except ConfigError as error:
        assert not any(secret[4:12] in str(error) for secret in (ONE, TWO, THREE))  # noqa: PT017
