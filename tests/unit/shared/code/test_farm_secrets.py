"""Files with secrets of a farm stay out of bundles: by their names, and by their contents."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.support.keys import key_folder
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.code import farm_secrets
from tunemq_shared.code.blob_store import FolderBlobStore
from tunemq_shared.code.bundles import bundle, unpacked
from tunemq_shared.code.farm_secrets import own_secrets, why_secret
from tunemq_shared.objects.s3_address import KEY_VARIABLES
from tunemq_shared.signing.key_files import KEYS_VARIABLE, read_key_file

PASSWORD = "Zm9v/YmFy+c3Vw=="


@pytest.fixture(autouse=True)
def without_own_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Settings of the machine that runs the tests do not count."""
    for name in (*KEY_VARIABLES, KEYS_VARIABLE, "TUNEMQ_REDIS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    (root / "train.py").write_text("import helper\n")
    return root


class Sent:
    """What a bundle of a folder holds, and what the user was told."""

    def __init__(self, project: Path, tmp_path: Path) -> None:
        blobs = FolderBlobStore(str(tmp_path / "store"))
        self.told: list[str] = []
        place = unpacked(bundle(project, blobs, tell=self.told.append), tmp_path / "code")
        self.names = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True, parents=True)
    (folder / name).write_text(text)


# --- by name --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *(".env", ".env.local", "conf/.env.production", ".envrc"),
        *("tunemq-grafana-password", "redis/worker.password", "store/root-password"),
        "grafana/secret-key",
    ],
)
def test_file_with_the_name_of_a_secret_is_left_out_and_named(project, tmp_path, name):
    write(project, name, "x")
    sent = Sent(project, tmp_path)
    assert sent.names == {"train.py"}
    (told,) = sent.told
    assert f"'{name}' (it has the name of a file of secrets)" in told
    assert f"'!{name}'" in told
    assert f"into '{project}/.tunemqignore'" in told


@pytest.mark.parametrize(
    "name",
    [".env.example", ".env.local.sample", "environment.py", "a.env", "my-password.py", "env"],
)
def test_file_with_a_similar_name_is_sent(project, tmp_path, name):
    write(project, name, "AWS_SECRET_ACCESS_KEY=<key>\n")
    sent = Sent(project, tmp_path)
    assert sent.names == {"train.py", name}
    assert sent.told == []


def test_folder_with_the_name_of_a_secret_is_code(project, tmp_path):
    write(project, ".env/tool.sh", "true\n")
    assert Sent(project, tmp_path).names == {"train.py", ".env/tool.sh"}


# --- by content -----------------------------------------------------------------------------------

SECRETS = {
    "environment": f"TUNEMQ_REDIS=rediss://worker:{quote(PASSWORD, safe='')}@redis:6379/0\n",
    "no-user": "celery: redis://:hunter2@10.0.0.1\n",
    "socket": "TUNEMQ_REDIS=unix://worker:hunter2@/run/redis.sock?db=0\n",
    "celery.cfg": "broker = redis+socket://worker:hunter2@/run/redis.sock\n",
    "profile.sh": f"export AWS_SECRET_ACCESS_KEY={PASSWORD}\n",
    "compose.yml": "environment:\n  MINIO_ROOT_PASSWORD: 'hunter2'\n",
    "list.yml": "environment:\n  - MINIO_SECRET_KEY=hunter2\n",
    "pod.yml": "env:\n- name: AWS_SECRET_ACCESS_KEY\n  value: hunter2\n",
    "pod.json": '{"env": [{"name": "AWS_SESSION_TOKEN", "value": "hunter2"}]}',
    "settings.json": '{"AWS_SECRET_ACCESS_KEY": "hunter2"}',
    "credentials": f"[default]\naws_access_key_id = x\naws_secret_access_key = {PASSWORD}\n",
    "rclone.conf": "[farm]\ntype = s3\nsecret_access_key = hunter2\n",
    "exporter": "REDIS_PASSWORD=hunter2\n",
    "grafana.ini": "[security]\nadmin_password = hunter2\n",
    "grafana.env": "GF_SECURITY_ADMIN_PASSWORD=hunter2\n",
    "redis.conf": "requirepass hunter2\n",
    "start.sh": "redis-server --requirepass hunter2\n",
    "call.md": 'boto3.client("s3", aws_secret_access_key="a(b")\n',
    "ca.key": "-----BEGIN EC PRIVATE KEY-----\nMHcC\n",
    "tls.key": "-----BEGIN PRIVATE KEY-----\nMHcC\n",
}


