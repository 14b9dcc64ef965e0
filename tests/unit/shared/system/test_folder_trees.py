"""Walking and removing folders of other users, at any depth."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tracemalloc

import pytest

from tunemq_shared.system import folder_trees
from tunemq_shared.system.folder_trees import entries, remove_tree, statuses, walk

DEPTH = 3_000


@pytest.fixture
def make_deep(request):
    """Create nested folders, deeper than the longest path, in a separate process.

    The fixture removes them even if the test fails: pytest cannot.
    """

    def make(path, depth=DEPTH):
        path.mkdir(exist_ok=True)
        request.addfinalizer(lambda: subprocess.run(["rm", "-rf", str(path)], check=True))
        code = (
            "import os, sys; os.chdir(sys.argv[1])\n"
            "for n in range(int(sys.argv[2])):\n"
            "    os.mkdir('d'); open('file', 'w').close(); os.chdir('d')\n"
        )
        subprocess.run([sys.executable, "-c", code, str(path), str(depth)], check=True)
        return path

    return make


@pytest.mark.parametrize("depth", [0, 1, 900, 1_100, DEPTH])
def test_deep_folders_are_removed(depth, tmp_path, make_deep):
    top = make_deep(tmp_path / "top", depth)
    (top / "more").mkdir()
    (top / "more" / "and more").mkdir()
    (top / "link").symlink_to(tmp_path)

    remove_tree(top)

    assert os.listdir(tmp_path) == []


def test_remove_tree_of_a_folder_that_a_live_process_deepens_ends(tmp_path):
    """A trial keeps a deep folder open and adds a level for each one that is removed."""
    top = tmp_path / "top"
    top.mkdir()
    at = os.open(top, os.O_RDONLY)
    levels = []

    def deepen():
        nonlocal at
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        levels.append(at)
        at = below

    def listdir(fd):
        """List a folder of `remove_tree`; meanwhile the trial adds a level at the bottom."""
        deepen()
        if len(levels) > 100:
            os.close(levels.pop(0))
        return os.listdir(fd)

    for _ in range(50):
        deepen()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_trees, "MAX_DEPTH", 500)
        patch.setattr(folder_trees, "names_in", listdir)
        remove_tree(top)

    assert top.exists()
    for fd in (at, *levels):
        os.close(fd)
    remove_tree(top)
    assert os.listdir(tmp_path) == []


def test_remove_tree_of_many_names_needs_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_trees, "MAX_NAMES", 100)
    for folder in (tmp_path / "top", tmp_path / "top" / "inner" / "deep"):
        folder.mkdir(parents=True)
        (folder / "0").touch()
        for number in range(1, 3_000):
            os.link(folder / "0", folder / f"{number:0250}")
    tracemalloc.start()
    try:
        remove_tree(tmp_path / "top")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert os.listdir(tmp_path) == []
    assert peak < 2**18


def test_folders_without_rights_are_removed_and_links_are_not_followed(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("stays")
    inner = tmp_path / "top" / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "file").write_text("")
    (inner / "link").symlink_to(other)
    (inner.parent / "folder link").symlink_to(other)
    for folder in (inner, inner.parent, tmp_path / "top"):
        folder.chmod(0)

    remove_tree(tmp_path / "top")

    assert os.listdir(tmp_path) == ["other"]
    assert os.listdir(other) == ["file"]


def test_missing_path_and_path_that_is_no_folder_are_left_alone(tmp_path):
    remove_tree(tmp_path / "gone")
    (tmp_path / "file").write_text("")
    remove_tree(tmp_path / "file")
    assert os.listdir(tmp_path) == ["file"]


def test_walk_equals_os_walk(tmp_path):
    for name in ("b/c", "a", "b/d/e"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "b")

    ours = {path: (sorted(folders), sorted(names)) for path, folders, names in walk(tmp_path)}
    theirs = {path: (sorted(dirs), sorted(names)) for path, dirs, names in os.walk(tmp_path)}

    # os.walk lists a link to a folder as a folder, and does not follow it.
    theirs[str(tmp_path)] = (["a", "b"], ["link"])
    assert ours == theirs
    assert list(walk(tmp_path / "gone")) == []


def test_entries_are_all_below_except_in_folders_that_are_left_out(tmp_path):
    for name in ("a/b", "a/left out/c", "left out"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    found = entries(tmp_path, lambda _, name: name == "left out")
    names = [os.path.relpath(os.path.join(path, entry.name), tmp_path) for path, entry in found]
    assert sorted(names) == ["a", "a/b", "a/b/file", "a/left out", "left out", "link"]


def test_walk_of_deep_folders_ends(tmp_path, make_deep):
    paths = [path for path, _, _ in walk(make_deep(tmp_path / "top"))]
    assert 1_000 < len(paths) < DEPTH
    remove_tree(tmp_path / "top")


def test_walk_of_a_link_to_a_folder_yields_nothing(tmp_path):
    (tmp_path / "other" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "other")
    assert list(walk(tmp_path / "link")) == []
    assert [one.st_ino for one in statuses(tmp_path / "link")] == [
        os.lstat(tmp_path / "link").st_ino
    ]


def test_statuses_are_those_of_all_files_and_folders(tmp_path):
    (tmp_path / "top" / "a" / "b").mkdir(parents=True)
    (tmp_path / "top" / "a" / "file").write_text("12345")
    (tmp_path / "top" / "link").symlink_to(tmp_path)
    names = ("top", "top/a", "top/a/b", "top/a/file", "top/link")
    expected = {os.lstat(tmp_path / name).st_ino for name in names}
    assert {one.st_ino for one in statuses(tmp_path / "top")} == expected
    assert list(statuses(tmp_path / "gone")) == []


@pytest.mark.parametrize("bound", [{"until": 0.0}, {"most": 2}])
def test_statuses_of_too_many_files_end_with_an_error(tmp_path, bound):
    for name in "abc":
        (tmp_path / name).touch()
    with pytest.raises(TimeoutError, match="too many files"):
        list(statuses(tmp_path, **bound))
    assert len(list(statuses(tmp_path, time.monotonic() + 60, 3))) == 4
