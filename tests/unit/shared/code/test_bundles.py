"""Bundles of a script's folder: their files, their reproducibility, and rejected bundles."""

from __future__ import annotations

import os
import stat
import struct
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from tunemq_shared.base.errors import BlobCorrupt, ConfigError, StoreError
from tunemq_shared.code import bundle_rules, bundles
from tunemq_shared.code.blob_store import FolderBlobStore
from tunemq_shared.code.bundles import bundle, remove, unpack, unpacked


@pytest.fixture
def blobs(tmp_path: Path) -> FolderBlobStore:
    return FolderBlobStore(str(tmp_path / "store"))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A typical project: code, data and other files."""
    root = tmp_path / "project"
    for name, text in {
        "train.py": "import models.net\nimport helper\n",
        "helper.py": "VALUE = 1\n",
        "models/__init__.py": "",
        "models/net.py": "SIZE = 3\n",
        "models/__pycache__/net.cpython-311.pyc": "x",
        "run.sh": "#!/bin/sh\n",
        "data.bin": "d",
        ".git/config": "x",
        ".venv/bin/python": "x",
        "env311/bin/python": "x",
        "env311/pyvenv.cfg": "x",
        "node_modules/a/index.js": "x",
        "tunemq_results/exp/stdout": "x",
        "old.pyc": "x",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "run.sh").chmod(0o755)
    return root


def files_in(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def take(project: Path, blobs: FolderBlobStore, tmp_path: Path) -> set[str]:
    return files_in(unpacked(bundle(project, blobs), tmp_path / "code"))


CODE = {"train.py", "helper.py", "models/__init__.py", "models/net.py", "run.sh"}


def test_bundle_of_a_folder_omits_files_that_are_no_code(blobs, project, tmp_path):
    ref = bundle(project, blobs)
    folder = unpacked(ref, tmp_path / "code")
    assert folder == tmp_path / "code" / ref.sha256
    assert files_in(folder) == CODE | {"data.bin"}
    assert (folder / "models/net.py").read_text() == "SIZE = 3\n"


def test_keys_of_a_home_folder_stay_there_unless_they_are_included(blobs, project, tmp_path):
    keys = {
        *(".ssh/id_ed25519", ".aws/credentials", ".config/gh/hosts.yml", ".gnupg/key"),
        *(".kube/config", ".docker/config.json", ".netrc", ".pgpass"),
    }
    for name in keys:
        (project / name).parent.mkdir(exist_ok=True, parents=True)
        (project / name).write_text("secret")
    assert not keys & take(project, blobs, tmp_path)
    (project / ".tunemqignore").write_text("!.config/\n!.netrc\n")
    found = take(project, blobs, tmp_path / "again")
    assert keys & found == {".config/gh/hosts.yml", ".netrc"}


def test_script_is_bundled_alone(blobs, project, tmp_path):
    assert take(project / "train.py", blobs, tmp_path) == {"train.py"}


def test_same_files_make_the_same_bundle_in_any_place(blobs, project, tmp_path):
    ref = bundle(project, blobs)
    other = tmp_path / "elsewhere"
    subprocess.run(["cp", "-r", project, other], check=True)
    os.utime(other / "train.py", (1, 1))
    (other / "helper.py").chmod(0o600)
    assert bundle(other, blobs) == ref
    (other / "helper.py").write_text("VALUE = 2\n")
    assert bundle(other, blobs) != ref


@pytest.mark.parametrize("kind", ["fifo", "nothing", "folder"])
def test_bundle_that_is_no_file_is_corrupt(blobs, project, tmp_path, kind):
    ref = bundle(project, blobs)
    Path(ref.path).unlink()
    make = {"fifo": os.mkfifo, "folder": os.mkdir}.get(kind)
    if make is not None:
        make(ref.path)
    with pytest.raises(BlobCorrupt, match="no regular file"):
        unpacked(ref, tmp_path / "code")


def test_bundle_in_a_store_that_is_not_mounted_is_not_corrupt(blobs, project, tmp_path):
    ref = bundle(project, blobs)
    Path(ref.path).parent.rename(tmp_path / "away")
    with pytest.raises(StoreError) as error:
        unpacked(ref, tmp_path / "code")
    assert not isinstance(error.value, BlobCorrupt)


def test_unpacked_files_are_read_only_and_programs_stay_executable(blobs, project, tmp_path):
    folder = unpacked(bundle(project, blobs), tmp_path / "code")
    for path in (folder, *folder.rglob("*")):
        is_for_compiled = path.name == "__pycache__"
        assert path.stat().st_mode & 0o222 == (0o200 if is_for_compiled else 0), path
    assert os.access(folder / "run.sh", os.X_OK)
    assert not folder.joinpath("train.py").stat().st_mode & stat.S_IXUSR


def test_modules_are_compiled_by_the_process_that_imports_them_first(blobs, project, tmp_path):
    """Not while unpacking, which foreign modules could make last for hours."""
    folder = unpacked(bundle(project, blobs), tmp_path / "code")
    assert not [*folder.rglob("__pycache__/*")]
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-c", "import train, models.net"],
            env={"PYTHONPATH": str(folder)},
            check=True,
        )
        compiled = {path.name.partition(".")[0] for path in folder.rglob("__pycache__/*")}
        assert {"train", "net"} <= compiled


def test_ignored_files_stay_out_and_a_negated_pattern_includes_them(blobs, project, tmp_path):
    (project / ".tunemqignore").write_text("*.bin\n/models/\n!node_modules/\n# no rule\n")
    assert take(project, blobs, tmp_path) == {
        *{"train.py", "helper.py", "run.sh", ".tunemqignore"},
        "node_modules/a/index.js",
    }


def test_gitignore_counts_where_there_is_no_tunemqignore(blobs, project, tmp_path):
    (project / ".gitignore").write_text("*.bin\n")
    assert take(project, blobs, tmp_path) == CODE | {".gitignore"}
    (project / ".tunemqignore").write_text("helper.py\n")
    found = take(project, blobs, tmp_path / "again")
    assert "data.bin" in found
    assert "helper.py" not in found


def test_ignore_file_in_a_folder_counts_below_it_and_overrides_those_above(
    blobs, project, tmp_path
):
    (project / ".gitignore").write_text("*.bin\nsecret\n")
    (project / "models/weights.bin").write_text("w")
    (project / "models/secret").write_text("s")
    (project / "models/.gitignore").write_text("!*.bin\n/net.py\n")
    found = take(project, blobs, tmp_path)
    assert "models/weights.bin" in found
    assert not {"data.bin", "models/net.py", "models/secret"} & found


@pytest.fixture
def inner(project: Path) -> Path:
    """A folder of a repository."""
    folder = project / "models" / "exp"
    for name in ("a.py", "a.bin", "b.yaml", "out/c.bin"):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text("x")
    return folder


INNER = {"a.py", "a.bin", "b.yaml", "out/c.bin"}


def test_ignore_files_above_a_folder_of_a_repository_count(blobs, inner, project, tmp_path):
    (project / ".gitignore").write_text("b.yaml\n/a.py\n/models/exp/out/\n")
    (project / "models" / ".tunemqignore").write_text("/exp/a.bin\n")
    (project / "models" / ".gitignore").write_text("*\n")
    (tmp_path / ".gitignore").write_text("*.py\n")
    assert take(inner, blobs, tmp_path) == {"a.py"}
    link = tmp_path / "link"
    link.symlink_to(inner)
    assert take(link, blobs, tmp_path / "again") == {"a.py"}


@pytest.mark.parametrize("is_worktree", [False, True])
def test_repository_within_another_ends_the_rules_above(
    blobs, inner, project, tmp_path, is_worktree
):
    (project / ".gitignore").write_text("*.yaml\n")
    git = inner / ".git"
    git.write_text("gitdir: x\n") if is_worktree else git.mkdir()
    assert take(inner, blobs, tmp_path) - {".git"} == INNER


def test_ignore_files_above_do_not_count_outside_of_a_repository(blobs, inner, project, tmp_path):
    (project / ".git" / "config").unlink()
    (project / ".git").rmdir()
    (project / ".gitignore").write_text("*\n")
    assert take(inner, blobs, tmp_path) == INNER


def test_ignore_files_above_include_nothing(blobs, inner, project, tmp_path):
    for name in (".env", ".netrc"):
        (inner / name).write_text("x")
    (project / ".gitignore").write_text("b.yaml\n!.env\n!.netrc\n!b.yaml\n!/models/exp/.env\n")
    assert take(inner, blobs, tmp_path) == INNER


def test_ignore_file_of_the_folder_overrides_those_above(blobs, inner, project, tmp_path):
    (project / ".gitignore").write_text("*.bin\nb.yaml\n")
    (inner / ".tunemqignore").write_text("!out/*.bin\n")
    assert take(inner, blobs, tmp_path) == {"a.py", "out/c.bin", ".tunemqignore"}


@pytest.mark.parametrize(
    "lines",
    ["exp/", "/models/", "models/exp/*\n!models/exp/a.py", "**/exp/**", "/*\n!/train.py", "*"],
)
def test_lines_above_that_exclude_the_folder_itself_do_not_count(
    blobs, inner, project, tmp_path, lines
):
    (project / ".gitignore").write_text(f"{lines}\n*.yaml\n")
    assert take(inner, blobs, tmp_path) == INNER - {"b.yaml"}


def test_ignore_file_above_that_excludes_all_but_some_names_counts(blobs, inner, project, tmp_path):
    (inner / "out" / "c.py").write_text("x")
    (project / ".gitignore").write_text("*\n!*/\n!*.py\n")
    assert take(inner, blobs, tmp_path) == {"a.py", "out/c.py"}
    (inner / ".gitignore").write_text("*\n!*/\n!*.bin\n")
    assert take(inner, blobs, tmp_path / "again") == {"a.bin", "out/c.bin"}


def test_ignore_file_above_of_another_user_does_not_count(
    blobs, inner, project, tmp_path, monkeypatch
):
    """Else that user could keep files out, or put an empty file in place of a `.gitignore`."""
    other = project / ".tunemqignore"
    other.write_text("b.yaml\n")
    (project / ".gitignore").write_text("a.bin\n")
    (project / "models" / ".gitignore").symlink_to(inner / "rules")  # another user may link, too
    (inner / "rules").write_text("a.py\n")
    assert take(inner, blobs, tmp_path) == {*INNER, "rules"} - {"b.yaml"}

    real = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        found = real(path)
        owner = os.geteuid() + 1 if path.samefile(other) else found.st_uid
        return os.stat_result((*found[:4], owner, *found[5:10]))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "lstat", lstat)
        ref = bundle(inner, blobs)
    assert files_in(unpacked(ref, tmp_path / "again")) == {*INNER, "rules"} - {"a.bin"}


def test_unreadable_ignore_file_above_is_named(blobs, inner, project):
    (project / ".gitignore").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ConfigError, match=r"project/\.gitignore cannot be understood"):
        bundle(inner, blobs)


def test_unreadable_ignore_file_is_named(blobs, project):
    (project / ".tunemqignore").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ConfigError, match=r"project/\.tunemqignore cannot be understood"):
        bundle(project, blobs)


def test_bundle_that_is_too_large_is_rejected_with_the_largest_files(blobs, project):
    (project / "data.bin").write_bytes(bytes(3 * 2**20))
    with pytest.raises(ConfigError) as rejected:
        bundle(project, blobs, limit_bytes=2**20)
    text = str(rejected.value)
    assert text.startswith(f"{project} has 3 MiB, and a code package may have 1 MiB. The ")
    assert "The largest: data.bin (3 MiB), train.py (" in text
    assert f"List files that are no code in {project}/.tunemqignore" in text
    assert not list(project.parent.glob("store/**/*")), "nothing is kept"


def test_too_many_files_are_rejected(blobs, project, monkeypatch):
    monkeypatch.setattr(bundle_rules, "MAX_FILES", 3)
    with pytest.raises(ConfigError, match=r"has more than 3 files.*\.tunemqignore"):
        bundle(project, blobs)


def test_missing_or_empty_folder_is_rejected(blobs, tmp_path):
    with pytest.raises(ConfigError, match=r"no script and no folder .*/nowhere"):
        bundle(tmp_path / "nowhere", blobs)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no file that could travel"):
        bundle(tmp_path / "empty", blobs)


def test_links_inside_the_folder_are_followed(blobs, project, tmp_path):
    (project / "alias.py").symlink_to("helper.py")
    (project / "nets").symlink_to("models")
    (project / "models/up").symlink_to("..")
    found = take(project, blobs, tmp_path)
    assert {"alias.py", "nets/net.py"} <= found
    assert not {name for name in found if "/up/" in name}, "a loop of links is not followed"


@pytest.mark.parametrize(
    ("target", "why"), [("/etc/passwd", "does not travel"), ("no", "not there")]
)
def test_links_out_of_the_folder_or_to_nothing_are_rejected(blobs, project, target, why):
    (project / "link").symlink_to(target)
    with pytest.raises(ConfigError, match=f"{project}/link is a link to .*{why}"):
        bundle(project, blobs)
    (project / ".tunemqignore").write_text("link\n")
    bundle(project, blobs)


def test_two_processes_that_unpack_a_bundle_at_once_have_one_folder(blobs, project, tmp_path):
    ref = bundle(project, blobs)
    threads = [threading.Thread(target=unpacked, args=(ref, tmp_path / "code")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert os.listdir(tmp_path / "code") == [ref.sha256]


@pytest.mark.parametrize("put_there", [Path.touch, lambda path: path.symlink_to("nowhere")])
def test_file_or_link_in_place_of_a_bundle_is_replaced(blobs, project, tmp_path, put_there):
    ref = bundle(project, blobs)
    (tmp_path / "code").mkdir()
    put_there(tmp_path / "code" / ref.sha256)
    folder = unpacked(ref, tmp_path / "code")
    assert folder.is_dir()
    assert not folder.is_symlink()


def test_unpacked_bundle_can_be_removed(blobs, project, tmp_path):
    folder = unpacked(bundle(project, blobs), tmp_path / "code")
    remove(folder)
    assert not folder.exists()
    remove(folder)


def test_damaged_bundle_is_rejected(blobs, project, tmp_path):
    ref = bundle(project, blobs)
    path = Path(ref.path)
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(BlobCorrupt, match="damaged"):
        unpacked(ref, tmp_path / "code")
    assert os.listdir(tmp_path / "code") == []


def test_folder_that_cannot_be_created_is_named(blobs, project, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot be unpacked to .*/file/code/"):
        unpacked(bundle(project, blobs), tmp_path / "file" / "code")


# --- forged bundles -------------------------------------------------------------------------------


def packed(path: Path, *members: tuple[str, bytes], **how: int) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            info = zipfile.ZipInfo(name)
            info.external_attr = how.get("mode", 0o644) << 16
            info.compress_type = how.get("method", zipfile.ZIP_DEFLATED)
            archive.writestr(info, content)
    return path


def reject(archive: Path, tmp_path: Path, match: str) -> None:
    target = tmp_path / "code" / "bundle"
    target.parent.mkdir(exist_ok=True)
    with pytest.raises(BlobCorrupt, match=match):
        unpack(archive, target)
    assert list(target.parent.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize(
    "name", ["/etc/cron.d/x", "../x", "a/../../x", "a//b", "./a", "a/.", "a/", ".", "..", "a\0b"]
)
def test_names_that_lead_elsewhere_are_rejected(tmp_path, name):
    safe = name.replace("\0", "?")
    archive = packed(tmp_path / "zip", ("ok.py", b""), (safe, b"x"))
    if safe != name:
        archive.write_bytes(archive.read_bytes().replace(safe.encode(), name.encode()))
    reject(archive, tmp_path, "has a file with the name")
    assert not (tmp_path / "x").exists()


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_duplicate_name_is_rejected(tmp_path):
    reject(packed(tmp_path / "zip", ("a", b"1"), ("a", b"2")), tmp_path, "'a' twice")


def test_file_inside_a_file_is_rejected(tmp_path):
    reject(packed(tmp_path / "zip", ("a", b"1"), ("a/b", b"2")), tmp_path, "inside of a file")


def test_links_and_devices_become_plain_files(tmp_path):
    for kind in (stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO, stat.S_IFSOCK):
        archive = packed(tmp_path / "zip", ("a", b"/etc/passwd"), mode=kind | 0o6777)
        target = tmp_path / f"code-{kind}"
        unpack(archive, target)
        assert stat.S_ISREG((target / "a").lstat().st_mode)
        assert stat.S_IMODE((target / "a").lstat().st_mode) == 0o500, "no rights of another user"
        assert (target / "a").read_bytes() == b"/etc/passwd"


def test_bundle_beyond_a_limit_is_rejected_before_a_file_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(bundles, "MOST_BYTES", 2**20)
    reject(packed(tmp_path / "zip", ("zeros", bytes(2**20 + 1))), tmp_path, "more than 1 MiB")
    monkeypatch.setattr(bundles, "MAX_FILES", 2)
    many = [(str(number), b"") for number in range(3)]
    reject(packed(tmp_path / "zip", *many), tmp_path, "3 files, more than 2")


def test_file_longer_than_stated_is_rejected(tmp_path):
    archive = packed(tmp_path / "zip", ("zeros", bytes(10**6)))
    size = struct.pack("<L", 10**6)
    archive.write_bytes(archive.read_bytes().replace(size, struct.pack("<L", 10)))
    reject(archive, tmp_path, "no bundle|longer than")


def test_other_compressions_are_rejected(tmp_path):
    archive = packed(tmp_path / "zip", ("a", b"1"), method=zipfile.ZIP_BZIP2)
    reject(archive, tmp_path, "packed as none of ours is")


@pytest.mark.parametrize("content", [b"", b"PK\5\6", b"#!/bin/sh\n", os.urandom(1000)])
def test_file_that_is_no_archive_is_rejected(tmp_path, content):
    (tmp_path / "zip").write_bytes(content)
    reject(tmp_path / "zip", tmp_path, "is no bundle")


def test_damaged_byte_anywhere_causes_only_a_rejection(tmp_path):
    archive = packed(tmp_path / "zip", ("a.py", b"VALUE = 1\n"), ("b/c", b"x" * 100))
    content = archive.read_bytes()
    for at in range(0, len(content), 2):
        archive.write_bytes(content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :])
        target = tmp_path / "code" / str(at)
        target.parent.mkdir(exist_ok=True)
        try:
            unpack(archive, target)
        except BlobCorrupt:
            assert not target.exists()
    assert set(os.listdir(tmp_path)) == {"zip", "code"}
