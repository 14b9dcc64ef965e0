"""Probe an object store: what would it allow strangers?

The probes are requests without keys, with well-known keys, and with forged signatures.

They are harmless: the objects that they write are below the farm's prefix, with
``.tunemq-probe-...`` in their names, and are removed. They do not read, change or remove any other
object of the farm.
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
from tunemq_scheduler.security.forged_signatures import forgeries
from tunemq_scheduler.security.start_up_findings import refuse
from tunemq_scheduler.security.store_role_probes import SCHEDULERS_OWN
from tunemq_shared.base.errors import StoreError
from tunemq_shared.base.retrying import StoreUnavailable
from tunemq_shared.code.blob_folder import BLOBS
from tunemq_shared.objects.object_client import StoreRequestDenied
from tunemq_shared.objects.remote_object_store import PROBE, PROBE_ANSWER_S
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

#: Seconds between two clocks: a warning from the first on; S3 rejects requests from 15 minutes on.
SKEW_S: Final = 60.0
MAX_SKEW_S: Final = 840.0
#: Answers to keys that may list, and to keys that the server knows but that may not.
_LET_IN: Final = "let in"
_KNOWN: Final = frozenset({_LET_IN, "AccessDenied", "NoSuchBucket"})
_CODE: Final = re.compile(rb"<Code>([A-Za-z0-9]+)</Code>")
#: Error codes with HTTP status 400 of servers such as rclone to an unsigned request.
_LACKS_SIGNATURE: Final = frozenset(
    {"UnsupportedAlgorithm", "MissingFields", "MissingSecurityHeader"}
)
#: Objects of a farm, one of each kind, and further ones that strangers must not write: a bucket's
#: policy may open only some to them. {probe}: the name of a probe.
_PARTS: Final = (
    "{probe}/search/journal/other",
    "{probe}/search/tuner.pkl",
    "{probe}/search/trial/result.json",
    "{probe}/search/trial/checkpoint_000000/file",
    f"{BLOBS}/{{probe}}",
)
_FURTHER_PARTS: Final = tuple(
    part for own in SCHEDULERS_OWN if (part := f"{{probe}}/{own}") not in _PARTS
)
_SYNCHRONISE: Final = "set both clocks by NTP, as `timedatectl set-ntp true` does."
_ROLES: Final = (
    "give each role its own user, with the policies in deploy/minio "
    "(scheduler-policy.json, worker-policy.json, submitter-policy.json)"
)
_RANDOM: Final = "set MINIO_ROOT_USER and MINIO_ROOT_PASSWORD of the server to random values"
_S3_TLS: Final = (
    "start MinIO with a certificate (--certs-dir), say endpoint=https://... in the address, and "
    "name the certificate with ca_file."
)


def refuse_open_store(address: str, *, is_insecure: bool, tell: Callable[[str], None]) -> None:
    """Check that a scheduler may use this store, which is known to work.

    Args:
        address: Of the store.
        is_insecure: ``--insecure`` was given: problems are only shown.
        tell: Shows a line to people.

    Raises:
        ConfigError: It may not; names all problems and their fixes.
        StoreError: See `probe_store`.
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
    """Run all checks of a store from this machine; a folder has no findings.

    Args:
        address: Such as ``s3://bucket/prefix?endpoint=...``.
        environ: Names keys and certificates; by default this process's environment.

    Raises:
        ConfigError: The address is invalid.
        StoreUnavailable: The store does not answer.
        StoreError: There are no keys for it, or its certificate is not trusted.
    """
    environ = os.environ if environ is None else environ
    if not is_remote(address):
        return []
    known = parse_address(address, environ)
    return _S3Probe(as_reached_from_here(known, environ), environ).findings()


class _ProbeAnswer(NamedTuple):
    """An answer: the HTTP status, 0 for none; the ``Date`` header; and S3's error code.

    Date and code may be empty.
    """

    status: int
    date: str = ""
    word: str = ""

    def __str__(self) -> str:
        return f"HTTP status {self.status}" if self.status else "no answer"

    @property
    def is_done(self) -> bool:
        """Whether the request succeeded."""
        return 200 <= self.status < 300

    @property
    def is_elsewhere(self) -> bool:
        """Whether the answer is a redirect."""
        return 300 <= self.status < 400

    @property
    def is_rejected(self) -> bool:
        """Whether the request was denied; 400 may also mean that another server is responsible."""
        if self.status == 400:
            return self.word in _LACKS_SIGNATURE
        return 400 < self.status < 500 and self.status not in (408, 429)


