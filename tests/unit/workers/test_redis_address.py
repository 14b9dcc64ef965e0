"""Redis URLs, as the node and as Celery read them."""

from __future__ import annotations

import pytest

from tunemq_shared.errors import ConfigError
from tunemq_workers.redis_address import parse_address
from tunemq_workers.redis_client import pack


@pytest.mark.parametrize(
    ("url", "for_celery"),
    [
        ("unix:///run/r.sock", "redis+socket:///run/r.sock?virtual_host=0"),
        ("unix://:p%40ss@/run/r.sock?db=3", "redis+socket://:p%40ss@/run/r.sock?virtual_host=3"),
        ("redis://farm", "redis://farm:6379/0"),
        ("redis://me:s%2Fcret@farm:7000/2", "redis://me:s%2Fcret@farm:7000/2"),
        ("redis://[::1]:7000", "redis://[::1]:7000/0"),
        ("rediss://farm", "rediss://farm:6379/0?ssl_cert_reqs=required"),
        (
            "rediss://farm?ssl_ca_certs=/ca.pem",
            "rediss://farm:6379/0?ssl_cert_reqs=required&ssl_ca_certs=%2Fca.pem",
        ),
    ],
)
def test_celery_is_sent_to_the_same_place(url, for_celery):
    assert parse_address(url).celery_url() == for_celery


def test_a_password_is_not_shown():
    assert "secret" not in str(parse_address("redis://me:secret@farm:7000/2"))


@pytest.mark.parametrize("url", ["", "farm:6379", "http://farm", "unix://", "redis://farm:x"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError, match=r"The address of Redis"):
        parse_address(url)


def test_commands_are_packed_as_redis_reads_them():
    assert pack([["SET", b"k\r\n", 1]]) == b"*3\r\n$3\r\nSET\r\n$3\r\nk\r\n\r\n$1\r\n1\r\n"
