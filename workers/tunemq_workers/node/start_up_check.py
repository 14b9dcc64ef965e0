"""What keeps a worker from starting: a Redis that others can use, or keys that everybody knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.broker.redis_address import RedisAddress
from tunemq_shared.broker.redis_dangers import RedisRisk, dangers
from tunemq_shared.broker.redis_release import release_in_hello
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
    """Return if a worker may work with these.

    Args:
        address: of Redis.
        hello: what that answered to ``REGISTRATION``.
        environ: where the keys of the store are.
        is_insecure: whether ``--insecure`` was given: then what is wrong is only told.
        tell: shows a line to people.

    Raises:
        ConfigError: it may not; says why, and how to mend it.
    """
    found = [*dangers(address, release_in_hello(registration)), *_known_keys(environ)]
    said = [f"{danger.what} To mend it: {danger.fix}" for danger in found]
    if said and not is_insecure:
        raise ConfigError(f"{' '.join(said)} With --insecure it is used all the same.")
    for line in said:
        tell(line)


def _known_keys(environ: Mapping[str, str]) -> Iterator[RedisRisk]:
    if are_default_keys(environ):
        yield RedisRisk(
            "store-keys",
            "The keys of the store are those that MinIO is shipped with, which everybody knows.",
            "give each role a user of its own with the policies in deploy/minio.",
        )
