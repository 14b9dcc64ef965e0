"""The folders of a worker with ``--trial-user``: no other user makes root's node work elsewhere."""

from __future__ import annotations

import os
import stat
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.other_users import NOBODY as OTHER
from tunemq_shared.base.errors import ConfigError
from tunemq_workers.node import node_process, trial_user_folders
from tunemq_workers.node.protected_folders import could_replace, make_folder
from tunemq_workers.node.trial_user_folders import claim_workdir, give_folders
from tunemq_workers.system.trial_user import UserAccount

ACCOUNT = UserAccount("trials", OTHER, OTHER, (OTHER,), "/")

Give = Callable[[Path | None], str | None]


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Give:
    """Give the folders of a worker in ``node`` to trials' user, with a cache of this path."""
    if os.geteuid() != 0:
        pytest.skip("only root can give folders away")
    monkeypatch.setattr(trial_user_folders, "_check", lambda account, folders: None)

    def given(cache: Path | None) -> str | None:
        (tmp_path / "node").mkdir(exist_ok=True)
        claim_workdir(ACCOUNT, str(tmp_path / "node"), ["blobs"])
        return give_folders(
            ACCOUNT, str(tmp_path / "node"), ["blobs"], None if cache is None else str(cache)
        )

    return given


def owner_and_mode(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_uid, stat.S_IMODE(status.st_mode)


@pytest.mark.parametrize("why", ["owner", "mode"])
def test_cache_that_another_user_could_replace_is_refused(
    tmp_path: Path, give: Give, why: str
) -> None:
    """That user could put a link in its place, and root would give the link's target away."""
    above = tmp_path / "above"
    above.mkdir()
    if why == "owner":
        os.chown(above, OTHER, OTHER)
        problem = f"{above} belongs to user {OTHER}, who could make root write elsewhere"
    else:
        above.chmod(0o777)
        problem = f"others may write to {above}, who could.* is 0777: run chmod go-w {above}"
    with pytest.raises(ConfigError, match=f"{problem}.* a(nother)? --cache"):
        give(above / "made" / "cache")
    assert list(above.iterdir()) == []


def test_cache_of_a_user_other_than_that_of_trials_is_refused(tmp_path: Path, give: Give) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    os.chown(cache, OTHER - 1, OTHER - 1)
    with pytest.raises(ConfigError, match=f"{cache} belongs to user {OTHER - 1}, who could"):
        give(cache)


def test_cache_in_a_folder_like_tmp_is_made_and_used_again(tmp_path: Path, give: Give) -> None:
    """There users can replace only their own entries."""
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(0o1777)
    for _ in range(2):
        assert give(above / "cache") == str(above / "cache")
        assert owner_and_mode(above / "cache") == (OTHER, 0o700)


@pytest.mark.parametrize("place", ["above", "cache"])
def test_link_of_another_user_is_not_followed(tmp_path: Path, give: Give, place: str) -> None:
    """In a folder like /tmp each user may make links."""
    inner = tmp_path / "scratch" / "inner"
    inner.mkdir(parents=True)
    tmp_path.chmod(0o1777)
    link = tmp_path / place
    link.symlink_to("scratch")
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(ConfigError, match=f"{link} is a link of user {OTHER}, who could.*--cache"):
        give(link / "cache" if place == "above" else link)
    assert list((tmp_path / "scratch").iterdir()) == [inner]
    assert inner.parent.stat().st_uid == 0


def test_folders_above_the_cache_are_open_to_trials_whatever_the_umask_is(
    tmp_path: Path, give: Give
) -> None:
    before = os.umask(0o077)
    try:
        give(tmp_path / "a" / "b" / "cache")
    finally:
        os.umask(before)
    assert owner_and_mode(tmp_path / "a") == owner_and_mode(tmp_path / "a" / "b") == (0, 0o755)
    assert owner_and_mode(tmp_path / "a" / "b" / "cache") == (OTHER, 0o700)


def test_own_links_lead_where_the_system_would_follow_them(tmp_path: Path) -> None:
    real = tmp_path / "real" / "deep"
    real.mkdir(parents=True)
    (tmp_path / "absolute").symlink_to(real)
    (real / "up").symlink_to("../../absolute/..")
    (tmp_path / "dangling").symlink_to("absolute/made")
    assert make_folder(f"{tmp_path}/absolute/up/deep/new", "--cache") == f"{real}/new"
    assert make_folder(f"{tmp_path}/dangling", "--cache") == f"{real}/made"
    assert sorted(one.name for one in real.iterdir()) == ["made", "new", "up"]


def test_path_that_leads_to_no_folder_is_an_error_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for name, problem in [("file", NotADirectoryError), ("loop", OSError)]:
        with pytest.raises(problem) as raised:
            make_folder(f"{tmp_path}/{name}/cache", "--cache")
        assert raised.value.filename == f"{tmp_path}/{name}"


def test_workdir_that_cannot_be_made_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for account in (None, ACCOUNT):
        options = Namespace(workdir=f"{tmp_path}/file/node", farm=True, cache=None)
        with pytest.raises(ConfigError, match=f"{tmp_path}/file.*: Not a directory"):
            node_process._prepare_workdir(options, account)


def test_logs_of_another_user_are_replaced(tmp_path: Path, give: Give) -> None:
    """Trials of a worker that ran as that user may have them open, or have linked other files."""
    logs = tmp_path / "node" / "logs"
    logs.mkdir(parents=True)
    for name in ("node.log", "consumer.log", "transfers.log"):
        (logs / name).touch()
    os.chown(logs / "node.log", OTHER, OTHER)
    os.link(logs / "consumer.log", tmp_path / "precious")
    os.chown(logs, OTHER, OTHER)
    logs.chmod(0o777)
    give(None)
    assert owner_and_mode(logs) == (0, 0o700)
    assert [one.name for one in logs.iterdir()] == ["transfers.log"]
    assert (tmp_path / "precious").exists()


def test_logs_are_private_before_planted_links_are_removed(
    tmp_path: Path, give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a trial could plant another one behind the search for them."""
    logs = tmp_path / "node" / "logs"
    logs.mkdir(parents=True)
    (logs / "node.log").symlink_to(tmp_path / "precious")
    os.chown(logs, OTHER, OTHER)
    logs.chmod(0o777)
    seen, scandir = [], os.scandir

    def look(folder: int) -> Iterator[os.DirEntry[str]]:
        seen.append(owner_and_mode(logs))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", look)
    give(None)
    assert seen == [(0, 0o700)]
    assert not (logs / "node.log").is_symlink()


_GROUP = 65_000


@pytest.mark.parametrize(
    ("mode", "owner", "group", "socket", "file"),
    [
        (0o755, 0, 0, False, False),
        (0o775, 0, 0, False, False),
        (0o775, 0, OTHER, True, True),
        (0o775, 0, _GROUP, True, True),
        (0o757, 0, _GROUP, False, False),  # the rights of its group, not those of others
        (0o755, OTHER, 0, True, True),
        (0o555, OTHER, 0, True, True),
        (0o777, 0, 0, True, True),
        (0o1777, 0, 0, True, False),  # like /tmp: a socket goes when its server restarts
    ],
)
def test_user_who_may_change_a_folder_could_replace_its_files(
    tmp_path: Path, mode: int, owner: int, group: int, socket: bool, file: bool
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give folders away")
    account = ACCOUNT._replace(groups=(OTHER, _GROUP))
    folder, outer, link = tmp_path / "folder", tmp_path / "outer", tmp_path / "link"
    folder.mkdir()
    (outer / "inner").mkdir(parents=True)
    link.symlink_to("folder/../folder")
    for one in (folder, outer):
        os.chown(one, owner, group)
        one.chmod(mode)
    for place in (folder, outer / "inner"):
        (place / "file").touch(mode=0o644)
    for path in (folder / "file", link / "file"):
        assert could_replace(str(path), account, is_made_again=True) is socket
        assert could_replace(str(path), account) is file
    assert could_replace(str(outer / "inner" / "file"), account, is_made_again=True) is file


def test_file_that_a_user_may_write_could_be_replaced_and_a_missing_one_not(tmp_path: Path) -> None:
    account = ACCOUNT._replace(uid=OTHER, gid=OTHER, groups=(OTHER,))
    file = tmp_path / "ca.crt"
    file.touch()
    file.chmod(0o666)
    assert could_replace(str(file), account)
    file.chmod(0o644)
    assert not could_replace(str(file), account)
    assert not could_replace(str(tmp_path / "missing"), account)
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    assert could_replace(str(loop), account)
