"""Asks an object store what it would let others do.

Tried are: to be nobody, to have keys that everybody knows, to forge a signature.

What is tried is harmless: objects that are written for it are called ``.tunemq-probe-...``, below
the farm's prefix, and are removed again. Nothing of the farm's is read, changed or removed.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import ipaddress
import os
import re
import secrets
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple
from urllib.parse import urlencode, urlsplit

from tunemq_scheduler.security.findings import Finding, ok, problem, warning
from tunemq_scheduler.security.forged_uploads import forgeries
from tunemq_scheduler.security.start_up_findings import refuse
from tunemq_shared.base.errors import StoreError
from tunemq_shared.base.retrying import StoreUnavailable
from tunemq_shared.objects.object_client import StoreRequestDenied
from tunemq_shared.objects.remote_objects import PROBE, PROBE_ANSWER_S
from tunemq_shared.objects.s3_address import (
    DEFAULT_KEYS,
    S3Address,
    S3Credentials,
    as_reached_from_here,
    find_ca_file,
    find_keys,
    is_amazon,
    parse_address,
)
from tunemq_shared.objects.s3_client import S3Client
from tunemq_shared.objects.store_address import is_remote

#: Seconds between two clocks: from here on somebody should know; S3 refuses from 15 minutes on.
SKEW_S: Final = 60.0
MAX_SKEW_S: Final = 840.0
#: What is answered to keys that may list, and to such as the server knows, which may not.
_LET_IN: Final = "let in"
_KNOWN: Final = frozenset({_LET_IN, "AccessDenied", "NoSuchBucket"})
_CODE: Final = re.compile(rb"<Code>([A-Za-z0-9]+)</Code>")
#: What servers such as rclone say, with HTTP's 400, to a request that nobody signed.
_LACKS_SIGNATURE: Final = frozenset(
    {"UnsupportedAlgorithm", "MissingFields", "MissingSecurityHeader"}
)
_SYNCHRONISE: Final = "set both clocks by NTP, as `timedatectl set-ntp true` does."
_ROLES: Final = (
    "give each role a user of its own with the policies in deploy/minio "
    "(scheduler-policy.json, worker-policy.json, submitter-policy.json)"
)
_RANDOM: Final = "set MINIO_ROOT_USER and MINIO_ROOT_PASSWORD of the server to random values"
_S3_TLS: Final = (
    "start MinIO with a certificate (--certs-dir), say endpoint=https://... in the address, and "
    "name the certificate with ca_file."
)


def refuse_open_store(address: str, *, is_insecure: bool, tell: Callable[[str], None]) -> None:
    """Return if a scheduler may use this store, which has been seen to work.

    Args:
        is_insecure: whether ``--insecure`` was given: then what is wrong is only told.
        tell: shows a line to people.

    Raises:
        ConfigError: it may not; says all that is wrong, and how to mend it.
        StoreError: see `probe_store`.
    """
    try:
        found = probe_store(address)
    except StoreUnavailable as error:
        found = [
            warning(
                "store",
                f"Whether others can use the store is not known: {error}",
                "look again with `tunemq doctor`, once the store answers.",
            )
        ]
    refuse(found, is_insecure=is_insecure, tell=tell)


def probe_store(address: str, environ: Mapping[str, str] | None = None) -> list[Finding]:
    """What is wrong with a store, as it looks from here; for a folder there is nothing to find.

    Args:
        address: such as ``s3://bucket/prefix?endpoint=...``.
        environ: where keys and certificates are named; this process's unless another is given.

    Raises:
        ConfigError: the address cannot be used.
        StoreUnavailable: the store does not answer.
        StoreError: there are no keys for it, or its certificate is not trusted.
    """
    environ = os.environ if environ is None else environ
    if not is_remote(address):
        return []
    known = parse_address(address, environ)
    return _S3Probe(as_reached_from_here(known, environ), environ).findings()


class _ProbeAnswer(NamedTuple):
    """An answer: HTTP's status, 0 for none; the ``Date`` in its head, and S3's word for why not.

    Both are empty without one.
    """

    status: int
    date: str = ""
    word: str = ""

    def __str__(self) -> str:
        return f"HTTP status {self.status}" if self.status else "no answer"

    @property
    def is_done(self) -> bool:
        """Whether the server did what it was asked."""
        return 200 <= self.status < 300

    @property
    def is_elsewhere(self) -> bool:
        """Whether another server is to be asked."""
        return 300 <= self.status < 400

    @property
    def is_rejected(self) -> bool:
        """Whether whoever asked may not; 400 may also say that another place is to be asked."""
        if self.status == 400:
            return self.word in _LACKS_SIGNATURE
        return 400 < self.status < 500 and self.status not in (408, 429)


class _Asker:
    """Sends requests as anybody may."""

    def __init__(self, endpoint: str, ca_file: str) -> None:
        self._endpoint = endpoint
        host = urlsplit(endpoint).netloc
        self._connection = http.client.HTTPConnection(host, timeout=PROBE_ANSWER_S)
        if endpoint.startswith("https://"):
            trust = ssl.create_default_context(cafile=ca_file or None)
            self._connection = http.client.HTTPSConnection(
                host, timeout=PROBE_ANSWER_S, context=trust
            )

    def ask(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> _ProbeAnswer:
        """What the server answers.

        Raises:
            StoreUnavailable: nothing.
        """
        try:
            self._connection.request(method, target, body, dict(headers or {}))
            response = self._connection.getresponse()
            word = _CODE.search(response.read(2**16))
            said = word[1].decode() if word else ""
            return _ProbeAnswer(response.status, response.headers.get("Date", ""), said)
        except (OSError, http.client.HTTPException) as error:
            raise StoreUnavailable(f"{self._endpoint} does not answer: {error}.") from error
        finally:
            self._connection.close()  # the next request opens it again


class _S3Probe:
    """One look at a bucket of an S3 server."""

    def __init__(self, address: S3Address, environ: Mapping[str, str]) -> None:
        self._address = address
        self._keys = find_keys(environ, address.profile)
        self._ca_file = find_ca_file(address, environ)
        self._client = self._client_of(self._keys)
        where = urlsplit(self._client.url())
        self._asker = _Asker(f"{where.scheme}://{where.netloc}", self._ca_file)
        #: The names of probes that the server took, or may have taken.
        self._written: set[str] = set()

    def findings(self) -> list[Finding]:
        """All that is found.

        Raises:
            StoreUnavailable: the server does not answer.
        """
        try:
            listed = self._list_as_anybody()
            found = [
                self._tls(),
                self._default_keys(),
                self._anonymous(listed),
                self._unsigned_trailer(),
                clock_finding(self._address.place, listed.date),
            ]
        finally:
            left = self._remove()
            self._client.close()
        return found + left

    def _list_as_anybody(self) -> _ProbeAnswer:
        """The answer to whoever wants to know what is in the bucket, and says not who he is."""
        query = {"list-type": "2", "max-keys": "1", "prefix": self._address.prefix}
        return self._asker.ask("GET", self._target("", urlencode(query)))

    def _tls(self) -> Finding:
        endpoint = self._address.endpoint
        if endpoint.startswith("https://"):
            return ok("store-tls", f"The store {endpoint} is reached by TLS.")
        if is_on_loopback(endpoint):
            return ok("store-tls", f"The store {endpoint} is on this machine's loopback.")
        return warning(
            "store-tls",
            f"The store {endpoint} is reached without TLS: whoever sees the network sees "
            "checkpoints and access keys, though not the secret ones.",
            _S3_TLS,
        )

    def _default_keys(self) -> Finding:
        """Whether we have well-known keys, or the server knows such."""
        endpoint = self._address.endpoint
        if self._keys[:2] in DEFAULT_KEYS:
            return problem(
                "store-keys",
                f"The keys for {self._address.place} are those that servers are shipped with "
                f"({self._keys.access_key}): everybody knows them.",
                f"{_RANDOM}, and {_ROLES}.",
                refuses=True,
            )
        if is_amazon(endpoint):
            return ok("store-keys", f"{endpoint} has no keys of its own.")
        nobodys = self._answer_to(S3Credentials(secrets.token_hex(10), secrets.token_hex(20)))
        if nobodys == _LET_IN:
            return problem(
                "store-keys",
                f"The server {endpoint} takes any keys, also such as nobody has.",
                f"{_RANDOM}.",
                refuses=True,
            )
        if not nobodys:
            return warning(
                "store-keys",
                f"Whether the server {endpoint} knows keys that everybody knows was not tried: it"
                " did not answer to others.",
                "look again with `tunemq doctor`.",
            )
        for pair in DEFAULT_KEYS:
            answer = self._answer_to(S3Credentials(*pair))
            # Who is told that he may not is known, where others are told something else.
            if answer != nobodys and answer in _KNOWN:
                return problem(
                    "store-keys",
                    f"The server {endpoint} takes the keys that it was shipped with ({pair[0]}): "
                    "everybody knows them.",
                    f"{_RANDOM}.",
                    refuses=True,
                )
        return ok("store-keys", f"The server {endpoint} knows no keys that everybody knows.")

    def _answer_to(self, keys: S3Credentials) -> str:
        """What somebody with these keys is told: S3's word for why not; empty for no answer."""
        with contextlib.closing(self._client_of(keys)) as client:
            try:
                next(client.listed(self._name()), None)
            except StoreRequestDenied as rejection:
                return rejection.code
            except StoreError:
                return ""
            return _LET_IN

    def _anonymous(self, listed: _ProbeAnswer) -> Finding:
        """Whether somebody without keys may list, write, read or remove."""
        name = self._name()
        answers = {"list": listed, "write": self._put(name)}
        is_there = answers["write"].is_done or self._put_ours(name)
        if is_there:
            answers["read"] = self._ask("GET", name)
            answers["remove"] = self._ask("DELETE", name)
        place = self._address.place
        if may := [verb for verb, answer in answers.items() if answer.is_done]:
            return problem(
                "store-anonymous",
                f"{place} is public: without any keys one may {' and '.join(may)} objects there.",
                "make the bucket private, as `mc anonymous set none "
                f"ALIAS/{self._address.bucket}` does.",
                refuses=True,
            )
        unclear = {verb: answer for verb, answer in answers.items() if not answer.is_rejected}
        if unclear:
            said = ", ".join(f"{verb}: {answer}" for verb, answer in unclear.items())
            return warning(
                "store-anonymous",
                f"Whether {place} is public is not known: to requests without keys its server says "
                f"neither yes nor no ({said}).",
                "see that endpoint and region in the address are those of the bucket, and try "
                f"without keys, as `aws s3 ls --no-sign-request s3://{self._address.bucket}` does.",
            )
        untried = "" if is_there else "; reading was not tried: our own keys may not write there"
        return ok("store-anonymous", f"Without keys one gets nowhere in {place}{untried}.")

    def _unsigned_trailer(self) -> Finding:
        """Whether the server writes what nobody has signed."""
        address, name = self._address, self._name()
        folder, _, last = name.rpartition("/")
        answers = {
            forgery.weakness: self._put(name, forgery.query, forgery.headers, forgery.body)
            for forgery in forgeries(folder, last, self._keys.access_key, address.region)
        }
        if taken := [weakness for weakness, answer in answers.items() if answer.is_done]:
            return problem(
                "store-unsigned-trailer",
                f"The server {address.endpoint} takes uploads with a forged signature "
                f"({', '.join(taken)}): who knows the access key {self._keys.access_key[:4]}... "
                f"can write to {address.bucket} without the secret one.",
                f"{_ROLES}: they forbid such uploads whatever the server's version; or use a "
                "server without this weakness (MinIO AIStor from RELEASE.2026-04-11T03-20-12Z on).",
            )
        if any(answer.is_elsewhere for answer in answers.values()):
            return warning(
                "store-unsigned-trailer",
                f"Whether {address.endpoint} takes uploads with a forged signature is not known: "
                "it sends them elsewhere.",
                "see that endpoint and region in the address are those of the bucket.",
            )
        return ok(
            "store-unsigned-trailer",
            f"Uploads to {address.place} with a forged signature are refused.",
        )

    def _ask(
        self,
        method: str,
        name: str,
        query: str = "",
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> _ProbeAnswer:
        """The answer to whoever is nobody, and asks about an object."""
        try:
            return self._asker.ask(method, self._target(name, query), headers, body)
        except StoreUnavailable:
            return _ProbeAnswer(0)

    def _put(
        self,
        name: str,
        query: str = "",
        headers: Mapping[str, str] | None = None,
        body: bytes = b"probe",
    ) -> _ProbeAnswer:
        """Try to write a probe without a signature of ours."""
        answered = self._ask("PUT", name, query, headers, body)
        if answered.is_done or not answered.status:
            self._written.add(name)
        return answered

    def _put_ours(self, name: str) -> bool:
        """Write a probe with our keys; whether it is there."""
        try:
            self._client.put(name, b"probe", "it cannot be written")
        except StoreRequestDenied:
            return False
        except StoreError:  # it may come to be all the same
            self._written.add(name)
            return False
        self._written.add(name)
        return True

    def _name(self) -> str:
        """The key of a new probe."""
        prefix = f"{self._address.prefix}/" if self._address.prefix else ""
        return f"{prefix}{PROBE}{secrets.token_hex(6)}"

    def _target(self, name: str, query: str = "") -> str:
        path = urlsplit(self._client.url(name)).path
        return f"{path}?{query}" if query else path

    def _client_of(self, keys: S3Credentials) -> S3Client:
        return S3Client(
            self._address,
            keys,
            self._ca_file,
            connect_s=PROBE_ANSWER_S,
            read_s=PROBE_ANSWER_S,
            at_once=1,
        )

    def _remove(self) -> list[Finding]:
        """Remove the probes that were written; what is to be said of those that stay."""
        left = []
        for name in self._written:
            try:
                self._client.remove(name, "it cannot be removed")
            except StoreError as error:
                left.append(
                    warning(
                        "store-probe",
                        f"A probe may be left in {self._address.bucket}: {error}",
                        f"remove it: mc rm ALIAS/{self._address.bucket}/{name}",
                    )
                )
        return left


def clock_finding(place: str, date: str) -> Finding:
    """How far this machine's clock is from the one that wrote this ``Date``."""
    here = time.time()
    try:
        there = email.utils.parsedate_to_datetime(date).timestamp()
    except ValueError:
        return ok("store-clock", f"The server of {place} does not say what time it has.")
    skew = here - there
    said = (
        f"The clock of this machine is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} "
        f"that of the server of {place}"
    )
    if abs(skew) < SKEW_S:
        return ok("store-clock", f"The clocks of this machine and of the server of {place} agree.")
    if abs(skew) < MAX_SKEW_S:
        return warning("store-clock", f"{said}.", _SYNCHRONISE)
    return problem(
        "store-clock", f"{said}: S3 refuses what is signed 15 minutes off.", _SYNCHRONISE
    )


def is_on_loopback(endpoint: str) -> bool:
    """Whether what is sent to this ``http[s]://host:port`` stays on this machine."""
    host = urlsplit(endpoint).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
