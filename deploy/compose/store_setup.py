"""Has the services of docker-compose.yml know the users that `setup.sh` has made.

In MinIO: the bucket, and for each role a user with its policy of ``deploy/minio``; users whom there
is no file of any more are removed. In Redis: the file of its users is read again, unless that which
Redis has read is the same, since it ends all connections. Everything may be there already. Run by
the service `store-setup`, which sees all that is secret in a farm, and never shows any of it.
"""  # noqa: INP001 - a script, which no package holds

from __future__ import annotations

import configparser
import json
import os
import re
import ssl
import sys
import time
from pathlib import Path
from typing import Final

import redis
import urllib3
from minio import Minio, MinioAdmin
from minio.credentials.providers import StaticProvider
from minio.error import MinioAdminException, S3Error

SECRETS: Final = Path(os.environ.get("TUNEMQ_SECRETS", "/secrets"))
POLICIES: Final = Path(__file__).parents[1] / "minio"
MINIO: Final = os.environ.get("TUNEMQ_MINIO", "minio:9000")
REDIS: Final = os.environ.get("TUNEMQ_REDIS_PLACE", "redis:6379")
#: The store is s3://tunemq/farm, for which the policies are.
BUCKET: Final = "tunemq"
ROLES: Final = ("scheduler", "worker")
#: How long a server that has just begun may take until it knows its own users.
TIMEOUT_S: Final = 60.0
#: Names of our users: a name, and the suffix that `setup.sh` adds.
_OURS: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]*-[0-9a-f]{12}")

_TROUBLES: Final = (
    *(OSError, S3Error, MinioAdminException),
    *(redis.RedisError, urllib3.exceptions.HTTPError),
)


def main() -> int:
    """Run all steps; print the changes."""
    try:
        _set_up_store()
        _tell_redis()
    except _TROUBLES as error:
        sys.stderr.write(f"store-setup: {_told(error)}\n")
        return 1
    return 0


def _set_up_store() -> None:
    root = StaticProvider(_text("minio/root-user"), _text("minio/root-password"))
    http = urllib3.PoolManager(timeout=urllib3.Timeout(connect=10, read=30), retries=False)
    admin = MinioAdmin(endpoint=MINIO, credentials=root, secure=False, http_client=http)
    there = _users(admin)
    server = Minio(MINIO, credentials=root, secure=False, region="us-east-1", http_client=http)
    if not server.bucket_exists(bucket_name=BUCKET):
        server.make_bucket(bucket_name=BUCKET)
        _say(f"made the bucket {BUCKET}")
    for role in (*ROLES, "submitter"):
        policy = json.loads((POLICIES / f"{role}-policy.json").read_text(encoding="utf-8"))
        admin.policy_add(f"tunemq-{role}", policy=policy)
    wanted = _wanted()
    for user, (secret, role) in wanted.items():
        admin.user_add(user, secret)
        if there.get(user) != f"tunemq-{role}":
            admin.attach_policy([f"tunemq-{role}"], user=user)
            _say(f"the store has the user {user}, who is a {role}")
    for user in sorted(there.keys() - wanted.keys()):
        if _OURS.fullmatch(user):
            admin.user_remove(user)
            _say(f"the store has the user {user} no longer")


def _users(admin: MinioAdmin) -> dict[str, str]:
    """The users of the store, and the policy of each."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            found = json.loads(admin.user_list() or "{}")
        except MinioAdminException as error:
            # A server that has just begun serves objects before it knows of users.
            if "XMinioServerNotInitialized" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.5)
            continue
        return {name: said.get("policyName", "") for name, said in found.items()}


def _wanted() -> dict[str, tuple[str, str]]:
    """The users that the store must have: the secret, and the role."""
    found = {}
    for file in sorted((SECRETS / "authority" / "store").glob("*.credentials")):
        parser = configparser.RawConfigParser()
        parser.read_string(file.read_text(encoding="utf-8"))
        role = file.stem if file.stem in ROLES else "submitter"
        section = parser["default"]
        found[section["aws_access_key_id"]] = (section["aws_secret_access_key"], role)
    return found


def _tell_redis() -> None:
    host, _, port = REDIS.rpartition(":")
    line = redis.Redis(
        host=host,
        port=int(port),
        username="keeper",
        password=_text("authority/passwords/keeper.password"),
        ssl=True,
        ssl_ca_certs=str(SECRETS / "redis" / "tls" / "ca.crt"),
        ssl_min_version=ssl.TLSVersion.TLSv1_2,
        socket_timeout=30,
        socket_connect_timeout=10,
        decode_responses=True,
    )
    # The file ends with a user that has no rights, named after a hash of the lines above it.
    version = _text("redis/users.acl").splitlines()[-1].split()[1]
    with line:
        if version in line.acl_users():
            return
        line.acl_load()
    _say("Redis has read the file of its users")


def _text(name: str) -> str:
    return (SECRETS / name).read_text(encoding="utf-8").strip()


#: MinIO's error codes for an unknown root user and for a wrong root password.
_REJECTED = ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch")


def _told(error: Exception) -> str:
    if isinstance(error, redis.AuthenticationError):
        return (
            "Redis has other passwords than those in the volumes: it was not started anew since"
            " they were changed; `docker compose down`, then `docker compose up --detach`, does so."
        )
    if isinstance(error, S3Error) or any(code in str(error) for code in _REJECTED):
        return (
            f"MinIO refuses its root user: {error}; where the password was changed,"
            " `docker compose down`, then `docker compose up --detach`, starts all anew."
        )
    return f"{type(error).__name__}: {error}"


def _say(text: str) -> None:
    sys.stdout.write(f"store-setup: {text}\n")


if __name__ == "__main__":
    sys.exit(main())
