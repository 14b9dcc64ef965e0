"""Checks before a worker starts: a Redis that others can use or replace, and well-known keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.broker.redis_address import RedisAddress
from tunemq_shared.broker.redis_cves import release_in_hello
from tunemq_shared.broker.redis_dangers import TLS, RedisRisk, dangers
from tunemq_shared.objects.s3_address import are_default_keys
from tunemq_workers.broker.redis_client import RedisReply
from tunemq_workers.node.protected_folders import could_replace
from tunemq_workers.system.trial_user import UserAccount, find_account


def check_environment(
    address: RedisAddress,
    registration: RedisReply,
    environ: Mapping[str, str],
    *,
    trial_user: str | None,
    is_insecure: bool,
    tell: Callable[[str], None],
) -> None:
    """Return if a worker may use this Redis and these store keys.

    Args:
        address: of Redis.
        registration: the reply of Redis to ``HELLO``.
        environ: the environment variables with the keys of the store.
        trial_user: the user that runs trials, if that is another one.
        is_insecure: whether ``--insecure`` was given: then risks are only reported.
        tell: shows a line to the user.

    Raises:
        ConfigError: a risk was found; says which, and what to do.
    """
    found = [*dangers(address, release_in_hello(registration)), *_known_keys(environ)]
    if trial_user and _trials_could_replace(address, find_account(trial_user)):
        found.append(_replaceable(address, trial_user))
    said = [f"{danger.what} To fix it: {danger.fix}" for danger in found]
    if said and not is_insecure:
        raise ConfigError(f"{' '.join(said)} With --insecure it is used all the same.")
    for line in said:
        tell(line)


def _trials_could_replace(address: RedisAddress, account: UserAccount) -> bool:
    """Whether trials could listen there while Redis restarts, and would get the password."""
    if not address.password:
        return False
    if address.tls and address.verify:
        return bool(address.ca_file) and could_replace(address.ca_file, account)
    if not address.path:
        return address.is_local
    return could_replace(address.path, account, is_made_again=True)


def _replaceable(address: RedisAddress, trial_user: str) -> RedisRisk:
    return RedisRisk(
        TLS,
        f"While Redis restarts, trials (user {trial_user}) could listen at {address} in its place,"
        " and would get the password of each service of this machine.",
        "give these services a rediss:// address with a ca.crt, or a unix:// socket, in folders"
        " that this user cannot change.",
    )


def _known_keys(environ: Mapping[str, str]) -> Iterator[RedisRisk]:
    if are_default_keys(environ):
        yield RedisRisk(
            "store-keys",
            "The keys of the store are MinIO's default keys, which are public.",
            "give each role its own user, with the policies in deploy/minio.",
        )
