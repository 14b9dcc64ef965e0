"""deploy/compose/setup.sh: makes a farm's secrets once, and gives each role its own of them."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.compose_parts import SETUP, Secrets
from tunemq_scheduler.security.key_folder import KeyFolder
from tunemq_shared.broker.redis_address import parse_address
from tunemq_shared.signing.key_files import read_key_file

pytestmark = [pytest.mark.integration]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    """Secrets that no test changes."""
    return Secrets(tmp_path_factory.mktemp("setup") / "secrets", TUNEMQ_SUBMITTERS="ada, ben")


@pytest.fixture
def secrets(first: Secrets, tmp_path: Path) -> Secrets:
    """A copy of the secrets, which a test may change."""
    shutil.copytree(first.path, tmp_path / "secrets")
    copy = object.__new__(Secrets)
    copy.path, copy.variables = tmp_path / "secrets", dict(first.variables)
    return copy


def test_files_are_kept_when_setup_runs_again(secrets: Secrets):
    before = secrets.contents()
    times = {name: (secrets.path / name).stat().st_mtime_ns for name in before}
    secrets.run()
    assert secrets.contents() == before
    given = [name for name in before if not name.startswith("authority/")]
    assert {name: (secrets.path / name).stat().st_mtime_ns for name in given} == {
        name: times[name] for name in given
    }


def test_only_the_owner_may_read_the_files(first: Secrets):
    for path in first.path.rglob("*"):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_each_role_has_the_secrets_it_needs_and_no_others(first: Secrets):
    contents = first.contents()
    of_role = {"ca.crt", "credentials", "environment", "keys.toml"}
    found: dict[str, set[str]] = {}
    for name in contents:
        folder, _, file = name.rpartition("/")
        found.setdefault(folder, set()).add(file)
    assert found["scheduler"] == found["worker"] == of_role
    for name in ("ada", "ben", "worker"):
        assert found[f"outside/{name}"] == of_role | {"with"}
    assert found["redis"] == {"redis.conf", "users.acl", "exporter.password"}
    assert found["redis/tls"] == {"ca.crt", "redis.crt", "redis.key"}
    assert found["proxy"] == {"nginx.conf", "store.crt", "store.key"}
    assert found["minio"] == {"root-user", "root-password"}
    assert found["grafana"] == {"admin-password", "secret-key"}
    secret = [
        *(contents[f"authority/passwords/{user}.password"] for user in ("worker", "ada", "keeper")),
        contents["authority/tls/ca.key"],
        contents["minio/root-password"],
    ]
    for value in secret:
        for name, content in contents.items():
            if name.startswith(("scheduler/", "proxy/", "redis/", "grafana/", "outside/ben/")):
                assert value not in content, name


def test_setup_prints_no_secret(first: Secrets):
    for name, content in first.contents().items():
        if name.startswith(("authority/passwords", "authority/store", "minio", "grafana")):
            assert content.decode().split()[-1] not in first.made, name


def test_services_inside_the_farm_use_names_of_services(first: Secrets):
    text = first.text("worker/environment")
    assert "@redis:6379/0" in text
    assert "TUNEMQ_S3_ENDPOINT=https://proxy:9000" in text
    assert "TUNEMQ_S3_REACHED_AT" not in text


def test_machines_outside_use_this_machines_name_and_ports(secrets: Secrets):
    secrets.run(
        TUNEMQ_HOST="head.example.org,10.0.0.3", TUNEMQ_REDIS_PORT="7", TUNEMQ_STORE_PORT="8"
    )
    for name in ("worker", "ada"):
        text = secrets.text(f"outside/{name}/environment")
        assert "@head.example.org:7/0" in text
        assert "TUNEMQ_S3_REACHED_AT=https://head.example.org:8" in text


def test_certificates_cover_all_names_and_are_renewed_when_those_change(secrets: Secrets):
    authority, before = secrets.text("redis/tls/ca.crt"), secrets.text("redis/tls/redis.crt")
    secrets.run(TUNEMQ_HOST="head.example.org 10.0.0.3")
    assert secrets.text("redis/tls/ca.crt") == authority
    assert secrets.text("redis/tls/redis.crt") != before
    for server, file in (("redis", "redis/tls/redis.crt"), ("proxy", "proxy/store.crt")):
        for name in (server, "localhost", "head.example.org"):
            assert _is_for(secrets.path / file, secrets, "-verify_hostname", name)
        for name in ("127.0.0.1", "10.0.0.3"):
            assert _is_for(secrets.path / file, secrets, "-verify_ip", name)
        assert not _is_for(secrets.path / file, secrets, "-verify_hostname", "other.example.org")


def test_submitters_are_added_and_removed_and_the_others_keep_their_secrets(secrets: Secrets):
    ada = secrets.contents()
    assert "removed: ben;" in secrets.run(TUNEMQ_SUBMITTERS="ada eve")
    now = secrets.contents()
    assert {name for name in now if "ben" in name} == set()
    for name in ada:
        if name.startswith(("outside/ada", "worker/", "minio/")):
            assert now[name] == ada[name], name
    users = [line.split()[1] for line in secrets.text("redis/users.acl").splitlines()]
    assert users[:-1] == ["default", "scheduler", "worker", "exporter", "ada", "eve", "keeper"]
    keys = KeyFolder(str(secrets.path / "authority" / "keys")).keys()
    assert set(keys.submitters) == {"ada", "eve"}


@pytest.mark.parametrize("line", [("show",), ("keys", "show")])
def test_read_only_command_changes_nothing_whatever_the_variables_are(
    line: tuple[str, ...], secrets: Secrets
):
    before = secrets.contents()
    said = secrets.run(*line, TUNEMQ_SUBMITTERS="submitter", TUNEMQ_HOST="other.example.org")
    assert {"ada", "ben"} <= set(said.replace(":", " ").split())
    assert secrets.contents() == before


def test_read_only_command_before_setup_is_rejected(secrets: Secrets):
    shutil.rmtree(secrets.path)
    done = secrets.tried("show")
    assert done.returncode == 1
    assert "no secrets yet" in done.stderr
    assert not secrets.path.exists()


@pytest.mark.parametrize("line", [("new-certificates",), ("keys", "rotate")])
def test_command_without_variables_changes_no_setting(line: tuple[str, ...], secrets: Secrets):
    secrets.run(TUNEMQ_HOST="head.example.org", TUNEMQ_REDIS_PORT="7")
    before = secrets.contents()
    secrets.variables.clear()
    assert "removed" not in secrets.run(*line)
    now = secrets.contents()
    assert now.keys() == before.keys()
    assert now["outside/ada/environment"] == before["outside/ada/environment"]
    assert b"@head.example.org:7/0" in now["outside/ada/environment"]
    assert _is_for(
        secrets.path / "proxy/store.crt", secrets, "-verify_hostname", "head.example.org"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TUNEMQ_REDIS_PORT", "7"),
        ("TUNEMQ_STORE_PORT", "8"),
        ("TUNEMQ_HOST", "head.example.org"),
        ("TUNEMQ_PUBLISH", "10.0.0.3"),
    ],
)
def test_removed_variable_restores_its_default_in_outside_files(
    name: str, value: str, secrets: Secrets
):
    before = secrets.contents()
    secrets.run(**{name: value})
    assert value in secrets.text("outside/ada/environment")
    secrets.run(**{name: ""})
    now = secrets.contents()
    for file in ("outside/ada/environment", "outside/worker/environment", "worker/environment"):
        assert now[file] == before[file]


def test_submitters_stay_when_their_variable_is_removed(secrets: Secrets):
    before = secrets.contents()
    secrets.variables.clear()
    assert "removed" not in secrets.run()
    assert secrets.contents().keys() == before.keys()


def test_published_address_is_the_host_that_others_use(secrets: Secrets):
    secrets.run(TUNEMQ_PUBLISH="10.0.0.3")
    assert "@10.0.0.3:6379/0" in secrets.text("outside/ada/environment")
    assert _is_for(secrets.path / "redis/tls/redis.crt", secrets, "-verify_ip", "10.0.0.3")
    secrets.run(TUNEMQ_PUBLISH="0.0.0.0")
    assert "@127.0.0.1:6379/0" in secrets.text("outside/ada/environment")


def test_default_submitter_stays_until_it_is_named_and_removed(tmp_path: Path):
    farm = Secrets(tmp_path / "secrets")
    before = farm.text("outside/submitter/keys.toml")
    said = farm.run(TUNEMQ_SUBMITTERS="ada ben")
    assert "kept: submitter" in said
    assert "removed" not in said
    assert farm.text("outside/submitter/keys.toml") == before
    assert "kept" not in farm.run(TUNEMQ_SUBMITTERS="ada ben submitter")
    assert "removed: submitter;" in farm.run(TUNEMQ_SUBMITTERS="ada ben")
    assert not (farm.path / "outside" / "submitter").exists()


def test_last_user_of_redis_has_a_name_that_the_rest_of_the_file_does_not_use(secrets: Secrets):
    *users, last = secrets.text("redis/users.acl").splitlines(keepends=True)
    name, is_on, *rights = last.split()[1:]
    assert name == "file-" + hashlib.sha256("".join(users).encode()).hexdigest()
    assert is_on == "off"
    assert rights == ["resetpass", "resetkeys", "resetchannels", "-@all"]
    secrets.run(TUNEMQ_SUBMITTERS="ada")
    assert name not in secrets.text("redis/users.acl")


def test_every_user_of_redis_has_a_separate_password(first: Secrets):
    hashes = [line.split()[3] for line in first.text("redis/users.acl").splitlines()[1:-1]]
    assert len(hashes) == len(set(hashes)) == 6
    assert all(len(one) == 65 and one.startswith("#") for one in hashes)


def test_keys_are_changed_in_three_steps_and_reach_their_users(secrets: Secrets):
    before = secrets.text("worker/keys.toml")
    secrets.run("keys", "rotate")
    both = secrets.text("worker/keys.toml")
    assert both != before
    assert secrets.text("scheduler/keys.toml") == secrets.text("authority/keys/scheduler.toml")
    secrets.run("keys", "promote")
    secrets.run("keys", "drop")
    assert len(secrets.text("worker/keys.toml")) == len(before)
    assert "signs" in secrets.run("keys", "show")


def test_new_passwords_leave_certificates_and_keys_unchanged(secrets: Secrets):
    before = secrets.contents()
    secrets.run("new-passwords")
    changed = {name for name, content in secrets.contents().items() if before[name] != content}
    assert {"worker/environment", "worker/credentials", "redis/users.acl"} <= changed
    assert {"minio/root-password", "outside/ada/credentials"} <= changed
    assert not {name for name in changed if "keys" in name or name.endswith((".crt", ".key"))}


def test_new_certificates_are_signed_by_the_same_authority(secrets: Secrets):
    before = secrets.contents()
    secrets.run("new-certificates")
    changed = {name for name, content in secrets.contents().items() if before[name] != content}
    assert {"redis/tls/redis.crt", "redis/tls/redis.key", "proxy/store.crt"} <= changed
    assert not {name for name in changed if name.endswith("ca.crt") or "password" in name}


def test_certificate_that_expires_soon_is_renewed_by_the_same_authority(secrets: Secrets):
    tls = secrets.path / "authority" / "tls"
    _shorten(tls, "store", days=89)
    assert [line for line in secrets.run("show").splitlines() if "SOON" in line]
    before = secrets.contents()
    said = secrets.run()
    assert "SOON" not in said
    assert "changed: proxy/store.crt proxy/store.key; running services need" in said
    changed = {name for name, content in secrets.contents().items() if before[name] != content}
    assert {"authority/tls/store.crt", "proxy/store.crt"} <= changed
    assert not {name for name in changed if name.endswith("ca.crt") or "redis" in name}
    assert _is_for(secrets.path / "proxy/store.crt", secrets, "-verify_hostname", "proxy")


def test_changed_configuration_names_the_services_to_restart(secrets: Secrets):
    """Simulates an upgrade: the installed files differ from the shipped ones."""
    for name in ("proxy/nginx.conf", "redis/redis.conf"):
        (secrets.path / name).write_text("# of an earlier version")
    said = secrets.run()
    assert "changed: redis/redis.conf proxy/nginx.conf; running services need" in said
    assert "docker compose restart redis proxy" in said
    assert "changed:" not in secrets.run()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"TUNEMQ_SUBMITTERS": "worker"}, "invalid name 'worker'"),
        ({"TUNEMQ_SUBMITTERS": "ada ../ben"}, "invalid name '../ben'"),
        ({"TUNEMQ_SUBMITTERS": "a;b"}, "invalid name 'a;b'"),
        ({"TUNEMQ_SUBMITTERS": "a" * 41}, "too long"),
        ({"TUNEMQ_REDIS_PORT": "12x"}, "TUNEMQ_STORE_PORT: '12x' is not a number"),
        ({"TUNEMQ_HOST": "head;rm"}, "'head;rm' is not a host name or address"),
    ],
)
def test_invalid_setting_is_named_and_changes_nothing(
    variables: dict[str, str], said: str, secrets: Secrets
):
    before = secrets.contents()
    done = secrets.tried(**variables)
    assert done.returncode == 1
    assert said in done.stderr
    assert secrets.contents() == before


@pytest.mark.parametrize("line", [("forget",), ("keys",), ("show", "all")])
def test_wrong_command_prints_the_known_ones(line: tuple[str, ...], first: Secrets):
    done = first.tried(*line)
    assert done.returncode == 2
    assert "new-certificates" in done.stderr


def test_submitters_are_changed_only_by_the_variable(first: Secrets):
    done = first.tried("keys", "add", "eve")
    assert done.returncode == 1
    assert "TUNEMQ_SUBMITTERS" in done.stderr


def test_interrupted_setup_continues(secrets: Secrets):
    kept = secrets.contents()
    lost = (
        "authority/tls/store.crt",
        "authority/users.acl",
        "worker/environment",
        "outside/ada/with",
    )
    for name in lost:
        (secrets.path / name).unlink()
    (secrets.path / "worker" / "keys.toml.new").write_text("half of")
    secrets.run()
    now = secrets.contents()
    assert {name for name in kept if now.get(name) != kept[name]} <= {
        *("authority/tls/store.crt", "authority/tls/store.key", "authority/tls/ca.srl"),
        *("proxy/store.crt", "proxy/store.key"),
    }


@pytest.mark.parametrize("submitters", ["ada", "ada ben"])
def test_half_added_or_half_removed_keys_are_repaired(submitters: str, secrets: Secrets):
    """The user ben has a key file, but scheduler.toml does not list ben."""
    folder = secrets.path / "authority" / "keys"
    half = (folder / "ben.toml").read_text()
    KeyFolder(str(folder)).remove(["ben"])
    (folder / "ben.toml").write_text(half)
    secrets.run(TUNEMQ_SUBMITTERS=submitters)
    keys = KeyFolder(str(folder)).keys()
    assert set(keys.submitters) == set(submitters.split())
    assert (folder / "ben.toml").exists() is ("ben" in keys.submitters)
    if "ben" in keys.submitters:
        given = read_key_file(secrets.path / "outside" / "ben" / "keys.toml")
        assert given.submitters["ben"] == keys.submitters["ben"]


def test_command_uses_the_files_beside_it(first: Secrets, tmp_path: Path):
    """Uses a copy in another folder, as users receive it."""
    folder = tmp_path / "tunemq-ada"
    shutil.copytree(first.path / "outside" / "ada", folder)
    show = 'echo "$TUNEMQ_REDIS $TUNEMQ_KEYS"'
    line = [str(folder / "with"), "sh", "-c", show]
    ran = subprocess.run(line, check=True, capture_output=True, text=True).stdout
    url, keys = ran.split()
    address = parse_address(url)
    assert (address.user, address.host, address.tls) == ("ada", "127.0.0.1", True)
    assert address.ca_file == str(folder / "ca.crt")
    assert keys == str(folder / "keys.toml")
    line = ["sh", "-c", f'eval "$({folder}/with)"; {show}']
    assert subprocess.run(line, check=True, capture_output=True, text=True).stdout == ran


def test_users_settings_for_other_stores_are_ignored(first: Secrets, tmp_path: Path):
    folder = tmp_path / "tunemq-ada"
    shutil.copytree(first.path / "outside" / "ada", folder)
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE")
    others = ("AWS_DEFAULT_PROFILE", "MINIO_ROOT_USER", "MINIO_ROOT_PASSWORD", "MINIO_SECRET_KEY")
    environ = os.environ | dict.fromkeys((*names, *others, "MINIO_ACCESS_KEY"), "of-another-store")
    script = (
        "import os; from tunemq_shared.objects.s3_address import find_keys; "
        "print(find_keys(os.environ)[0])"
    )
    show = [sys.executable, "-c", script]
    evaluated = ["sh", "-c", f'eval "$({folder}/with)"; exec "$@"', "sh", *show]
    for line in ([str(folder / "with"), *show], evaluated):
        done = subprocess.run(line, check=False, capture_output=True, text=True, env=environ)
        assert first.keys("outside/ada")[0] in done.stdout, done.stderr


def test_folder_that_no_address_can_name_is_rejected(first: Secrets, tmp_path: Path):
    folder = tmp_path / "ada's & ben's"
    shutil.copytree(first.path / "outside" / "ada", folder)
    done = subprocess.run(
        [str(folder / "with"), "true"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 64
    assert "move this folder" in done.stderr


def test_files_belong_to_the_user_of_the_containers(tmp_path: Path):
    if os.getuid() != 0:
        pytest.skip("only root gives files away")
    secrets = Secrets(
        tmp_path / "secrets", TUNEMQ_OWNER="10001:10001", TUNEMQ_GRAFANA_OWNER="472:0"
    )
    for path in secrets.path.rglob("*"):
        role = path.relative_to(secrets.path).parts[0]
        owner = {"authority": 0, "grafana": 472}.get(role, 10001)
        if path != secrets.path / "outside":
            assert path.stat().st_uid == owner, path


def test_script_is_posix_sh():
    assert subprocess.run(["sh", "-n", str(SETUP)], check=False).returncode == 0


def _shorten(tls: Path, server: str, *, days: int) -> None:
    """Set the end of a certificate."""
    sign = ["openssl", "x509", "-in", f"{server}.crt", "-signkey", f"{server}.key"]
    line = [*sign, "-days", str(days), "-out", "shorter.crt"]
    subprocess.run(line, check=True, capture_output=True, cwd=tls)
    (tls / "shorter.crt").rename(tls / f"{server}.crt")


def _is_for(certificate: Path, secrets: Secrets, option: str, name: str) -> bool:
    ca_file = secrets.path / "redis" / "tls" / "ca.crt"
    line = ["openssl", "verify", "-CAfile", str(ca_file), option, name, str(certificate)]
    return subprocess.run(line, check=False, capture_output=True).returncode == 0