@pytest.mark.parametrize("name", SECRETS)
def test_file_that_holds_a_secret_is_left_out_and_named(project, tmp_path, name):
    write(project, f"conf/{name}", SECRETS[name])
    sent = Sent(project, tmp_path)
    assert sent.names == {"train.py"}
    (told,) = sent.told
    assert f"'conf/{name}' (it " in told
    assert PASSWORD not in told
    assert "hunter2" not in told


def test_notebook_with_a_secret_is_left_out(project, tmp_path):
    for number, line in enumerate(
        [
            'os.environ["AWS_SECRET_ACCESS_KEY"] = "hunter2"',
            "os.environ['TUNEMQ_REDIS'] = 'redis://ada:hunter2@10.0.0.1'",
            "%env MINIO_SECRET_KEY=hunter2",
        ]
    ):
        cell = {"cell_type": "code", "source": ["import os\n", f"{line}\n"]}
        write(project, f"{number}.ipynb", json.dumps({"cells": [cell]}, indent=1))
    assert Sent(project, tmp_path).names == {"train.py"}


PLACEHOLDERS = {
    "environment.example": "#TUNEMQ_REDIS=rediss://ROLE:PASSWORD@redis.example.org:6379/0\n",
    "README.md": "Set redis://<user>:<password>@host or redis://user:password@host:6379/0\n",
    "open.txt": "TUNEMQ_REDIS=redis://10.0.0.1:6379/0\nsocket: unix:///run/redis.sock\n",
    "with.sh": "TUNEMQ_REDIS=redis://$ROLE:${PASSWORD}@host\nAWS_SECRET_ACCESS_KEY=$(cat key)\n"
    "printf 'aws_secret_access_key = %s' $key; REDISCLI_AUTH=$$(cat key)\n",
    "f.md": 'f"redis://{user}:{password}@{host}"\n',
    "dots": "redis://ada:...@host\nREDIS_PASSWORD=...\nMINIO_SECRET_KEY=***\n",
    "empty": "AWS_SECRET_ACCESS_KEY=\nMINIO_ROOT_PASSWORD=''\nREDIS_PASSWORD: \"\"\n",
    "null.yml": "AWS_SECRET_ACCESS_KEY: null\nMINIO_SECRET_KEY: # none\nREDIS_PASSWORD: ~\n",
    "from.yml": "- name: AWS_SECRET_ACCESS_KEY\n  valueFrom:\n    secretKeyRef: {name: a}\n",
    "file.yml": "MINIO_ROOT_PASSWORD_FILE: /run/secrets/password\n",
    "checks.sh": '[ -n "${AWS_SECRET_ACCESS_KEY:-}" ]; : "${REDIS_PASSWORD:?must be set}"\n'
    "echo ${MINIO_ROOT_PASSWORD:+set}; REDIS_PASSWORD=${REDIS_PASSWORD:-}\n"
    "export AWS_SECRET_ACCESS_KEY=`cat key`\nREDIS_PASSWORD = false\n",
    "keys.js": "const key = {AWS_SECRET_ACCESS_KEY: process.env.AWS_SECRET_ACCESS_KEY};\n",
    "helm.yml": "AWS_SECRET_ACCESS_KEY: {{ .Values.key }}\n",
    "names.txt": "AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN and MINIO_SECRET_KEY\n",
    "lines.md": 'key = os.environ["AWS_SECRET_ACCESS_KEY"]\n'
    'AWS_SECRET_ACCESS_KEY = os.environ["KEY"]\nif AWS_SECRET_ACCESS_KEY == "x": pass\n',
    "ids.toml": f'0123456789abcdef = "{"A" * 42}"\n',
    "tokens.txt": "secret\npassword\nredis\nPRIVATE KEY\n",
    "ca.crt": "-----BEGIN CERTIFICATE-----\nMHcC\n",
}


