"""What a farm's scheduler reads in the folders of experiments that have no process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunemq_scheduler.farm.service.experiment_files import ResultsFolders
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_shared.base.errors import ConfigError, RequestRejected


@pytest.fixture
def folders(tmp_path: Path) -> ResultsFolders:
    """The folders of an experiment with a journal that cannot be read, and of one without any."""
    (tmp_path / "odd" / FILE_NAME).mkdir(parents=True)
    (tmp_path / "never").mkdir()
    return ResultsFolders(tmp_path, tmp_path / "trash", str(tmp_path))


def test_trial_of_an_experiment_without_a_journal_is_not_explained(folders: ResultsFolders) -> None:
    assert folders.explain("never", "aaaaa_00000") is None


def test_trial_that_would_be_an_option_of_a_command_is_refused(folders: ResultsFolders) -> None:
    with pytest.raises(ConfigError, match="no trial --help"):
        folders.explain("odd", "--help")


def test_journal_that_cannot_be_read_is_named_and_others_are_read_later(
    folders: ResultsFolders,
) -> None:
    told = [folders.explain("odd", "aaaaa_00000") for _ in range(4)]
    with pytest.raises(RequestRejected, match="repeat the command"):
        folders.explain("odd", "aaaaa_00000")
    for one in told:
        assert one is not None
        assert "does not exist" in str(one.exception(timeout=60))
    assert folders.explain("odd", "aaaaa_00000") is not None
