"""The users of a farm's roles in a MinIO, with the rights that TuneMQ ships in ``deploy/minio``.

roles = make_roles(server, bucket)      # for the store s3://bucket/farm
roles["worker"]                         # the variables with which a worker is let in
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import urllib3

from tests.support.stores.object_servers import MinioServer, ObjectServer
from tests.support.waiting import eventually, need

if TYPE_CHECKING:  # loaded by the tests that use it, not by every run
    from minio import MinioAdmin

ROLES: Final = ("scheduler", "worker", "submitter")
_SHIPPED: Final = Path(__file__).parents[3] / "deploy" / "minio"


def policy(role: str, bucket: str, prefix: str = "farm") -> dict[str, Any]:
    """The shipped policy of a role, for another bucket and prefix."""
    text = (_SHIPPED / f"{role}-policy.json").read_text(encoding="utf-8")
    text = text.replace("tunemq/farm", f"{bucket}/{prefix}").replace(":::tunemq", f":::{bucket}")
    found: dict[str, Any] = json.loads(text.replace('"farm/', f'"{prefix}/'))
    return found


def wait_for_users(admin: MinioAdmin) -> None:
    """Wait until a server knows of users: one that has just begun serves objects before."""
    from minio.error import MinioAdminException

    def looks_after_users() -> bool:
        try:
            admin.user_list()
        except MinioAdminException as error:
            if "XMinioServerNotInitialized" not in str(error):
                raise
            return False
        return True

    eventually(looks_after_users, every=0.05)


def make_roles(
    server: ObjectServer, bucket: str, prefix: str = "farm"
) -> dict[str, dict[str, str]]:
    """Make a user for each role; the environment in which each is let in."""
    need("minio (`make minio` builds it)", isinstance(server, MinioServer))
    admin = admin_of(server)
    wait_for_users(admin)
    made = {}
    for role in ROLES:
        user, password = f"{role}-{secrets.token_hex(6)}", secrets.token_hex(20)
        admin.policy_add(user, policy=policy(role, bucket, prefix))
        admin.user_add(user, password)
        admin.attach_policy([user], user=user)
        made[role] = {
            **server.environ,
            "AWS_ACCESS_KEY_ID": user,
            "AWS_SECRET_ACCESS_KEY": password,
        }
    return made


def admin_of(server: ObjectServer, access_key: str = "", secret_key: str = "") -> MinioAdmin:
    """A client of MinIO's admin API, with the server's own keys unless others are given."""
    from minio import MinioAdmin
    from minio.credentials import StaticProvider

    certificate = str(server.certificate.file) if server.certificate else None
    return MinioAdmin(
        endpoint=server.url.partition("//")[2],
        credentials=StaticProvider(
            access_key or server.access_key, secret_key or server.secret_key
        ),
        secure=server.certificate is not None,
        http_client=urllib3.PoolManager(
            timeout=urllib3.Timeout(connect=30, read=30), retries=False, ca_certs=certificate
        ),
    )
