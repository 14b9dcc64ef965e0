"""Which stores a farm's credentials may be sent to."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.scheduler.test_mailbox import START
from tunemq_shared import stores
from tunemq_shared.errors import ConfigError
from tunemq_shared.messages import BlobRef
from tunemq_shared.store_rules import StoreRules, store_environ
from tunemq_shared.stores import open_objects, use_only

FARM = "s3://tunemq/farm?endpoint=https://minio:9000&region=us-east-1&path_style=true"
SERVED = "http://store:7380/farm"
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
RULES = StoreRules((FARM, SERVED), KEYS)


@pytest.fixture
def _restricted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_rules", None)
    use_only(RULES)


@pytest.mark.parametrize(
    "address",
    [
        FARM,
        FARM.replace("/farm", "/farm/first"),
        FARM.replace("us-east-1", "eu-1"),
        FARM.replace("https://minio", "https://MINIO"),
        f"{SERVED}/first",
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
        "s3://tunemq/farm",  # Amazon's, where nothing else is said
        "http://evil:7380/farm",
        "https://store:7380/farm",
        f"{SERVED}-2",
        f"{SERVED}?ca_file=/tmp/mine.pem",
    ],
)
def test_store_rules_other_server_bucket_or_certificate_is_refused_with_the_fix(address: str):
    with pytest.raises(ConfigError, match=r"^here names the store.*allowed: .*stores = \[") as said:
        RULES.check(address, "here")
    assert "secret" not in f"{said.value}{RULES!r}"


@pytest.mark.parametrize("address", ["http://evil:7380/x", "s3://mine/x?endpoint=http://evil"])
@pytest.mark.usefixtures("_restricted")
def test_store_rules_process_of_a_submitted_search_opens_no_other_store(address: str):
    with pytest.raises(ConfigError, match="credentials may not be sent"):
        open_objects(address)


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
def test_store_rules_order_to_a_node_that_names_another_store_is_refused(field: str):
    fine = msgspec.structs.replace(START, store=f"{SERVED}/first")
    RULES.check_order(fine)
    ref = BlobRef("0" * 64, 1, "", "http://evil:7380/x")
    value = {"store": ref.store, "blobs": (ref,)}.get(field, ref)
    with pytest.raises(ConfigError, match="credentials may not be sent"):
        RULES.check_order(msgspec.structs.replace(fine, **{field: value}))


def test_store_rules_keep_the_variables_about_stores_and_no_others():
    environ = {**KEYS, "TUNEMQ_STORE_TOKEN": "t", "TUNEMQ_REDIS": "r", "PATH": "/bin"}
    assert store_environ(environ).keys() == {*KEYS, "TUNEMQ_STORE_TOKEN"}
