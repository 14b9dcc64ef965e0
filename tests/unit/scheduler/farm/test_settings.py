"""The file that says how a farm is shared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tunemq_scheduler.farm.settings import FarmSettings, read_settings
from tunemq_shared.errors import ConfigError

PAGE = Path(__file__).parents[4] / "docs" / "farm.md"


def test_without_a_file_all_owners_are_alike() -> None:
    assert read_settings(None) == FarmSettings()
    assert read_settings(None).for_allotter().shares == {}


def test_the_file_of_the_page_can_be_read(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    path = tmp_path / "farm.toml"
    path.write_text(block)
    settings = read_settings(str(path))
    assert settings.shares == {"ada": 2}
    assert settings.quotas == {"ben": {"gpu": 4}}
    assert settings.for_allotter().preempt_grace_s == settings.preempt_grace_s == 60


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_running = 0", "max_running=0 must be 1 or more"),
        ("max_runing = 3", "max_runing"),
        ("preempt_grace_s = -1", "preempt_grace_s=-1.0 must be 0 or more"),
        ("[shares]\nada = 0", "shares.ada=0.0 must be a number above 0"),
        ("[quotas.ben]\ngpu = -1", "quotas.ben.gpu=-1.0 must be a number of 0 or more"),
        ("[quotas]\nben = 3", "quotas"),
        ("max_running = ", "not usable"),
    ],
)
def test_what_is_of_no_use_is_named_with_the_file(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "farm.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        read_settings(str(path))
    assert str(path) in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read: No such file"):
        read_settings(str(tmp_path / "nowhere.toml"))
