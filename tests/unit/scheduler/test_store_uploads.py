"""Files that come in parts, of which the senders are gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tunemq_scheduler.store_server import uploads
from tunemq_scheduler.store_server.refusal import Refusal
from tunemq_scheduler.store_server.served_folder import ServedFolder
from tunemq_scheduler.store_server.uploads import Uploads


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[ServedFolder]:
    folder = ServedFolder(tmp_path)
    yield folder
    folder.close()


def test_what_nobody_went_on_with_for_long_is_forgotten(folder, monkeypatch):
    under_way = Uploads(folder)
    first = under_way.begin("a")
    second = under_way.begin("b")
    assert [one.upload for one in under_way.under_way()] == [first, second]
    monkeypatch.setattr(uploads, "_FORGOTTEN_AFTER_S", -1.0)
    third = under_way.begin("c")
    assert [one.upload for one in under_way.under_way()] == [third]
    assert [path.name for path in (folder.root / ".tunemq-store" / "incoming").iterdir()] == [third]
    with pytest.raises(Refusal, match="there is no upload"):
        under_way.complete("a", first, [])


def test_an_upload_belongs_to_its_key(folder):
    under_way = Uploads(folder)
    upload = under_way.begin("a")
    for use in (under_way.abort, lambda key, name: under_way.complete(key, name, [])):
        with pytest.raises(Refusal, match="there is no upload"):
            use("b", upload)
