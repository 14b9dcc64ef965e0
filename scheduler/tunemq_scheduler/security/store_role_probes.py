"""Try each role's operations in the farm's store, with the available keys.

Each role writes, reads and removes its own object, called ``.tunemq-probe-...``, where the policies
in ``deploy/minio`` let that role write. The scheduler's keys remove objects that a role may not.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import Final, NamedTuple

from tunemq_scheduler.security.findings import Finding, ok, problem, warning
from tunemq_shared.base.errors import StoreError
from tunemq_shared.base.retrying import CancelToken, StoreUnavailable, TransferTimedOut, retried
from tunemq_shared.code.blob_folder import BLOBS
from tunemq_shared.objects.object_client import StoreRequestDenied
from tunemq_shared.objects.remote_object_store import PROBE
from tunemq_shared.objects.s3_address import (
    as_reached_from_here,
    find_ca_file,
    find_keys,
    parse_address,
)
from tunemq_shared.objects.s3_client import S3Client
from tunemq_shared.objects.s3_errors import WRONG_KEYS

#: Seconds until a server's next bytes, and for all operations of a role with their retries.
_ANSWER_S: Final = 5.0
_ROLE_S: Final = 15.0
_CHECK: Final = "store-access"
#: Objects that only the scheduler may write, and that it trusts: a search's journal, under names
#: of each length, its Tuner, of a search at any depth, and the results of its trials.
SCHEDULERS_OWN: Final = (
    "search/journal/000001/ready",
    "search/journal/0000009/ready",
    "search/journal/1000000/ready",
    "search/journal/9/ready",
    "search/journal/000001.turns",
    "search/journal/other",
    "search/tuner.pkl",
    "team/search/tuner.pkl",
    "parts/tuner.pkl/part",
    "search/trial/result.json",
    "search/trial/progress.csv",
)
_CONTENT: Final = b"probe"
_NO_RIGHT: Final = "AccessDenied"


class StoreRole(StrEnum):
    """A role with its own keys of the store."""

    SCHEDULER = "scheduler"
    WORKER = "worker"
    SUBMITTER = "submitter"


class _Rights(NamedTuple):
    """A role's rights in the store: where it writes, and whether it lists and removes objects."""

    writes_in: str
    lists: bool
    removes: bool


#: As in deploy/minio. {probe}: the name of a probe.
_RIGHTS: Final[Mapping[StoreRole, _Rights]] = {
    StoreRole.SCHEDULER: _Rights("{probe}", lists=True, removes=True),
    StoreRole.WORKER: _Rights("{probe}/trial/checkpoint_000000/probe", lists=False, removes=False),
    StoreRole.SUBMITTER: _Rights(f"{BLOBS}/{{probe}}", lists=True, removes=False),
}


class StoreKeys(NamedTuple):
    """The keys of a role: the environment that holds them, and the file that it names."""

    role: StoreRole
    environ: Mapping[str, str]
    file: str = ""

    @property
    def where(self) -> str:
        """Where a person can correct the keys."""
        return self.file or (
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the file that"
            " AWS_SHARED_CREDENTIALS_FILE names"
        )


def try_store(address: str, every: list[StoreKeys]) -> list[Finding]:
    """Try each role's operations in a store on a server.

    Args:
        address: ``s3://...``.
        every: The scheduler's keys, followed by those of other roles.

    Raises:
        ConfigError: The address is invalid.
        StoreUnavailable: The server does not answer.
        StoreError: There are no keys, or its certificate is not trusted.
    """
    place = _ProbedPrefix(address, every[0])
    try:
        return [finding for keys in every for finding in place.tried(keys)] + place.tidied()
    finally:
        place.close()


