"""S07: each role has only the necessary rights in the bucket; strangers have none."""

from __future__ import annotations

import contextlib
import io
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping

import pytest

from tests.support.stores.object_servers import ObjectServer
from tests.support.stores.store_roles import ROLES, admin_of, make_roles
from tunemq_scheduler.security.forged_signatures import forgeries
from tunemq_scheduler.security.store_probes import _Asker
from tunemq_shared.base.errors import StoreError
from tunemq_shared.objects.object_client import StoreRequestDenied
from tunemq_shared.objects.s3_address import S3Credentials, parse_address
from tunemq_shared.objects.s3_client import S3Client
from tunemq_shared.objects.s3_objects import S3Objects

pytestmark = [pytest.mark.integration, pytest.mark.security]

CHECKPOINT = f"farm/search/trial_00000/checkpoint_1-000001/{'a' * 64}"
MANIFEST = "farm/search/trial_00000/checkpoint_1-000001/manifest.json"
TRIAL_FILE = "farm/search/trial_00000/attempt_1/stdout"
RESULTS = "farm/search/trial_00000/result.json"
TABLE = "farm/search/trial_00000/progress.csv"
JOURNAL = "farm/search/journal/000001.turns"
PIECE = "farm/search/journal/000001/000001.turns/000000000000000-000000000000541"
RECORD = "farm/search/journal/scheduler"
TUNER = "farm/search/tuner.pkl"
CODE = f"farm/blobs/{'b' * 64}"
BELOW_CODE = f"farm/blobs/{'c' * 64}/x"
OTHERS = "others/object"

ALL = (
    *(CHECKPOINT, MANIFEST, TRIAL_FILE, RESULTS, TABLE, JOURNAL, PIECE, RECORD, TUNER, CODE),
    *(BELOW_CODE, OTHERS),
)
OURS = ALL[:-1]
#: The objects for each right of each role; the store denies everything else.
RIGHTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "scheduler": {"read": OURS, "write": OURS, "remove": OURS, "list": ("farm/",)},
    "worker": {
        "read": (CHECKPOINT, MANIFEST, CODE, BELOW_CODE),
        "write": (CHECKPOINT, MANIFEST, TRIAL_FILE),
        "remove": (),
        "list": (),
    },
    "submitter": {"read": OURS, "write": (CODE, BELOW_CODE), "remove": (), "list": ("farm/",)},
}


