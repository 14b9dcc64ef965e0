"""Valid content of a manifest; invalid content is rejected before any use."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.searches.checkpoints import KEY, info
from tunemq_shared.base.errors import CheckpointCorrupt, CheckpointError
from tunemq_shared.base.safe_names import is_safe_name
from tunemq_shared.checkpoints import manifest as module
from tunemq_shared.checkpoints.manifest import (
    MAX_FILES,
    MAX_MANIFEST_VALUES,
    FileEntry,
    Manifest,
    is_object_key,
    make_manifest,
    parse_manifest,
    read_manifest,
)

A, B = hashlib.sha256(b"a").hexdigest(), hashlib.sha256(b"b").hexdigest()
FILES = (FileEntry("model", 1, A), FileEntry("deep/state", 1, B))
OBJECTS = {A: f"{KEY}/{A}", B: f"train_7/checkpoint_3-000002/{B}"}


def changed(**changes: Any) -> bytes:
    content = {**json.loads(make_manifest(info(), FILES, ("hollow",), OBJECTS)), **changes}
    return json.dumps(content).encode()


def test_written_manifest_is_read_unchanged() -> None:
    data = make_manifest(info(state={"a": 1}), FILES, ("hollow",), OBJECTS)
    read = read_manifest(KEY, data, hashlib.sha256(data).hexdigest())
    assert (read.files, read.folders, read.objects) == (FILES, ("hollow",), OBJECTS)
    assert read.state == {"a": 1}
    assert read.size == 2


def test_stores_manifest_is_the_written_one_with_objects() -> None:
    written = make_manifest(info(step=9), FILES, ("hollow",))
    assert b"objects" not in written
    first = parse_manifest(KEY, written)
    second = parse_manifest(KEY, make_manifest(first, first.files, first.folders, OBJECTS))
    assert second.objects == OBJECTS
    assert make_manifest(second, second.files, second.folders) == written


def test_manifest_of_the_previous_version_is_read() -> None:
    content = json.loads(make_manifest(info(), FILES, ()))
    del content["folders"]
    assert parse_manifest(KEY, json.dumps(content).encode()).objects == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": [{"name": "a", "size": -1, "sha256": A}]}, r"'a' has -1 bytes"),
        ({"files": [{"name": "a", "size": 1, "sha256": A.upper()}]}, r"'a' has .* for a SHA-256"),
        ({"files": [{"name": "a", "size": 1, "sha256": A + "\n"}]}, r"'a' has .* for a SHA-256"),
        ({"files": [{"name": "a", "size": 1, "sha256": "../../x"}]}, r"'a' has .* for a SHA-256"),
        ({"files": [{"name": "a", "size": 1.5, "sha256": A}]}, r"is not one"),
        ({"folders": ["model"]}, r"'model' is listed twice"),
        ({"folders": ["model/x"]}, r"'model' is listed as a file, and 'model/x' is below it"),
        ({"objects": {A: f"{KEY}/{A}"}}, r"no object holds the file 'deep/state'"),
        ({"objects": {**OBJECTS, A: f"{KEY}/{B}"}}, r"is not the key of an object"),
        ({"objects": {**OBJECTS, A: f"../{KEY}/{A}"}}, r"is not the key of an object"),
        ({"objects": {**OBJECTS, A: f"../x/{A}"}}, r"is not the key of an object"),
        ({"objects": {**OBJECTS, A: f"/etc/{A}"}}, r"is not the key of an object"),
        ({"objects": {**OBJECTS, A: f".staging/x/{A}"}}, r"is not the key of an object"),
        ({"objects": {**OBJECTS, A: A}}, r"is not the key of an object"),
        ({"objects": {**OBJECTS, "x": f"{KEY}/x"}}, r"is not the key of an object"),
        ({"objects": {**OBJECTS, A: 1}}, r"is not one"),
        ({"objects": []}, r"is not one"),
    ],
)
def test_manifest_that_no_writer_writes_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointCorrupt, match=rf"{KEY}: .*{message}"):
        parse_manifest(KEY, changed(**{"objects": {}, **changes}))


LONG = "x" * 10**6


@pytest.mark.parametrize(
    "changes",
    [
        {"folders": [f"../{LONG}"]},
        {"folders": [LONG]},
        {"folders": ["x/" * 5000 + "x"]},
        {"files": [{"name": LONG, "size": 1, "sha256": A}]},
        {"files": [{"name": "a", "size": 1, "sha256": LONG}]},
        {"objects": {A: LONG}},
        {"objects": {LONG: f"{KEY}/{A}"}},
    ],
)
def test_s15_manifest_with_endless_names_is_rejected_in_few_words(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointCorrupt) as error:
        parse_manifest(KEY, changed(**{"objects": {}, **changes}))
    assert len(str(error.value)) < 1000


def test_more_files_than_the_limit_are_rejected_on_writing_and_reading() -> None:
    files = tuple(FileEntry(str(n), 0, A) for n in range(MAX_FILES + 1))
    with pytest.raises(CheckpointError, match=r"100001 files .* 100000 is the most"):
        make_manifest(info(), files, ())
    many = [{"name": "a", "size": 0, "sha256": ""}] * (MAX_FILES + 1)
    with pytest.raises(CheckpointCorrupt, match="lists 100002 files; 100000 is the most"):
        parse_manifest(KEY, changed(files=many))
    with pytest.raises(CheckpointCorrupt, match="lists 100002 files"):
        parse_manifest(KEY, changed(folders=[str(n) for n in range(MAX_FILES)]))


def test_manifest_that_is_too_long_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    data = changed()
    monkeypatch.setattr(module, "MAX_MANIFEST", 100)
    with pytest.raises(CheckpointError, match=r"bytes; 100 is the most\. Keep large metrics"):
        make_manifest(info(), FILES, ())
    with pytest.raises(CheckpointCorrupt, match=f"has {len(data)} bytes; 100 is the most"):
        parse_manifest(KEY, data)


def test_manifest_of_many_tiny_values_is_rejected_before_it_is_parsed() -> None:
    """64 MiB of them would become more than a GiB."""
    state = {"a": [[]] * MAX_MANIFEST_VALUES}
    with pytest.raises(CheckpointCorrupt, match="more than 2000000 values"):
        parse_manifest(KEY, changed(state=state))
    with pytest.raises(CheckpointError, match="more than 2000000 values"):
        make_manifest(info(state=state), FILES, ())


def test_deeply_nested_names_are_read_fast() -> None:
    names = [{"name": f"{'d/' * 2000}{n}", "size": 0, "sha256": A} for n in range(1000)]
    data = changed(files=names, objects={})
    began = time.thread_time()  # processor time of this thread only
    assert len(parse_manifest(KEY, data).files) == 1000
    assert time.thread_time() - began < 10


names = st.text(st.sampled_from("a./\0-"), max_size=8)


@given(names)
def test_safe_name_stays_below_its_folder(name: str) -> None:
    if is_safe_name(name):
        parts = name.split("/")
        assert all(part not in ("", ".", "..") for part in parts)
        assert "\0" not in name


@given(st.lists(names, min_size=1, max_size=4))
def test_object_key_has_three_visible_parts(parts: list[str]) -> None:
    key = "/".join([*parts, A])
    if is_object_key(key, A):
        assert len(key.split("/")) == 3
        assert not any(part.startswith(".") or not part for part in key.split("/"))


@given(st.dictionaries(st.from_regex(r"[ab]{1,2}(/[ab]{1,2}){0,2}", fullmatch=True), st.booleans()))
def test_name_below_a_file_is_always_detected(kinds: dict[str, bool]) -> None:
    files = [{"name": name, "size": 0, "sha256": A} for name, is_file in kinds.items() if is_file]
    folders = [name for name, is_file in kinds.items() if not is_file]
    clash = any(
        is_file and other.startswith(f"{name}/")
        for name, is_file in kinds.items()
        for other in kinds
    )
    data = changed(files=files, folders=folders, objects={})
    if clash:
        with pytest.raises(CheckpointCorrupt, match="is below it"):
            parse_manifest(KEY, data)
    else:
        assert isinstance(parse_manifest(KEY, data), Manifest)


_FIRST_USE = """
import sys
from tunemq_shared.checkpoints.manifest import parse_manifest
called = []
sys.setprofile(lambda frame, *_: called.append(frame.f_globals.get("__name__")))
try:
    parse_manifest("t/c", b"{}")
except Exception as error:
    print(type(error).__name__)
sys.setprofile(None)
print("msgspec._utils" in called)
"""


def test_type_of_manifests_is_examined_before_threads_parse_them() -> None:
    """msgspec crashes if several threads do that at once: the process ended with SIGSEGV."""
    said = subprocess.run(
        [sys.executable, "-c", _FIRST_USE], check=True, capture_output=True, text=True
    ).stdout
    assert said.split() == ["CheckpointCorrupt", "False"]
