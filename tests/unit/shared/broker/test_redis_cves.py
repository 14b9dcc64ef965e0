"""Versions of Redis and Valkey: how each reports its own, and which ones have the fixes."""

from __future__ import annotations

import pytest

from tunemq_shared.broker.redis_cves import (
    REDIS,
    VALKEY,
    RedisRelease,
    release_in_hello,
    release_in_info,
)

#: The reply of Valkey 8.0.1.
_VALKEY_INFO = {"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "8.0.1"}


def test_valkeys_version_counts():
    assert release_in_info(_VALKEY_INFO) == RedisRelease(VALKEY, "8.0.1")
    assert release_in_hello([b"server", b"valkey", b"version", b"8.0.1"]) == (VALKEY, "8.0.1")


def test_redis_has_one_version():
    assert release_in_info({"redis_version": "7.0.15"}) == RedisRelease(REDIS, "7.0.15")
    assert release_in_hello([b"server", b"redis", b"version", b"7.0.15"]) == (REDIS, "7.0.15")


@pytest.mark.parametrize("answer", [None, Exception("NOAUTH"), [], [b"server"], [b"version", 7]])
def test_missing_version_is_unknown(answer: object):
    assert release_in_hello(answer) == RedisRelease(REDIS, "")
    assert not release_in_hello(answer).number


@pytest.mark.parametrize(
    ("product", "version", "is_weak"),
    [
        (REDIS, "6.2.19", True),
        (REDIS, "6.2.20", False),
        (REDIS, "7.0.15", True),
        (REDIS, "7.2.10", True),
        (REDIS, "7.2.11", False),
        (REDIS, "7.4.5", True),
        (REDIS, "7.4.6", False),
        (REDIS, "8.0.3", True),
        (REDIS, "8.0.4", False),
        (REDIS, "8.2.1", True),
        (REDIS, "8.2.2", False),
        (REDIS, "8.4.0", False),
        (REDIS, "", False),
        (VALKEY, "7.2.10", True),
        (VALKEY, "7.2.11", False),
        (VALKEY, "8.0.5", True),
        (VALKEY, "8.0.6", False),
        (VALKEY, "8.1.3", True),
        (VALKEY, "8.1.4", False),
        (VALKEY, "9.0.0", False),
        (VALKEY, "", False),
    ],
)
def test_release_with_lua_weaknesses_is_known_by_line(product: str, version: str, *, is_weak: bool):
    assert RedisRelease(product, version).has_lua_cves is is_weak


@pytest.mark.parametrize(
    ("product", "version", "is_weak"),
    [
        (REDIS, "7.0.15", False),
        (REDIS, "7.2.0", True),
        (REDIS, "7.2.4", True),
        (REDIS, "8.0.8", True),
        (REDIS, "8.6.2", True),
        (REDIS, "8.6.3", False),
        (REDIS, "", False),
        (VALKEY, "7.2.4", True),
        (VALKEY, "7.2.12", True),
        (VALKEY, "7.2.13", False),
        (VALKEY, "8.0.7", True),
        (VALKEY, "8.0.8", False),
        (VALKEY, "8.1.6", True),
        (VALKEY, "8.1.7", False),
        (VALKEY, "9.0.3", True),
        (VALKEY, "9.0.4", False),
        (VALKEY, "9.1.0", False),
        (VALKEY, "", False),
    ],
)
def test_each_line_has_a_first_version_without_the_weakness(
    product: str, version: str, *, is_weak: bool
):
    assert RedisRelease(product, version).has_cve is is_weak
