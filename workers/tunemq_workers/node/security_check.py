"""Checks before a worker starts: a Redis that others can use, and well-known store keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.broker.redis_address import RedisAddress
from tunemq_shared.broker.redis_cves import release_in_hello
from tunemq_shared.broker.redis_dangers import RedisRisk, dangers
from tunemq_shared.objects.s3_address import are_default_keys
from tunemq_workers.broker.redis_client import RedisReply


def check_environment(
    address: RedisAddress,
    registration: RedisReply,
    environ: Mapping[str, str],
    *,
    is_insecure: bool,
    tell: Callable[[str], None],
) -> None:
    """Return if a worker may use this Redis and these store keys.

    Args:
        address: of Redis.
        registration: the reply of Redis to ``HELLO``.
        environ: the environment variables with the keys of the store.
        is_insecure: whether ``--insecure`` was given: then risks are only reported.
        tell: shows a line to the user.

    Raises:
        ConfigError: a risk was found; says which, and what to do.
    """
    found = [*dangers(address, release_in_hello(registration)), *_known_keys(environ)]
    said = [f"{danger.what} To fix it: {danger.fix}" for danger in found]
    if said and not is_insecure:
        raise ConfigError(f"{' '.join(said)} With --insecure it is used all the same.")
    for line in said:
        tell(line)


def _known_keys(environ: Mapping[str, str]) -> Iterator[RedisRisk]:
    if are_default_keys(environ):
        yield RedisRisk(
            "store-keys",
            "The keys of the store are MinIO's default keys, which are public.",
            "give each role its own user, with the policies in deploy/minio.",
        )