class _ProbedPrefix:
    """A prefix on a server, which each role accesses with its own client.

    Args:
        address: See `try_store`.
        owner: The scheduler's keys, which remove the other roles' leftovers.

    Raises:
        ConfigError: The address is invalid.
        StoreError: There are no keys.
    """

    def __init__(self, address: str, owner: StoreKeys) -> None:
        self._address = address
        self._clients: list[S3Client] = []
        self._owner = self._client_of(owner)
        known = parse_address(address, owner.environ)
        self._name, self._bucket = known.place, known.bucket
        self._prefix = f"{known.prefix}/" if known.prefix else ""
        #: Names of probes that may still exist.
        self._left: set[str] = set()

    def tried(self, keys: StoreKeys) -> list[Finding]:
        """Try a role's operations and return the findings.

        Raises:
            StoreUnavailable: The server does not answer.
        """
        rights, cancel = _RIGHTS[keys.role], CancelToken(_ROLE_S)
        try:
            client = self._owner if keys.role is StoreRole.SCHEDULER else self._client_of(keys)
        except StoreError as error:
            fix = f"correct the {keys.role}'s keys: {keys.where}"
            return [problem(_CHECK, f"no keys: the {keys.role}'s: {error}", fix)]
        name = self._prefix + rights.writes_in.format(probe=_probe())
        code = f"{self._prefix}{BLOBS}/{_probe()}"
        action = ""
        try:
            if rights.lists:
                action = "list"
                _asked(lambda: next(client.listed(name), None), cancel)
            action = "write"
            self._left.add(name)
            _asked(lambda: client.put(name, _CONTENT, "it cannot be written"), cancel)
            action = "read"
            _asked(lambda: _read(client, name), cancel)
            if keys.role is StoreRole.WORKER and self._is_written(code, cancel):
                action = "read code"
                _asked(lambda: _read(client, code), cancel)
            action = "remove"
            found = [self._removed(keys, client, name, cancel)]
            if not rights.removes:
                found += self._forged(keys, client, cancel)
            return found
        except StoreRequestDenied as rejection:
            return [self._rejected(keys, rejection, action)]

    def tidied(self) -> list[Finding]:
        """Remove the roles' leftovers; returns findings about those that stay."""
        found: list[Finding] = []
        for name in self._left:
            try:
                self._owner.remove(name, "it cannot be removed")
            except StoreRequestDenied:
                continue  # such keys did not write it either, or are a finding already
            except StoreError as error:
                found.append(
                    warning(
                        "store-probe",
                        f"A probe may be left in {self._name}: {error}",
                        f"remove it: mc rm ALIAS/{self._bucket}/{name}",
                    )
                )
        return found

    def close(self) -> None:
        """Close connections."""
        for client in self._clients:
            client.close()

    def _is_written(self, code: str, cancel: CancelToken) -> bool:
        """Write a probe where code lies, with the scheduler's keys; returns whether it exists."""
        self._left.add(code)
        try:
            _asked(lambda: self._owner.put(code, _CONTENT, "it cannot be written"), cancel)
        except StoreRequestDenied:
            return False  # the scheduler's own check reports it
        return True

    def _removed(
        self, keys: StoreKeys, client: S3Client, name: str, cancel: CancelToken
    ) -> Finding:
        rights = _RIGHTS[keys.role]
        who = f"the {keys.role}'s keys"
        lists = "lists, " if rights.lists else ""
        try:
            _asked(lambda: client.remove(name, "it cannot be removed"), cancel)
        except StoreRequestDenied as rejection:
            if rights.removes or rejection.code != _NO_RIGHT:
                raise
            may = f"{who}: {lists}writes and reads in {self._name}; may not remove, as intended"
            return ok(_CHECK, may)
        self._left.discard(name)
        if rights.removes:
            return ok(_CHECK, f"{who}: {lists}writes, reads and removes in {self._name}")
        return warning(
            _CHECK,
            f"{who} may remove objects in {self._name}: a {keys.role} that is taken over can"
            " destroy checkpoints and results",
            f"give the {keys.role} a user with deploy/minio/{keys.role}-policy.json",
        )

    def _forged(self, keys: StoreKeys, client: S3Client, cancel: CancelToken) -> list[Finding]:
        """Report the scheduler's objects that such keys may write."""
        search, taken = _probe(), []
        for own in SCHEDULERS_OWN:
            name = f"{self._prefix}{search}/{own}"
            with suppress(StoreRequestDenied):
                _asked(partial(client.put, name, _CONTENT, "it cannot be written"), cancel)
                taken.append(own)
                self._left.add(name)
        if not taken:
            return []
        return [
            problem(
                _CHECK,
                f"the {keys.role}'s keys may write in {self._name} what the scheduler reads and"
                f" runs as its own: {', '.join(taken)}",
                f"give the {keys.role} a user with deploy/minio/{keys.role}-policy.json of this"
                " TuneMQ, not the scheduler's keys: that of an earlier one lets workers write"
                " journals",
            )
        ]

    def _rejected(self, keys: StoreKeys, rejection: StoreRequestDenied, action: str) -> Finding:
        who = f"the {keys.role}'s keys"
        if rejection.code == "NoSuchBucket":
            return problem(
                "store",
                f"no such bucket: {rejection}",
                f"mc mb ALIAS/{self._bucket}; or correct --store; or add create_bucket=true to the"
                " address and start the scheduler again",
            )
        if rejection.code in WRONG_KEYS:
            fix = f"correct the {keys.role}'s keys: {keys.where}"
            return problem(_CHECK, f"wrong keys: {who}: {rejection}", fix)
        if rejection.code == _NO_RIGHT:
            return problem(
                _CHECK,
                f"no right to {action}: {who}: {rejection}",
                f"attach deploy/minio/{keys.role}-policy.json to that user (mc admin policy attach"
                f" ALIAS POLICY --user USER); the {keys.role}'s keys are in {keys.where}",
            )
        return problem("store", f"{who} cannot {action}: {rejection}", "do what the message says")

    def _client_of(self, keys: StoreKeys) -> S3Client:
        known = as_reached_from_here(parse_address(self._address, keys.environ), keys.environ)
        client = S3Client(
            known,
            find_keys(keys.environ, known.profile),
            find_ca_file(known, keys.environ),
            connect_s=_ANSWER_S,
            read_s=_ANSWER_S,
            at_once=1,
        )
        self._clients.append(client)
        return client


def _asked(call: Callable[[], object], cancel: CancelToken) -> None:
    """Call it, with retries while the server fails temporarily.

    Raises:
        StoreUnavailable: The server does not answer.
        StoreRequestDenied: It denies the request.
    """
    try:
        retried(call, cancel)
    except TransferTimedOut as error:
        raise StoreUnavailable(str(error)) from error


def _read(client: S3Client, name: str) -> None:
    with client.get(name, "it cannot be read") as answer:
        if b"".join(answer.blocks()) != _CONTENT:
            raise StoreRequestDenied(f"{name} has another content than was written there.", "")


def _probe() -> str:
    return f"{PROBE}{secrets.token_hex(6)}"
