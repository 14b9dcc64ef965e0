"""S14: objects that hold a secret hide it when they are printed or logged."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.keys import key_folder, of_scheduler
from tunemq_scheduler.farm.scheduler_service import ServeArguments
from tunemq_scheduler.farm.service.supervisor import FarmConfig
from tunemq_scheduler.security.doctor.examination import DoctorTarget
from tunemq_shared.broker.redis_address import parse_address
from tunemq_shared.objects.s3_address import find_keys
from tunemq_shared.signing.key_files import read_key_file
from tunemq_shared.signing.message_signing import SigningKey

pytestmark = pytest.mark.security

ROOT = Path(__file__).parents[2]
SECRET = "4fda7c91e2secret"
URL = f"rediss://ada:{SECRET}@10.0.0.1:6379/0"
_FIELD = re.compile(r"(url|password|token|secrets?|secret_key)")
#: By name, the same in places where it is no secret.
HARMLESS = {
    "LeaseHolder.token",  # identifies a process
}


HOLDERS: dict[str, Any] = {
    "ServeArguments": ServeArguments(url=URL),
    "FarmConfig": FarmConfig(url=URL, address="rediss://10.0.0.1:6379/0", results="/r", store="/r"),
    "DoctorTarget": DoctorTarget(
        url=URL, keys="", store="", results="", results_if_unknown="", environ={"A": SECRET}
    ),
    "RedisAddress": parse_address(URL),
    "S3Credentials": find_keys({"AWS_ACCESS_KEY_ID": "ada", "AWS_SECRET_ACCESS_KEY": SECRET}),
    "SigningKey": SigningKey(b"01234567", SECRET.encode()),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_s14_representation_of_an_object_with_a_secret_hides_it(name: str) -> None:
    shown = f"{HOLDERS[name]!r} {HOLDERS[name]} {[HOLDERS[name]]}"
    assert SECRET not in shown
    assert type(HOLDERS[name]).__name__ in shown


def test_s14_representation_of_farm_keys_hides_them(tmp_path: Path) -> None:
    folder = key_folder(tmp_path / "keys", "ada")
    path = folder.path / "scheduler.toml"
    live, found = of_scheduler(folder), read_key_file(path)
    shown = f"{live!r} {live.orders!r} {live.orders._ring!r} {found!r} {vars(live)!r}"
    secrets = re.findall(r'= "([\w+/=]+)"', path.read_text())
    assert len(secrets) >= 3
    for key in (*found.orders, *found.events, *found.submitters["ada"]):
        assert repr(key.secret)[2:-1] not in shown
        assert key.id.hex() in shown
    assert not [one for one in secrets if one in shown]


def test_s14_every_class_with_a_secret_is_listed() -> None:
    """A struct that gets such a field needs a safe representation and an entry in the list."""
    found = set()
    for folder in ("shared", "scheduler", "workers"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and _shows_fields(node):
                    found |= {f"{node.name}.{name}" for name in _fields(node)}
    assert found == HARMLESS


def _fields(node: ast.ClassDef) -> list[str]:
    return [
        one.target.id
        for one in node.body
        if isinstance(one, ast.AnnAssign)
        and isinstance(one.target, ast.Name)
        and _FIELD.fullmatch(one.target.id)
    ]


def _shows_fields(node: ast.ClassDef) -> bool:
    """Whether its kind of class shows all fields, without its own representation."""
    kinds = ast.unparse(ast.Tuple([*node.bases, *node.decorator_list], ast.Load()))
    is_shown = re.search(r"Struct|NamedTuple|dataclass", kinds) is not None
    own = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
    return is_shown and "__repr__" not in own
