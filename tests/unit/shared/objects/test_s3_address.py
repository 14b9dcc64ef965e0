"""Address and keys of an object store, from a URL and the environment."""

from __future__ import annotations

from urllib.parse import urlencode

import certifi
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunemq_shared.base.errors import ConfigError, StoreError
from tunemq_shared.checkpoints.open_store import open_objects, open_store
from tunemq_shared.objects.s3_address import (
    S3Credentials,
    as_reached_from_here,
    find_ca_file,
    find_keys,
    parse_address,
    parse_beside,
)
from tunemq_shared.objects.store_address import canonical_address, is_remote, join

FULL = (
    "s3://bucket/a/b?endpoint=http://host:9000&region=eu-1&path_style=true&ca_file=/ca.pem"
    "&create_bucket=true"
)
FULL_SETTINGS = (
    "endpoint=http://host:9000&region=eu-1&path_style=false&ca_file=/ca.pem&profile=farm"
)


def test_address_can_contain_all_settings():
    address = parse_address(FULL, {"AWS_REGION": "other", "TUNEMQ_S3_ENDPOINT": "https://other"})
    assert (address.bucket, address.prefix) == ("bucket", "a/b")
    assert (address.endpoint, address.region) == ("http://host:9000", "eu-1")
    assert (address.path_style, address.ca_file, address.create_bucket) == (True, "/ca.pem", True)
    assert str(address) == FULL


def test_settings_missing_in_the_address_come_from_the_environment():
    environ = {"AWS_ENDPOINT_URL": "http://minio:9000/", "AWS_DEFAULT_REGION": "eu-2"}
    assert canonical_address("s3://bucket/a/", environ) == (
        "s3://bucket/a?endpoint=http://minio:9000&region=eu-2&path_style=true"
    )
    environ |= {"AWS_ENDPOINT_URL_S3": "http://s3", "AWS_REGION": "eu-3"}
    assert "endpoint=http://s3&region=eu-3" in canonical_address("s3://bucket", environ)
    environ |= {"TUNEMQ_S3_ENDPOINT": "https://ours"}
    assert "endpoint=https://ours&" in canonical_address("s3://bucket", environ)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket/farm/first", FULL_SETTINGS),
        ("s3://bucket/farm/first?endpoint=http://host:9000", FULL_SETTINGS),
        ("s3://bucket/farm/first?region=eu-2", FULL_SETTINGS.replace("eu-1", "eu-2")),
        (
            "s3://bucket/farm/first?endpoint_override=other:9000&scheme=http",
            "endpoint=http://other:9000&region=us-east-1&path_style=true",
        ),
        ("s3://other/first", "endpoint=http://ours&region=us-east-1&path_style=true"),
    ],
)
def test_parse_beside_takes_missing_settings_from_a_store_in_the_same_bucket(text, expected):
    store = parse_address(f"s3://bucket/farm?{FULL_SETTINGS}", {})
    address = parse_beside(text, store, {"TUNEMQ_S3_ENDPOINT": "http://ours"})
    assert str(address) == f"{text.partition('?')[0]}?{expected}"


def test_machine_may_use_another_endpoint_that_is_in_no_address():
    environ = {"TUNEMQ_S3_REACHED_AT": "https://127.0.0.1:19000"}
    known = "s3://bucket/farm?endpoint=https://proxy:9000"
    address = parse_address(known, environ)
    reached = as_reached_from_here(address, environ)
    assert reached.endpoint == "https://127.0.0.1:19000"
    assert (reached.place, reached.region) == (address.place, address.region)
    assert canonical_address(known, environ) == str(address)
    assert as_reached_from_here(address, {}) == address


@pytest.mark.parametrize("text", ["http://", "https://key@host", "http://host/path"])
def test_invalid_endpoint_is_rejected_with_its_variable(text):
    address = parse_address("s3://bucket/farm?endpoint=https://proxy:9000", {})
    with pytest.raises(ConfigError, match="TUNEMQ_S3_REACHED_AT"):
        as_reached_from_here(address, {"TUNEMQ_S3_REACHED_AT": text})


def test_opened_store_uses_that_endpoint(monkeypatch):
    monkeypatch.setenv("TUNEMQ_S3_REACHED_AT", "http://127.0.0.1:19000")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with open_objects("s3://bucket/farm?endpoint=https://proxy:9000") as objects:
        assert "http://127.0.0.1:19000" in objects.address


def test_without_an_endpoint_it_is_amazons_with_the_bucket_in_the_host_name():
    address = parse_address("s3://bucket/a", {})
    assert address.endpoint == "https://s3.amazonaws.com"
    assert (address.region, address.path_style) == ("us-east-1", False)


@pytest.mark.parametrize(
    "query",
    [
        "endpoint_override=localhost:9000&scheme=http",
        "scheme=http&endpoint_override=localhost%3A9000&allow_bucket_creation=True",
        "endpoint_override=http%3A%2F%2Flocalhost%3A9000",
    ],
)
def test_addresses_of_ray_users_are_accepted(query):
    address = parse_address(f"s3://bucket/a?{query}", {})
    assert address.endpoint == "http://localhost:9000"
    assert address.create_bucket is ("creation" in query)