class _Asker:
    """Sends unsigned requests, as any stranger can."""

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
        """Send a request and return the answer.

        Raises:
            StoreUnavailable: There is no answer.
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
    """All checks of one bucket on an S3 server."""

    def __init__(self, address: S3Address, environ: Mapping[str, str]) -> None:
        self._address = address
        self._keys = find_keys(environ, address.profile)
        self._ca_file = find_ca_file(address, environ)
        self._client = self._client_of(self._keys)
        where = urlsplit(self._client.url())
        self._asker = _Asker(f"{where.scheme}://{where.netloc}", self._ca_file)
        #: The names of probes that the server stored, or may have stored.
        self._written: set[str] = set()

    def findings(self) -> list[Finding]:
        """Run all checks.

        Raises:
            StoreUnavailable: The server does not answer.
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
        """List the bucket without keys; returns the answer."""
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
            f"The store {endpoint} is reached without TLS: every machine on the way can read "
            "checkpoints and access keys, though not secret keys.",
            _S3_TLS,
        )

    def _default_keys(self) -> Finding:
        """Check whether our keys are well-known, or the server accepts well-known ones."""
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
            return ok("store-keys", f"{endpoint} is Amazon's and has no default keys.")
        nobodys = self._answer_to(S3Credentials(secrets.token_hex(10), secrets.token_hex(20)))
        if nobodys == _LET_IN:
            return problem(
                "store-keys",
                f"The server {endpoint} takes any keys, even random ones.",
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
            # A server denies keys that it knows otherwise than those that it does not know.
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
        """S3's error code for a listing with these keys; empty for no answer."""
        with contextlib.closing(self._client_of(keys)) as client:
            try:
                next(client.listed(self._name()), None)
            except StoreRequestDenied as rejection:
                return rejection.code
            except StoreError:
                return ""
            return _LET_IN

    def _anonymous(self, listed: _ProbeAnswer) -> Finding:
        """Check whether requests without keys can list, write, read or remove."""
        name = self._name()
        answers = {"list": listed, "write": self._put(name)}
        is_there = answers["write"].is_done or self._put_ours(name)
        if is_there:
            answers["read"] = self._ask("GET", name)
            answers["remove"] = self._ask("DELETE", name)
        place = self._address.place
        may = " and ".join(verb for verb, answer in answers.items() if answer.is_done)
        if all(answer.is_rejected for answer in answers.values()):
            answers = self._ask_for_parts(is_there=is_there)
            may = ", ".join(verb for verb, answer in answers.items() if answer.is_done)
        if may:
            return problem(
                "store-anonymous",
                f"{place} is public: without any keys one may {may} objects there.",
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

    def _ask_for_parts(self, *, is_there: bool) -> dict[str, _ProbeAnswer]:
        """Ask for parts of a farm without keys; returns answers up to the first unclear one.

        Args:
            is_there: Our keys may write.
        """
        probe, answers = f"{PROBE}{secrets.token_hex(6)}", dict[str, _ProbeAnswer]()
        for part in (*_PARTS, *_FURTHER_PARTS):
            name = self._key(part.format(probe=probe))
            written = answers[f"write {part.format(probe='*')}"] = self._put(name)
            if part in _PARTS and (written.is_done or (is_there and self._put_ours(name))):
                answers[f"read {part.format(probe='*')}"] = self._ask("GET", name)
                answers[f"remove {part.format(probe='*')}"] = self._ask("DELETE", name)
            if not all(one.is_done or one.is_rejected for one in answers.values()):
                break
        return answers

    def _unsigned_trailer(self) -> Finding:
        """Check whether the server accepts uploads with forged signatures."""
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
        """Send a request about an object without keys; returns the answer."""
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
        """Try to write a probe without our signature."""
        answered = self._ask("PUT", name, query, headers, body)
        if answered.is_done or not answered.status:
            self._written.add(name)
        return answered

    def _put_ours(self, name: str) -> bool:
        """Write a probe with our keys; returns whether it exists."""
        try:
            self._client.put(name, b"probe", "it cannot be written")
        except StoreRequestDenied:
            return False
        except StoreError:  # the server may have stored it nevertheless
            self._written.add(name)
            return False
        self._written.add(name)
        return True

    def _name(self) -> str:
        """Make the key of a new probe."""
        return self._key(f"{PROBE}{secrets.token_hex(6)}")

    def _key(self, name: str) -> str:
        return f"{self._address.prefix}/{name}" if self._address.prefix else name

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
        """Remove the written probes; returns findings about those that stay."""
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
    """Compare this machine's clock with a server's ``Date`` header."""
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
        "store-clock", f"{said}: S3 refuses requests whose time is 15 minutes off.", _SYNCHRONISE
    )


def is_on_loopback(endpoint: str) -> bool:
    """Whether the host of this ``http[s]://host:port`` is this machine's loopback."""
    host = urlsplit(endpoint).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