@pytest.mark.parametrize("name", PLACEHOLDERS)
def test_file_with_names_and_placeholders_alone_is_sent(project, tmp_path, name):
    write(project, name, PLACEHOLDERS[name])
    sent = Sent(project, tmp_path)
    assert sent.names == {"train.py", name}
    assert sent.told == []


def test_files_of_keys_new_are_left_out_under_any_name(project, tmp_path):
    keys = key_folder(project / "keys", "ada").path
    assert {path.name for path in keys.iterdir()} == {"scheduler.toml", "worker.toml", "ada.toml"}
    copied = (keys / "ada.toml").read_text()
    write(project, "mine.txt", "\n".join(copied.splitlines()[1:]))  # without the comment
    write(project, "mine.ipynb", json.dumps({"source": copied.splitlines()}))
    sent = Sent(project, tmp_path)
    assert sent.names == {"train.py"}
    assert sent.told[0].count("it has signing keys of a farm") == 5


def test_python_module_is_sent_whatever_it_names(project, tmp_path):
    """It may name such variables, and without it the search fails."""
    write(project, "helper.py", 'AWS_SECRET_ACCESS_KEY = "hunter2"\n')
    assert Sent(project, tmp_path).names == {"train.py", "helper.py"}


def test_only_the_beginnings_of_text_files_are_read(project, tmp_path):
    line = SECRETS["profile.sh"]
    write(project, "binary", f"\0{line}")
    write(project, "long", "x" * 2**16 + line)
    write(project, "shorter", "x" * (2**16 - len(line) - 1) + "\n" + line)
    assert Sent(project, tmp_path).names == {"train.py", "binary", "long"}


def test_link_to_a_secret_is_left_out(project, tmp_path):
    write(project, "real/profile.sh", SECRETS["profile.sh"])
    (project / "settings").symlink_to("real/profile.sh")
    assert Sent(project, tmp_path).names == {"train.py"}


# --- secrets of this process ----------------------------------------------------------------------


def test_file_with_a_secret_of_this_process_is_left_out(project, tmp_path, monkeypatch):
    keys = key_folder(tmp_path / "keys", "ada").path / "ada.toml"
    signing = keys.read_text().partition('"')[2].partition('"')[0]
    monkeypatch.setenv("TUNEMQ_REDIS", "redis://ada:p%40ss-of-redis@10.0.0.1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ada")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-store")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token-of-the-store")
    monkeypatch.setenv(KEYS_VARIABLE, str(keys))
    secrets = ["p@ss-of-redis", "p%40ss-of-redis", "secret-of-the-store", "token-of-the-store"]
    for number, secret in enumerate([*secrets, signing]):
        write(project, f"{number}.yaml", f"password: {secret}\n")
    write(project, "other.yaml", "password: of-another-service\nuser: ada\n")
    sent = Sent(project, tmp_path)
    assert sent.names == {"train.py", "other.yaml"}
    assert sent.told[0].count("it has a password or key that this process uses") == 5


def test_own_secrets_come_from_arguments_and_the_credentials_file_too(tmp_path):
    keys = key_folder(tmp_path / "keys", "ada").path / "ada.toml"
    write(
        tmp_path,
        ".aws/credentials",
        "[default]\naws_access_key_id = a\naws_secret_access_key = default-secret\n"
        "[lab]\naws_access_key_id = b\naws_secret_access_key = secret-of-lab\n",
    )
    environ = {"HOME": str(tmp_path)}
    assert own_secrets(environ) == {b"default-secret"}
    assert own_secrets(environ, store="s3://tune/farm?profile=lab") == {
        b"default-secret",
        b"secret-of-lab",
    }
    (key,) = read_key_file(keys).submitters["ada"]
    assert own_secrets({}, password="given-as-argument", keys=str(keys)) >= {
        b"given-as-argument",
        base64.b64encode(key.secret),
    }


def test_settings_that_cannot_be_read_and_short_or_common_passwords_are_no_secrets(tmp_path):
    """Other code reports the former; the latter occur in any text."""
    (tmp_path / "keys.toml").write_text("?")
    environ = {"TUNEMQ_REDIS": "http://x", KEYS_VARIABLE: str(tmp_path / "keys.toml")}
    assert own_secrets({**environ, "AWS_SECRET_ACCESS_KEY": "short"}) == frozenset()
    assert own_secrets({"TUNEMQ_REDIS": "redis://:password@host"}) == frozenset()