@pytest.fixture(autouse=True)
def _probes_wait_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of a machine that does other things, too, may take longer to answer."""
    monkeypatch.setattr("tunemq_scheduler.security.store_probes.PROBE_ANSWER_S", 60.0)


class Bucket:
    """A bucket with something at each place, and a client of each role."""

    def __init__(self, server: ObjectServer, bucket: str) -> None:
        self.server, self.name = server, bucket
        self.address = parse_address(server.address(bucket, "farm"), {})
        self.roles = make_roles(server, bucket)
        self._open = contextlib.ExitStack()
        self.owner = self.client(server.environ)
        for key in ALL:
            self.owner.put(key, b"before", "")

    def client(self, environ: Mapping[str, str]) -> S3Client:
        keys = S3Credentials(environ["AWS_ACCESS_KEY_ID"], environ["AWS_SECRET_ACCESS_KEY"])
        client = S3Client(self.address, keys, "", connect_s=60, read_s=60, at_once=2)
        return self._open.enter_context(contextlib.closing(client))

    def names(self) -> list[str]:
        return [one.key for one in self.owner.listed("")]

    def content(self, key: str) -> bytes:
        with self.owner.get(key, "") as answer:
            return b"".join(answer.blocks())

    def close(self) -> None:
        self._open.close()


@pytest.fixture
def shelf(minio: ObjectServer, bucket: str) -> Iterator[Bucket]:
    shelf = Bucket(minio, bucket)
    yield shelf
    shelf.close()


def read(client: S3Client, key: str) -> None:
    with client.get(key, "it cannot be read") as answer:
        assert b"".join(answer.blocks())


def write(client: S3Client, key: str) -> None:
    client.put(key, b"after", "it cannot be written")


def write_in_parts(client: S3Client, key: str) -> None:
    client.abort_upload(key, client.create_upload(key, "it cannot be written"))


def remove(client: S3Client, key: str) -> None:
    client.remove(key, "it cannot be removed")


def list_below(client: S3Client, key: str) -> None:
    next(client.listed(key), None)


VERBS: list[tuple[str, Callable[[S3Client, str], None], tuple[str, ...]]] = [
    ("read", read, ALL),
    ("write", write_in_parts, ALL),
    ("write", write, ALL),
    ("list", list_below, ("farm/", "others/", "")),
    ("remove", remove, ALL),
]


@pytest.mark.parametrize("role", ROLES)
def test_s07_each_role_may_do_its_own_work_and_is_refused_the_others(shelf: Bucket, role: str):
    client = shelf.client(shelf.roles[role])
    for verb, attempt, keys in VERBS:
        for key in keys:
            if key in RIGHTS[role][verb]:
                attempt(client, key)
                continue
            with pytest.raises(StoreRequestDenied, match="not allowed to do that"):
                attempt(client, key)
    written, removed = RIGHTS[role]["write"], RIGHTS[role]["remove"]
    assert shelf.names() == sorted(set(ALL) - set(removed))
    for key in shelf.names():
        assert shelf.content(key) == (b"after" if key in written else b"before")


def test_s07_worker_that_may_not_list_learns_which_objects_of_checkpoints_are_there(shelf: Bucket):
    key = f"trial/checkpoint_1-000001/{'d' * 64}"
    address = parse_address(shelf.server.address(shelf.name, "farm/search"), {})
    with S3Objects(address, shelf.roles["worker"]) as objects:
        assert not objects.has(key, 6)
        objects.put_bytes(key, b"before")
        assert objects.has(key, 6)
        assert not objects.has(key, 7)


#: Objects that others trust as the scheduler's, in all spellings.
SCHEDULERS_OWN = (
    "farm/search/journal/0000009/ready",
    "farm/search/journal/1000000/ready",
    "farm/search/journal/9/000001.turns/000000000000000-000000000000541",
    f"farm/search/journal/{chr(0x660) * 6}/ready",
    "farm/search/journal/000001.turns",
    "farm/search/journal/0000001.turns",
    "farm/search/journal/last_run",
    "farm/search/journal/anything",
    "farm/search/journal/000002/000001.turns/deep/er",
    "farm/journal/000009/ready",
    "farm/team/search/journal/0000009/ready",
    "farm/team/search/tuner.pkl",
    "farm/search/tuner.pkl",
    "farm/search/callbacks.json",
    f"farm/blobs/{'c' * 64}",
)
#: Spellings that a server may take for one of these, or for names that nothing reads.
SPELLINGS = (
    "farm/search//journal/000009/ready",
    "farm/search/./journal/000009/ready",
    "farm/search/trial/../journal/000009/ready",
    "farm//search/tuner.pkl",
    "/farm/search/trial/../tuner.pkl",
)


def test_s07_worker_writing_what_the_scheduler_reads_is_refused(shelf: Bucket):
    client, before = shelf.client(shelf.roles["worker"]), shelf.names()
    for key in (*SCHEDULERS_OWN, *SPELLINGS):
        for attempt in (write, write_in_parts):
            with pytest.raises(StoreError):
                attempt(client, key)
    assert shelf.names() == before


def test_s07_worker_sending_an_archive_to_unpack_writes_no_journal(shelf: Bucket):
    """MinIO unpacks an archive on request: each file in it is a separate upload."""
    from minio.error import MinioException

    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name in ("notes", "journal/0000009/ready", "tuner.pkl"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    for prefix in ("farm/search", "farm/search/trial_00000", "farm/search/trial_00000/attempt_1"):
        headers = {
            "X-Amz-Meta-Snowball-Auto-Extract": "true",
            "X-Amz-Meta-Minio-Snowball-Prefix": prefix,
        }
        client = shelf.client(shelf.roles["worker"])
        with contextlib.suppress(MinioException):
            client._put_object(
                shelf.name, "farm/search/trial_00000/attempt_1/all.tar", archive.getvalue(), headers
            )
    more = [name for name in shelf.names() if name not in ALL]
    assert more == ["farm/search/trial_00000/attempt_1/notes"]
    assert shelf.content(TUNER) == b"before"


@pytest.mark.parametrize("role", ROLES)
def test_s07_no_role_may_administer_the_server_or_publish_the_bucket(shelf: Bucket, role: str):
    from minio.commonconfig import CopySource
    from minio.error import MinioException

    client = shelf.client(shelf.roles[role])
    for attempt in (
        lambda: client.set_bucket_policy(shelf.name, "{}"),
        lambda: client.get_bucket_policy(shelf.name),
        lambda: client.remove_bucket(shelf.name),
        lambda: client.make_bucket(f"{shelf.name}-2"),
        lambda: client.copy_object(shelf.name, CHECKPOINT, CopySource(shelf.name, OTHERS)),
    ):
        with pytest.raises(MinioException, match=re.compile("denied", re.IGNORECASE)):
            attempt()


@pytest.mark.parametrize("role", ROLES)
def test_s07_role_key_cannot_change_its_secret_or_make_service_accounts(shelf: Bucket, role: str):
    """The one would lock the role out; the other would outlive a changed secret."""
    from minio.error import MinioAdminException

    environ = shelf.roles[role]
    user = environ["AWS_ACCESS_KEY_ID"]
    admin = admin_of(shelf.server, user, environ["AWS_SECRET_ACCESS_KEY"])
    for attempt in (
        lambda: admin.user_add(user, "another-secret"),
        lambda: admin.add_service_account(name="mine"),
    ):
        with pytest.raises(MinioAdminException, match="403"):
            attempt()
    shelf.client(environ).put(RIGHTS[role]["write"][0], b"after", "")


@pytest.mark.parametrize("role", ROLES)
def test_s07_forged_uploads_with_a_roles_access_key_are_refused(shelf: Bucket, role: str):
    """The policies prevent them; from keys without these policies this server accepts them."""
    asker = _Asker(shelf.server.url, "")
    before = shelf.names()
    for folder, name in (("farm", "forged"), *(key.rsplit("/", 1) for key in ALL)):
        access_key = shelf.roles[role]["AWS_ACCESS_KEY_ID"]
        for forgery in forgeries(folder, name, access_key, "us-east-1"):
            target = f"/{shelf.name}/{folder}/{name}?{forgery.query}"
            answered = asker.ask("PUT", target, forgery.headers, forgery.body)
            assert answered.status == 403, (forgery.weakness, folder)
    assert shelf.names() == before
    assert {shelf.content(key) for key in ALL} == {b"before"}
