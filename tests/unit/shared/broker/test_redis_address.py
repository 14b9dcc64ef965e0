"""Redis URLs, as the node and as Celery read them."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.broker.redis_address import parse_address
from tunemq_workers.broker.redis_client import pack


@pytest.mark.parametrize(
    ("url", "for_celery"),
    [
        ("unix:///run/r.sock", "redis+socket:///run/r.sock?virtual_host=0"),
        ("unix://:p%40ss@/run/r.sock?db=3", "redis+socket://:p%40ss@/run/r.sock?virtual_host=3"),
        ("redis://farm", "redis://farm:6379/0"),
        ("redis://me:s%2Fcret@farm:7000/2", "redis://me:s%2Fcret@farm:7000/2"),
        ("redis://[::1]:7000", "redis://[::1]:7000/0"),
        ("unix://me:s%2Fcret@/run/r%20s", "redis+socket://me:s%2Fcret@/run/r%20s?virtual_host=0"),
        ("rediss://farm", "rediss://farm:6379/0?ssl_cert_reqs=required&ssl_check_hostname=true"),
        (
            "rediss://farm?ssl_cert_reqs=none",
            "rediss://farm:6379/0?ssl_cert_reqs=none&ssl_check_hostname=false",
        ),
    ],
)
def test_celery_gets_the_same_address(url, for_celery):
    assert parse_address(url).celery_url() == for_celery


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:secret@farm:7000/2", "redis://farm:7000/2"),
        ("unix://me:secret@/run/r.sock?db=3", "unix:///run/r.sock?db=3"),
        ("unix:///run/r.sock?password=secret", "unix:///run/r.sock?db=0"),
        ("rediss://me:secret@[::1]", "rediss://[::1]:6379/0"),
    ],
)
def test_password_is_not_shown(url: str, shown: str):
    address = parse_address(url)
    assert address.without_credentials() == shown
    for text in (str(address), repr(address), f"{address}", repr([address])):
        assert "secret" not in text


def test_all_clients_get_the_files_for_tls(tmp_path: Path):
    files = {name: tmp_path / f"{name}.pem" for name in ("ca", "crt", "key")}
    for file in files.values():
        file.touch()
    query = f"ssl_ca_certs={files['ca']}&ssl_certfile={files['crt']}&ssl_keyfile={files['key']}"
    address = parse_address(f"rediss://me:secret@farm/1?{query}")
    assert (address.ca_file, address.cert_file, address.key_file) == tuple(map(str, files.values()))
    for url in (address.url(), address.celery_url()):
        again = dict(parse_qsl(urlsplit(url).query))
        assert again.pop("ssl_check_hostname") == "true"
        assert again.pop("ssl_cert_reqs") == "required"
        assert list(again.values()) == list(map(str, files.values()))


@pytest.mark.parametrize("url", ["", "farm:6379", "http://farm", "unix://", "redis://farm:x"])
def test_invalid_address_is_rejected(url: str):
    with pytest.raises(ConfigError, match=r"The address of Redis"):
        parse_address(url)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://farm?ssl_ca_certs=/ca.pem", "'ssl_ca_certs'; there are: db"),
        ("rediss://farm?ssl_ca_cert=/ca.pem", "'ssl_ca_cert'; there are: db, ssl_ca_certs"),
        ("rediss://farm?ssl_ca_certs=ca.pem", "absolute path"),
        ("rediss://farm?ssl_ca_certs=/no/such.pem", "no such file"),
        ("rediss://farm?ssl_cert_reqs=optional", "write required, or none"),
        ("unix:///run/r.sock?ssl_ca_certs=/ca.pem", "there are: db, password"),
    ],
)
def test_option_that_some_client_would_ignore_is_rejected(url: str, text: str):
    with pytest.raises(ConfigError, match=re.escape(text)):
        parse_address(url)


def test_error_about_a_password_does_not_show_it():
    with pytest.raises(ConfigError) as rejected:
        parse_address("redis://me:canary/7@farm:6379/0")
    assert "canary" not in str(rejected.value)
    for url in (
        "redis://me:7?canary=1@farm:6379/0",
        "redis://me:7?db=canary@farm:6379/0",
        "rediss://me:7?ssl_ca_certs=canary@farm:6379/0",
        "redis://me:7#canary@farm:6379/0",
        "canary://me:7?x@farm:6379/0",
    ):
        with pytest.raises(ConfigError, match="%3F %2F %23") as rejected:
            parse_address(url)
        assert "canary" not in str(rejected.value)


@pytest.mark.parametrize(
    ("url", "is_local"),
    [
        ("unix:///run/r.sock", True),
        ("redis://127.0.0.1", True),
        ("redis://127.8.8.8", True),
        ("redis://[::1]", True),
        ("redis://[::ffff:127.0.0.1]", True),
        ("redis://localhost", True),
        ("redis://10.0.0.1", False),
        ("redis://0.0.0.0", False),
        ("redis://[fe80::1]", False),
    ],
)
def test_only_addresses_on_this_machine_are_local(url: str, is_local: bool):
    assert parse_address(url).is_local is is_local


def test_commands_are_packed_as_redis_reads_them():
    assert pack([["SET", b"k\r\n", 1]]) == b"*3\r\n$3\r\nSET\r\n$3\r\nk\r\n\r\n$1\r\n1\r\n"
