"""Where a served folder is, and with which token one is let in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunemq_shared.errors import ConfigError, StoreError
from tunemq_shared.http_address import find_token, parse_http_address
from tunemq_shared.store_address import canonical_address, is_remote, join, without_settings
from tunemq_shared.stores import open_objects

TOKEN = "a-token-of-24-characters"


@pytest.mark.parametrize(
    ("text", "endpoint", "prefix"),
    [
        ("http://head:7380", "http://head:7380", ""),
        ("http://head:7380/", "http://head:7380", ""),
        ("http://head:7380/a/b/", "http://head:7380", "a/b"),
        ("https://head/a%20b/ü", "https://head", "a b/ü"),
        ("http://[::1]:7380/a", "http://[::1]:7380", "a"),
    ],
)
def test_server_and_prefix_are_in_the_address(text, endpoint, prefix):
    address = parse_http_address(text)
    assert (address.endpoint, address.prefix) == (endpoint, prefix)


@pytest.mark.parametrize("text", ["http://h", "https://h:1/a b/ü?ca_file=/x/ca.pem"])
def test_a_canonical_address_means_the_same_everywhere(text):
    assert is_remote(text)
    canonical = canonical_address(text, {})
    assert canonical_address(canonical, {}) == canonical
    assert parse_http_address(canonical) == parse_http_address(text)
    assert without_settings(canonical) == parse_http_address(text).place


@given(st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1))
def test_any_name_of_an_experiment_can_be_joined(name):
    if name in (".", ".."):
        return
    joined = join("https://host/a?ca_file=/ca.pem", name)
    assert parse_http_address(joined).prefix == f"a/{name}".strip("/")
    assert str(parse_http_address(joined)) == joined


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://someone:hunter2@host/a", "has a user or token before its host"),
        ("http://host/a?token=hunter2", "unknown setting 'token'.*A token does not belong"),
        ("http://host/a?ca_fil=x", "unknown setting 'ca_fil'; there is ca_file"),
        ("http:///a", "give http://host:port/prefix"),
        ("http://host:0/a", "give http://host:port/prefix"),
        ("http://host:port/hunter2@x", "is no address"),
        ("http://[::1/a", "is no address"),
        ("http://host/a/../b", "visible names"),
        ("http://host/a//b", "visible names"),
        ("http://host/a#b", "visible names"),
    ],
)
def test_addresses_that_cannot_be_used_are_refused_without_their_secrets(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_http_address(text)
    assert "hunter2" not in str(caught.value)


def test_the_token_is_in_the_environment_or_in_a_file(tmp_path):
    file = tmp_path / "token"
    file.write_text(f" {TOKEN}\n")
    assert find_token("place", {"TUNEMQ_STORE_TOKEN": TOKEN}) == TOKEN
    assert find_token("place", {"TUNEMQ_STORE_TOKEN_FILE": str(file)}) == TOKEN


def test_a_token_that_is_missing_is_told_with_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(StoreError, match="no token for the store at http://head/a: set TUNEMQ_"):
        open_objects("http://head/a")
    monkeypatch.setenv("TUNEMQ_STORE_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(StoreError, match=r"none: No such file.*correct TUNEMQ_STORE_TOKEN_FILE"):
        open_objects("http://head/a")


@pytest.mark.parametrize("token", ["short", "with spaces in it......", "x" * 513, "ü" * 20])
def test_what_can_be_no_token_is_refused_and_not_quoted(token, tmp_path):
    file = tmp_path / "token"
    file.write_text(token)
    for name, value in (("TUNEMQ_STORE_TOKEN", token), ("TUNEMQ_STORE_TOKEN_FILE", str(file))):
        with pytest.raises(StoreError, match=f"{name}.* has no token in it") as caught:
            find_token("place", {name: value})
        assert token not in str(caught.value)


def test_certificates_that_cannot_be_used_are_told(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEMQ_STORE_TOKEN", TOKEN)
    (tmp_path / "empty").touch()
    for name, message in (("none", "No such file or directory"), ("empty", "no certificate in it")):
        with pytest.raises(ConfigError, match=f"{message}; correct ca_file"):
            open_objects(f"https://head/a?ca_file={tmp_path}/{name}")