def test_own_secret_that_is_no_unicode_is_a_secret(project, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ada")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret\udcff-of-the-store")
    (project / "notes.txt").write_bytes(b"key: secret\xff-of-the-store\n")
    assert Sent(project, tmp_path).names == {"train.py"}


# --- messages and exceptions ----------------------------------------------------------------------


@pytest.mark.parametrize("file", [".tunemqignore", ".gitignore"])
def test_line_with_its_name_includes_a_secret(project, tmp_path, file):
    write(project, ".env", "x")
    write(project, "conf/[1].yaml", SECRETS["profile.sh"])
    write(project, file, "!.env\n!/conf/\\[1].yaml\n")
    sent = Sent(project, tmp_path)
    assert sent.names == {".env", "conf/[1].yaml", "train.py", file}
    assert sent.told == []


def test_line_with_a_wildcard_or_a_folder_includes_no_secret(project, tmp_path):
    """Many ignore files begin by excluding all."""
    write(project, ".gitignore", "*\n!*.py\n!*.yaml\n!.env*\n!build/\n!build/**\n")
    for name in (".env", "a.yaml", "build/c.txt"):
        write(project, name, SECRETS["profile.sh"])
    write(project, "b.yaml", "lr: 1\n")
    write(project, "build/prog", "x")
    sent = Sent(project, tmp_path)
    assert sent.names == {"train.py", "b.yaml", "build/prog"}
    assert re.findall(r"'(\S+)' \(it", sent.told[0]) == [".env", "a.yaml", "build/c.txt"]


def test_user_is_not_told_of_secrets_that_the_ignore_file_lists(project, tmp_path):
    write(project, ".gitignore", ".env\nconf/\n")
    write(project, ".env", "x")
    write(project, "conf/a.yaml", SECRETS["profile.sh"])
    assert Sent(project, tmp_path).told == []


def test_message_escapes_names_and_names_the_first_ten(project, tmp_path):
    write(project, "a\x1b[2J\n\u202e.sh", SECRETS["profile.sh"])
    for number in range(11):
        write(project, f"b{number:02}.sh", SECRETS["profile.sh"])
    (told,) = Sent(project, tmp_path).told
    assert r"'a\x1b[2J\n\u202e.sh'" in told
    assert not re.search("[\x00-\x1f\u202e]", told)
    assert "'b08.sh'" in told
    assert "'b09.sh'" not in told
    assert "and 2 more" in told


def test_folder_of_secrets_alone_is_rejected_and_they_are_named(project, tmp_path):
    (project / "train.py").rename(project / ".env")
    told: list[str] = []
    with pytest.raises(ConfigError, match="has no file that could travel"):
        bundle(project, FolderBlobStore(str(tmp_path / "store")), tell=told.append)
    assert "'.env'" in told[0]


# --- hostile text ---------------------------------------------------------------------------------


def test_patterns_repeat_nothing_without_a_bound():
    """So a search takes time in proportion to the text."""
    for pattern in farm_secrets.PATTERNS:
        plain = re.sub(rb"\\.", b"", pattern.pattern)
        plain = re.sub(rb"\[[^\]]*\]", b"", plain)
        assert not re.search(rb"[*+]|\{\d*,\}", plain), pattern.pattern


@pytest.mark.parametrize(
    "text",
    [
        *("redis://", "redis://a:", "SECRET_ACCESS_KEY", "SECRET_ACCESS_KEY" + " " * 31),
        *("SECRET_ACCESS_KEY" + "\\" * 9, "SECRET_ACCESS_KEY=" + "a" * 70, "0123456789abcdef"),
        *('="', "-----BEGIN ", "PRIVATE KEY-----", " ", "\\", "requirepass "),
    ],
)
def test_hostile_text_of_full_length_is_read(text):
    """A pattern that repeats without a bound would not end here."""
    for end in ("", "@", "=", "\n"):
        data = ((text + end).encode() * 2**16)[: 2**16]
        why_secret(data, frozenset())
