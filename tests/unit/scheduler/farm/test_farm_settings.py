"""The settings file for sharing a farm."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import msgspec
import pytest

from tunemq_scheduler.cli.scheduler_command import add_parser
from tunemq_scheduler.farm.farm_settings import FarmSettings, read_settings
from tunemq_shared.base.errors import ConfigError

PAGE = Path(__file__).parents[4] / "docs" / "farm.md"


def test_without_a_file_all_owners_are_equal() -> None:
    assert read_settings(None) == FarmSettings()
    assert read_settings(None).shares == {}


def test_help_of_the_scheduler_names_each_setting() -> None:
    groups = argparse.ArgumentParser().add_subparsers()
    add_parser(groups)
    shown = groups.choices["scheduler"].format_help().partition("--settings FILE")[2]
    for field in msgspec.structs.fields(FarmSettings):
        assert re.search(rf"\b{field.name}\b", shown), field.name


def test_example_of_the_page_is_valid(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    path = tmp_path / "farm.toml"
    path.write_text(block)
    settings = read_settings(str(path))
    assert settings.shares == {"ada": 2}
    assert settings.quotas == {"ben": {"gpu": 4}}
    assert settings.preempt_grace_s == settings.preempt_grace_s == 60


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_running = 0", "max_running=0 must be 1 or more"),
        ("max_runing = 3", "unknown field `max_runing`. Valid names: shares, quotas, preempts, "),
        ("preempt_grace_s = -1", "preempt_grace_s=-1.0 must be 0 or more"),
        ("[shares]\nada = 0", "shares.ada=0.0 must be a number above 0"),
        ("[quotas.ben]\ngpu = -1", "quotas.ben.gpu=-1.0 must be a number of 0 or more"),
        ("[quotas.ben]\ngpus = 4", "quotas.ben.gpus is invalid: use 'gpu'"),
        ("[quotas.ben]\nCPU = 4", "quotas.ben.CPU is invalid: use 'cpu'"),
        ("[quotas]\nben = 3", "quotas"),
        ("max_running = ", "invalid"),
    ],
)
def test_invalid_setting_is_named_with_the_file(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "farm.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)) as rejected:
        read_settings(str(path))
    assert str(path) in str(rejected.value)


FARM = "s3://tunemq/farm?endpoint=https://minio:9000"
MINE = "s3://mine/x?endpoint=https://other:9000"


def test_settings_store_is_allowed_to_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "farm.toml"
    path.write_text(
        f'stores = ["{FARM.replace("/farm", "/other")}",'
        f' {{address = "{MINE}&profile=ada", owners = ["ada", "b.c"]}}]'
    )
    settings = read_settings(str(path), FARM)
    (other,) = settings.stores_of("ben")
    assert other.startswith("s3://tunemq/other?endpoint=https://minio:9000&")
    assert settings.stores_of("ada") == settings.stores_of("b.c")
    assert settings.stores_of("ada")[0] == other
    assert settings.stores_of("ada")[1].startswith("s3://mine/x?")


@pytest.mark.parametrize(
    ("stores", "said"),
    [
        (f'"{MINE}"', "stores has 's3://mine/x', which has no profile"),
        (f'{{address = "{MINE}"}}', "add profile=NAME, and write the keys for it as [NAME]"),
        (f'"{MINE}&profile=default"', "must be the name of a profile"),
        ('"http://other:7380/x"', "is not the address of a store; write"),
        ('"/srv/other"', "is not the address of a store; write"),
        (f'{{address = "{MINE}&profile=a", owners = []}}', "owners=[] of 's3://mine/x' must be"),
        (f'{{address = "{MINE}&profile=a", owners = ["/"]}}', "owners=['/'] of 's3://mine/x'"),
        (f'{{address = "{MINE}&profile=a", owner = ["ada"]}}', "`owner`"),
        ("3", "invalid"),
    ],
)
def test_settings_store_that_would_get_the_farms_keys_is_rejected_with_the_fix(
    tmp_path: Path, stores: str, said: str
) -> None:
    path = tmp_path / "farm.toml"
    path.write_text(f"stores = [{stores}]")
    with pytest.raises(ConfigError, match=re.escape(said)) as rejected:
        read_settings(str(path), FARM)
    assert str(path) in str(rejected.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read: No such file"):
        read_settings(str(tmp_path / "nowhere.toml"))
