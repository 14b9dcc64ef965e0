"""Create the users of `setup.sh` in the services of docker-compose.yml.

In MinIO: create the bucket and, for each role, a user with its policy of ``deploy/minio``; remove
users that have no file any more. In Redis: reload the file of users if it has changed, because a
reload ends all connections. The script can run again at any time. The service `store-setup` runs
it, with access to all secrets of the farm; it prints none of them.
"""  # noqa: INP001 - a script outside packages

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
#: The policies are for the store s3://tunemq/farm.
BUCKET: Final = "tunemq"
ROLES: Final = ("scheduler", "worker")
#: How long MinIO may take after its start to load its users.
TIMEOUT_S: Final = 60.0
#: Users of a farm have a name with a suffix that `setup.sh` adds.
_FARM_USER: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]*-[0-9a-f]{12}")

_ERRORS: Final = (
    *(OSError, S3Error, MinioAdminException),
    *(redis.RedisError, urllib3.exceptions.HTTPError),
)


def main() -> int:
    """Run all steps; print the changes."""
    try:
        _set_up_store()
        _set_up_redis()
    except _ERRORS as error:
        sys.stderr.write(f"store-setup: {_explanation(error)}\n")
        return 1
    return 0


def _set_up_store() -> None:
    root = StaticProvider(_text("minio/root-user"), _text("minio/root-password"))
    http = urllib3.PoolManager(timeout=urllib3.Timeout(connect=10, read=30), retries=False)
    admin = MinioAdmin(endpoint=MINIO, credentials=root, secure=False, http_client=http)
    found = _users(admin)
    server = Minio(MINIO, credentials=root, secure=False, region="us-east-1", http_client=http)
    if not server.bucket_exists(bucket_name=BUCKET):
        server.make_bucket(bucket_name=BUCKET)
        _say(f"created the bucket {BUCKET}")
    for role in (*ROLES, "submitter"):
        policy = json.loads((POLICIES / f"{role}-policy.json").read_text(encoding="utf-8"))
        admin.policy_add(f"tunemq-{role}", policy=policy)
    wanted = _wanted()
    for user, (secret, role) in wanted.items():
        admin.user_add(user, secret)
        if found.get(user) != f"tunemq-{role}":
            admin.attach_policy([f"tunemq-{role}"], user=user)
            _say(f"created the {role} {user} in the store")
    for user in sorted(found.keys() - wanted.keys()):
        if _FARM_USER.fullmatch(user):
            admin.user_remove(user)
            _say(f"removed the user {user} from the store")


def _users(admin: MinioAdmin) -> dict[str, str]:
    """The users of the store, and the policy of each."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            found = json.loads(admin.user_list() or "{}")
        except MinioAdminException as error:
            # After its start, MinIO serves objects before it has loaded its users.
            if "XMinioServerNotInitialized" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.5)
            continue
        return {name: user.get("policyName", "") for name, user in found.items()}


def _wanted() -> dict[str, tuple[str, str]]:
    """The users that the store must have, each with secret and role."""
    found = {}
    for file in sorted((SECRETS / "authority" / "store").glob("*.credentials")):
        parser = configparser.RawConfigParser()
        parser.read_string(file.read_text(encoding="utf-8"))
        role = file.stem if file.stem in ROLES else "submitter"
        section = parser["default"]
        found[section["aws_access_key_id"]] = (section["aws_secret_access_key"], role)
    return found


def _set_up_redis() -> None:
    host, _, port = REDIS.rpartition(":")
    client = redis.Redis(
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
    # The file ends with a user without rights, whose name is a hash of the lines above it.
    version = _text("redis/users.acl").splitlines()[-1].split()[1]
    with client:
        if version in client.acl_users():
            return
        client.acl_load()
    _say("Redis has reloaded its users")


def _text(name: str) -> str:
    return (SECRETS / name).read_text(encoding="utf-8").strip()


#: MinIO's error codes for an unknown root user and for a wrong root password.
_REJECTED = ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch")


def _explanation(error: Exception) -> str:
    if isinstance(error, redis.AuthenticationError):
        return (
            "Redis rejects the password in the volumes, which changed after Redis started."
            " Restart it: `docker compose down`, then `docker compose up --detach`."
        )
    if isinstance(error, S3Error) or any(code in str(error) for code in _REJECTED):
        return (
            f"MinIO rejects its root user: {error}. If the password changed, restart it:"
            " `docker compose down`, then `docker compose up --detach`."
        )
    return f"{type(error).__name__}: {error}"


def _say(text: str) -> None:
    sys.stdout.write(f"store-setup: {text}\n")


if __name__ == "__main__":
    sys.exit(main())
