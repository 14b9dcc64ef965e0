"""Servers that answer oddly are not taken for open ones, nor for closed ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Final

import pytest

from tunemq_scheduler.security.findings import Finding, FindingLevel
from tunemq_scheduler.security.store_probes import _S3Probe, probe_store, refuse_open_store
from tunemq_shared.base.errors import ConfigError, StoreError
from tunemq_shared.objects.s3_address import parse_address

pytestmark = [pytest.mark.integration, pytest.mark.security]

_ENVIRON: Final = {"AWS_ACCESS_KEY_ID": "ours", "AWS_SECRET_ACCESS_KEY": "our-secret-key"}
_LIST: Final = (
    b'<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    b"<Name>bucket</Name><IsTruncated>false</IsTruncated></ListBucketResult>"
)
#: Status and S3's word, to a request with this method and access key, which is empty for strangers
#: and forgers; status 0: hang up.
Answers = Callable[[str, str], tuple[int, str]]


@pytest.fixture(autouse=True)
def _probes_wait_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of a machine that does other things, too, may take longer to answer."""
    monkeypatch.setattr("tunemq_scheduler.security.store_probes.PROBE_ANSWER_S", 60.0)


@contextmanager
def odd_store(answers: Answers) -> Iterator[str]:
    """The address of a store that answers so; nothing is written there."""

    class _Odd(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
            given = self.headers.get("Authorization", "") + self.path
            is_forged = "Signature=" + "0" * 64 in given
            key = None if is_forged else re.search(r"Credential=([^/%]+)", given)
            status, code = answers(self.command, key[1] if key else "")
            if not status:
                self.close_connection = True
                return
            said = f'<?xml version="1.0"?><Error><Code>{code}</Code></Error>'.encode()
            body = _LIST if status == 200 else said
            self.send_response(status)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_DELETE = _answer  # noqa: N815  so http.server calls them

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), _Odd) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"s3://bucket/farm?endpoint=http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def levels(found: list[Finding]) -> dict[str, FindingLevel]:
    return {one.check: one.level for one in found if one.level is not FindingLevel.OK}


def _garage(_: str, key: str) -> tuple[int, str]:
    """Unknown and unauthorized users get the same answer."""
    return (200, "") if key == "ours" else (403, "AccessDenied")


def _known(_: str, key: str) -> tuple[int, str]:
    return (403, "AccessDenied" if key in {"minioadmin", ""} else "InvalidAccessKeyId")


def _credulous(_: str, key: str) -> tuple[int, str]:
    return (200, "") if key else (403, "AccessDenied")


def test_unknown_keys_that_are_denied_access_count_as_unknown():
    with odd_store(_garage) as address:
        found = probe_store(address, _ENVIRON)
    assert levels(found) == {}


def test_known_keys_are_distinguished_from_unknown_ones():
    with odd_store(_known) as address:
        (finding,) = (one for one in probe_store(address, _ENVIRON) if one.check == "store-keys")
    assert finding.refuses
    assert "(minioadmin)" in finding.what


def test_a_server_that_takes_any_keys_is_found():
    with odd_store(_credulous) as address:
        (finding,) = (one for one in probe_store(address, _ENVIRON) if one.check == "store-keys")
    assert finding.refuses
    assert "takes any keys" in finding.what


@pytest.mark.parametrize("status", [301, 307, 400, 503])
def test_unclear_answer_to_a_probe_is_reported_as_unknown(status: int):
    def answers(_: str, key: str) -> tuple[int, str]:
        return (status, "Odd") if not key else _garage(_, key)

    with odd_store(answers) as address:
        found = probe_store(address, _ENVIRON)
    unknown = {"store-anonymous"} | ({"store-unsigned-trailer"} if status in (301, 307) else set())
    assert levels(found) == dict.fromkeys(unknown, FindingLevel.WARNING)
    (finding,) = (one for one in found if one.check == "store-anonymous")
    assert f"HTTP status {status}" in finding.what


def test_redirected_forged_upload_does_not_count_as_refused():
    def answers(method: str, key: str) -> tuple[int, str]:
        return (307, "TemporaryRedirect") if method == "PUT" else _garage(method, key)

    with odd_store(answers) as address:
        found = levels(probe_store(address, _ENVIRON))
    assert found["store-unsigned-trailer"] is FindingLevel.WARNING


def test_unanswered_probe_does_not_prevent_a_start(monkeypatch: pytest.MonkeyPatch):
    def hangs_up_on_writing(method: str, key: str) -> tuple[int, str]:
        return (0, "") if method == "PUT" else _garage(method, key)

    def hangs_up_on_strangers(method: str, key: str) -> tuple[int, str]:
        return _garage(method, key) if key == "ours" else (0, "")

    for name, value in _ENVIRON.items():
        monkeypatch.setenv(name, value)
    told: list[str] = []
    for answers in (hangs_up_on_writing, hangs_up_on_strangers):
        with odd_store(answers) as address:
            refuse_open_store(address, is_insecure=False, tell=told.append)
    assert len(told) == 2
    assert "write: no answer" in told[0]
    assert "Whether others can use the store is not known" in told[1]
    with odd_store(_known) as address, pytest.raises(ConfigError, match="minioadmin"):
        refuse_open_store(address, is_insecure=False, tell=told.append)


def test_unclear_answer_about_a_part_of_a_farm_is_reported_as_unknown():
    asked = []

    def answers(method: str, key: str) -> tuple[int, str]:
        if method == "PUT" and not key:
            asked.append(method)
            if len(asked) == 4:
                return 503, "SlowDown"
        return _garage(method, key)

    with odd_store(answers) as address:
        found = probe_store(address, _ENVIRON)
    assert levels(found) == {"store-anonymous": FindingLevel.WARNING}
    (finding,) = (one for one in found if one.check == "store-anonymous")
    assert "(write */search/trial/result.json: HTTP status 503)" in finding.what


@pytest.mark.parametrize(
    ("bucket", "endpoint", "url"),
    [
        ("my.bucket", "https://s3.amazonaws.com", "https://s3.us-east-1.amazonaws.com/my.bucket"),
        ("bucket", "https://s3.amazonaws.com", "https://bucket.s3.us-east-1.amazonaws.com/"),
        ("bucket", "http://127.0.0.1:9000", "http://127.0.0.1:9000/bucket"),
    ],
)
def test_anonymous_probes_use_the_address_of_the_farm(
    monkeypatch: pytest.MonkeyPatch, bucket: str, endpoint: str, url: str
):
    asked = []

    def ask(self, _method: str, target: str, *_: object) -> None:
        asked.append(f"{self._endpoint}{target}")
        raise StoreError("enough")

    monkeypatch.setattr("tunemq_scheduler.security.store_probes._Asker.ask", ask)
    address = parse_address(f"s3://{bucket}/farm?endpoint={endpoint}", {})
    with pytest.raises(StoreError, match="enough"):
        _S3Probe(address, _ENVIRON).findings()
    assert asked[0].partition("?")[0] == url


def test_certificates_that_are_missing_are_named():
    with pytest.raises(ConfigError, match=r"'/missing' .*No such file"):
        probe_store("s3://farm?endpoint=https://127.0.0.1:1&ca_file=/missing", _ENVIRON)