@pytest.mark.parametrize("text", [FULL, "s3://bucket", "s3://bucket/a b/ü?region=x"])
def test_canonical_address_means_the_same_everywhere(text):
    canonical = canonical_address(text, {"AWS_ENDPOINT_URL": "http://minio:9000"})
    assert canonical_address(canonical, {"AWS_ENDPOINT_URL": "http://other"}) == canonical


@given(st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1))
def test_any_experiment_name_can_be_joined(name):
    address = canonical_address("s3://bucket/a", {})
    if name in (".", ".."):
        return
    joined = join(address, name)
    assert parse_address(joined, {}).prefix == f"a/{name}".strip("/")
    assert joined.endswith(address.partition("?")[2])
    assert str(parse_address(joined, {})) == joined


def test_names_are_joined_to_folders_and_prefixes():
    assert join("/results", "exp") == "/results/exp"
    assert join("s3://bucket?region=x", "a/b") == "s3://bucket/a/b?region=x"
    assert is_remote("s3://bucket")
    assert not is_remote("/s3")
    assert not is_remote("file:///a")


@pytest.mark.parametrize("text", ["file:///a/b", "file://localhost/a/b", "/a/b", "/a/./c/../b"])
def test_folder_has_one_canonical_path(text):
    assert canonical_address(text) == "/a/b"


@pytest.mark.parametrize("text", ["s3:/tunemq/farm", "S3:tunemq", "http:/head:7380", "file:/a"])
def test_address_that_lacks_a_slash_is_no_folder(text):
    with pytest.raises(ConfigError, match="lacks a slash behind its colon; give s3://bucket"):
        canonical_address(text)
    assert canonical_address(f"./{text}").endswith(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s3://", "'' is not the name of a bucket"),
        ("s3:///a", "'' is not the name of a bucket"),
        ("s3://AB/a", "'AB' is not the name of a bucket; that has 3 to 63 small letters"),
        ("s3://my_bucket/a", "'my_bucket' is not the name of a bucket"),
        ("s3://-bucket/a", "is not the name of a bucket"),
        ("s3://1.2.3.4/a", "is not the name of a bucket"),
        (f"s3://{'b' * 64}/a", "is not the name of a bucket"),
        ("s3://bucket/a/../b", "is not a prefix"),
        ("s3://bucket/a//b", "is not a prefix"),
        ("s3://bucket/a#b", "is not a prefix"),
        ("s3://bucket/a%00b", "is not a prefix"),
        ("s3://bucket?endpont=http://a", "unknown setting 'endpont'; did you mean 'endpoint'"),
        ("s3://bucket?nothing=1", "unknown setting 'nothing'; there are endpoint"),
        ("s3://bucket?region=a&region=b", "sets 'region' twice"),
        ("s3://bucket?endpoint=a&endpoint_override=b", "sets 'endpoint' twice"),
        ("s3://bucket?path_style=maybe", "path_style=maybe must be true or false"),
        ("s3://bucket?endpoint=ftp://host", "'ftp://host' must be http://host:port"),
        ("s3://bucket?endpoint=http://host/path", "without a path"),
        ("s3://bucket?endpoint=http://host:port", "must be http://host:port"),
        ("s3://bucket?endpoint=http://", "must be http://host:port"),
        ("gs://bucket/a", "gs://bucket/a cannot be used; give a local path"),
        ("file://host/a", "file://host/a cannot be used"),
    ],
)
def test_invalid_address_is_rejected_with_a_reason(text, message):
    with pytest.raises(ConfigError, match=r".*") as caught:
        canonical_address(text, {})
    assert message in str(caught.value)


@pytest.mark.security
@pytest.mark.parametrize(
    "text",
    [
        "s3://AKIA:hunter2@bucket/a",
        "s3://bucket/a?access_key=AKIA&secret_key=hunter2",
        "s3://bucket/a?secret=hunter2",
        "s3://bucket/a?X-Amz-Signature=hunter2",
        "s3://bucket/a?session_token=hunter2",
        "s3://bucket/a?endpoint=http://AKIA:hunter2@host",
    ],
)
def test_keys_in_an_address_are_rejected_and_not_repeated(text):
    with pytest.raises(ConfigError, match="key") as caught:
        canonical_address(text, {})
    assert "hunter2" not in str(caught.value)
    assert "AKIA" not in str(caught.value)


def test_keys_come_from_the_environment():
    environ = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_SESSION_TOKEN": "c"}
    assert find_keys(environ) == ("a", "b", "c")
    root = {"MINIO_ROOT_USER": "d", "MINIO_ROOT_PASSWORD": "e"}
    assert find_keys(root | {"AWS_SESSION_TOKEN": "c"}) == ("d", "e", "")
    assert find_keys(environ | root).access_key == "a"
    assert "b" not in repr(S3Credentials("a", "b")).removeprefix("S3Credentials")


