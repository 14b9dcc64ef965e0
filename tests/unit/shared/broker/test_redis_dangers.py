"""Dangerous settings of a Redis server; tests/security shows that start-up rejects them."""

from __future__ import annotations

import pytest

from tunemq_shared.broker import redis_dangers
from tunemq_shared.broker.redis_address import parse_address
from tunemq_shared.broker.redis_cves import REDIS, VALKEY, RedisRelease
from tunemq_shared.broker.redis_dangers import CVE, DEFAULT_USER, PASSWORD, TLS, VERSION, dangers

#: An address without a server (RFC 5737).
_AWAY = "192.0.2.1"


@pytest.fixture(autouse=True)
def _nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_dangers, "lets_everybody_in", lambda address: "open" in address.user)


def found(url: str, version: str = "7.0.15") -> set[str]:
    return {danger.check for danger in dangers(parse_address(url), RedisRelease(REDIS, version))}


def test_separate_user_over_tls_has_no_danger():
    assert found(f"rediss://worker:secret@{_AWAY}:6379/0") == set()


@pytest.mark.parametrize(
    ("url", "checks"),
    [
        (f"redis://{_AWAY}", {DEFAULT_USER, TLS}),
        (f"redis://:secret@{_AWAY}", {DEFAULT_USER, TLS}),
        (f"rediss://default:secret@{_AWAY}", {DEFAULT_USER}),
        (f"redis://worker:secret@{_AWAY}", {TLS}),
        (f"rediss://worker:secret@{_AWAY}?ssl_cert_reqs=none", {TLS}),
        (f"rediss://open:secret@{_AWAY}", {PASSWORD}),
        ("redis://127.0.0.1", set()),
        ("unix:///run/redis.sock", set()),
    ],
)
def test_dangers_of_a_network_are_ignored_on_the_loopback(url: str, checks: set[str]):
    assert found(url) == checks


@pytest.mark.parametrize(
    ("version", "checks"),
    [
        ("6.0.16", {VERSION}),
        ("5.0", {VERSION}),
        ("6.2.0", set()),
        ("7.0.15", set()),
        ("7.1.999", set()),
        ("7.2.0", {CVE}),
        ("7.4.10", {CVE}),
        ("8.6.2", {CVE}),
        ("8.6.3", set()),
        ("8.10.0", set()),
        ("", set()),
        ("unknown", set()),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, checks: set[str]):
    assert found(f"rediss://worker:secret@{_AWAY}", version) == checks
    assert found("redis://127.0.0.1", version) == checks - {CVE}


def test_each_danger_names_place_and_fix_and_no_password():
    url = f"redis://default:secret@{_AWAY}"
    for release in (RedisRelease(REDIS, "7.4.0"), RedisRelease(VALKEY, "8.1.1")):
        found = list(dangers(parse_address(url), release))
        assert [danger.check for danger in found] == [DEFAULT_USER, TLS, CVE]
        for danger in found:
            assert _AWAY in danger.what
            assert danger.fix.endswith(".")
            assert "secret" not in danger.what + danger.fix
        assert release.version in found[-1].what
        assert ("8.1.7" in found[-1].what) == (release.product == VALKEY)
        assert "of your line or a vendor's package" in found[-1].fix
