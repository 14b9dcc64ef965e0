"""To which stores a farm's credentials may be sent."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.unit.scheduler.transport.test_desired_state import START
from tunemq import RunConfig, SyncConfig, Tuner
from tunemq_scheduler.settings.storage_settings import storage_of
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.checkpoints import open_store
from tunemq_shared.checkpoints.open_store import open_objects, use_only
from tunemq_shared.objects.allowed_stores import StorePermissions, store_environ, why_not_allowed
from tunemq_shared.protocol.messages import BlobRef

FARM = "s3://tunemq/farm?endpoint=https://minio:9000&region=us-east-1&path_style=true"
EVIL = "s3://mine/x?endpoint=http://evil"
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
RULES = StorePermissions((FARM,), KEYS)


@pytest.fixture
def _restricted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_store, "_rules", None)
    use_only(RULES)


@pytest.mark.parametrize(
    "address",
    [
        FARM,
        FARM.replace("/farm", "/farm/first"),
        FARM.replace("us-east-1", "eu-1"),
        FARM.replace("https://minio", "https://MINIO"),
    ],
)
def test_store_rules_address_below_an_allowed_one_is_allowed(address: str):
    RULES.check(address, "here")


@pytest.mark.parametrize(
    "address",
    [
        FARM.replace("https://minio:9000", "http://evil:9000"),
        FARM.replace("https://minio:9000", "http://minio:9000"),
        FARM.replace("minio:9000", "minio:9001"),
        FARM.replace("minio:9000", "minio.evil:9000"),
        FARM.replace("tunemq/farm", "tunemq-2/farm"),
        FARM.replace("/farm", "/farm-2"),
        FARM.replace("/farm", ""),
        FARM.replace("path_style=true", "path_style=false"),
        f"{FARM}&ca_file=/tmp/mine.pem",
        f"{FARM}&profile=ada",
        "s3://tunemq/farm",  # Amazon's by default
    ],
)
def test_store_rules_other_server_bucket_or_certificate_is_rejected_with_the_fix(address: str):
    with pytest.raises(ConfigError, match=r"^here names the store.*may use: .*stores = \[") as said:
        RULES.check(address, "here")
    assert "secret" not in f"{said.value}{RULES!r}"


@pytest.mark.usefixtures("_restricted")
def test_store_rules_process_of_a_submitted_search_opens_no_other_store():
    with pytest.raises(ConfigError, match="which this search may not use"):
        open_objects(EVIL)


@pytest.mark.usefixtures("_restricted")
def test_store_rules_rejection_names_the_field_that_was_set():
    for field, use in {
        "RunConfig(storage_path)": lambda: storage_of(RunConfig(storage_path=EVIL)),
        "SyncConfig(upload_dir)": lambda: storage_of(
            RunConfig(sync_config=SyncConfig(upload_dir=EVIL))
        ),
        "Tuner.restore(path)": lambda: Tuner.restore(EVIL, print),
        "this search": lambda: open_objects(EVIL),
    }.items():
        with pytest.raises(ConfigError) as said:
            use()
        assert str(said.value).startswith(f"{field} names the store 's3://mine/x' at http://evil")


@pytest.mark.usefixtures("_restricted")
def test_store_rules_variables_of_a_search_redirect_no_credentials(monkeypatch: pytest.MonkeyPatch):
    for name in ("TUNEMQ_S3_REACHED_AT", "TUNEMQ_S3_ENDPOINT", "AWS_ENDPOINT_URL"):
        monkeypatch.setenv(name, "http://evil:9000")
    for name in ("AWS_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.setenv(name, "/nowhere/evil.pem")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "the submitter's")
    with open_objects(FARM) as objects:
        assert objects.address == "s3://tunemq/farm at https://minio:9000"
        client = objects._client._client  # type: ignore[attr-defined]
        assert client.url().startswith("https://minio:9000/")
        assert client._provider.retrieve().access_key == "key"


@pytest.mark.parametrize("field", ["store", "code", "bundle", "blobs"])
def test_store_rules_order_to_a_node_that_names_another_store_is_rejected(field: str):
    fine = msgspec.structs.replace(START, store=FARM.replace("/farm", "/farm/first"))
    RULES.check_order(fine)
    ref = BlobRef("0" * 64, 1, "", EVIL)
    value = {"store": ref.store, "blobs": (ref,)}.get(field, ref)
    with pytest.raises(ConfigError, match="which this search may not use"):
        RULES.check_order(msgspec.structs.replace(fine, **{field: value}))


MINE = "s3://mine/x?endpoint=https://other:9000"


def test_store_rules_address_with_a_profile_is_below_those_of_the_same_profile_only():
    rules = StorePermissions((FARM, f"{MINE}&profile=ada"), KEYS)
    rules.check(f"{MINE.replace('/x', '/x/first')}&profile=ada", "here")
    for address in (MINE, f"{MINE}&profile=ben"):
        with pytest.raises(ConfigError, match=r"may use: .*'s3://mine/x' at .* with profile=ada"):
            rules.check(address, "here")


@pytest.mark.parametrize(
    ("address", "own", "why"),
    [
        (FARM.replace("tunemq/farm", "other"), FARM, ""),
        (f"{MINE}&profile=ada", FARM, ""),
        (f"{MINE}&profile=ada", "/srv/results", ""),
        (f"{FARM}&profile=ada", FARM, ""),
        (f"{FARM}&profile=farm", FARM, ""),
        (MINE, FARM, "has no profile"),
        (MINE, "/srv/results", "has no profile"),
        (f"{FARM}&ca_file=/tmp/mine.pem", FARM, "has no profile"),
        (FARM, f"{FARM}&profile=own", "has no profile"),
        (f"{MINE}&profile=own", f"{FARM}&profile=own", "profile=own, which holds the farm's own"),
        (f"{MINE}&profile=farm", FARM, "profile=farm, which holds the farm's own keys"),
    ],
)
def test_store_rules_farms_own_keys_are_allowed_at_its_own_server_only(
    address: str, own: str, why: str
):
    found = why_not_allowed(address, own, {**KEYS, "AWS_PROFILE": "farm"})
    assert why in found
    assert bool(why) == bool(found)


def test_store_rules_variables_of_a_search_change_no_profile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    file = tmp_path / "credentials"
    file.write_text("[ada]\naws_access_key_id = adas\naws_secret_access_key = b\n")
    monkeypatch.setattr(open_store, "_rules", None)
    environ = {**KEYS, "AWS_SHARED_CREDENTIALS_FILE": str(file)}
    use_only(StorePermissions((f"{MINE}&profile=ada",), environ))
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "HOME", "AWS_PROFILE", "TUNEMQ_S3_REACHED_AT"):
        monkeypatch.setenv(name, "http://evil:9000")
    with open_objects(f"{MINE}&profile=ada") as objects:
        assert objects.address == "s3://mine/x at https://other:9000"
        client = objects._client._client  # type: ignore[attr-defined]
        assert client._provider.retrieve().access_key == "adas"


def test_store_rules_keep_the_variables_about_stores_and_no_others():
    environ = {**KEYS, "TUNEMQ_S3_ENDPOINT": "e", "TUNEMQ_REDIS": "r", "PATH": "/bin"}
    assert store_environ(environ).keys() == {*KEYS, "TUNEMQ_S3_ENDPOINT"}