def test_half_of_the_keys_is_an_error():
    with pytest.raises(StoreError, match="AWS_ACCESS_KEY_ID is set and AWS_SECRET_ACCESS_KEY is"):
        find_keys({"AWS_ACCESS_KEY_ID": "a"})
    with pytest.raises(StoreError, match="MINIO_ROOT_PASSWORD is set and MINIO_ROOT_USER is not"):
        find_keys({"MINIO_ROOT_PASSWORD": "a"})


def test_keys_come_from_a_file(tmp_path):
    file = tmp_path / ".aws" / "credentials"
    file.parent.mkdir()
    file.write_text(
        "[default]\naws_access_key_id = a\naws_secret_access_key = b%c\n"
        "[other]\naws_access_key_id=d\naws_secret_access_key=e\naws_session_token=f\n"
        "[half]\naws_access_key_id=d\n"
    )
    assert find_keys({"HOME": str(tmp_path)}) == ("a", "b%c", "")
    named = {"AWS_SHARED_CREDENTIALS_FILE": str(file)}
    assert find_keys(named | {"AWS_PROFILE": "other"}) == ("d", "e", "f")
    for profile in ("half", "none"):
        with pytest.raises(
            StoreError, match=f"for the profile '{profile}'; add them there, or name"
        ):
            find_keys(named | {"AWS_PROFILE": profile})


@pytest.mark.security
def test_keys_of_a_profile_come_only_from_the_file(tmp_path):
    file = tmp_path / "credentials"
    own = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "hunter2", "AWS_PROFILE": "own"}
    environ = {**own, "AWS_SHARED_CREDENTIALS_FILE": str(file)}
    with pytest.raises(
        StoreError, match=r"profile=ada: .*/credentials is not there; write \[ada\]"
    ):
        find_keys(environ, "ada")
    with pytest.raises(StoreError, match=r"profile=ada: ~/\.aws/credentials is not there"):
        find_keys(own, "ada")
    section = "[{}]\naws_access_key_id = hunter2\naws_secret_access_key = hunter2\n"
    others = "".join(map(section.format, ("default", "DEFAULT", "own")))
    for text in (others, f"{others}[ada]\n", f"{others}[ada]\naws_access_key_id = d\n"):
        file.write_text(text)
        with pytest.raises(
            StoreError, match="profile 'ada'; add them there, or correct profile="
        ) as said:
            find_keys(environ, "ada")
        assert "hunter2" not in str(said.value)
    file.write_text(f"{others}[ada]\naws_access_key_id = d\naws_secret_access_key = e\n")
    assert find_keys(environ, "ada") == ("d", "e", "")


def test_profile_of_an_address_is_part_of_it_everywhere():
    address = canonical_address("s3://bucket/a?profile=ada", {"AWS_PROFILE": "ben"})
    assert parse_address(address, {}).profile == "ada"
    assert canonical_address(join(address, "b"), {}).endswith("&profile=ada")
    assert "profile" not in canonical_address("s3://bucket/a", {"AWS_PROFILE": "ben"})
    reached = as_reached_from_here(parse_address(address, {}), {"TUNEMQ_S3_REACHED_AT": "http://x"})
    assert reached.endpoint == "https://s3.amazonaws.com"


@pytest.mark.parametrize(
    "profile", ["", "default", "DEFAULT", "a b", "../x", "a]", "a\n", "x" * 65]
)
def test_profile_that_is_no_safe_name_is_rejected(profile):
    with pytest.raises(ConfigError, match=r"profile=.* must be the name of a profile"):
        canonical_address(f"s3://bucket/a?{urlencode({'profile': profile})}", {})


@pytest.mark.security
def test_unreadable_file_is_named_and_not_quoted(tmp_path):
    file = tmp_path / "credentials"
    file.write_text("hunter2 = 1\n")
    with pytest.raises(StoreError, match="credentials: it is not a credentials file") as caught:
        find_keys({"AWS_SHARED_CREDENTIALS_FILE": str(file)})
    assert "hunter2" not in str(caught.value)
    with pytest.raises(StoreError, match="missing: No such file"):
        find_keys({"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "missing")})


def test_missing_keys_error_says_where_to_put_them():
    with pytest.raises(StoreError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or"):
        find_keys({})


def test_each_machine_has_its_own_certificates(tmp_path):
    environ = {"AWS_CA_BUNDLE": certifi.where()}
    assert find_ca_file(parse_address("s3://bucket", environ), environ) == environ["AWS_CA_BUNDLE"]
    assert "ca_file" not in canonical_address("s3://bucket", environ)
    assert find_ca_file(parse_address("s3://bucket", {}), {}) == ""
    with pytest.raises(ConfigError, match=r"'/none.pem' .* No such file .*; correct ca_file"):
        find_ca_file(parse_address("s3://bucket?ca_file=/none.pem", {}), {})
    (tmp_path / "none.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"none.pem' .* no certificate in it; correct ca_file"):
        find_ca_file(parse_address("s3://bucket", {}), {"SSL_CERT_FILE": f"{tmp_path}/none.pem"})


def test_only_an_object_store_has_objects(tmp_path):
    with pytest.raises(ConfigError, match="give s3://bucket/prefix"):
        open_objects(str(tmp_path))
    assert open_store(f"file://{tmp_path}").root == tmp_path
