"""How a trial process writes checkpoints to its node's cache and reads them."""

from __future__ import annotations

import hashlib
import socket
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.searches.checkpoints import contents, fill
from tunemq_shared.base.errors import CheckpointCorrupt, StoreError
from tunemq_shared.checkpoints.manifest import CheckpointInfo
from tunemq_shared.protocol.messages import CheckpointRef
from tunemq_workers.checkpoints import checkpoint_messages
from tunemq_workers.checkpoints.checkpoint_messages import FetchAnswer, FetchCheckpoint, SaveAnswer
from tunemq_workers.runtime import frames
from tunemq_workers.trial_process.cache_sink import CacheSink
from tunemq_workers.trial_process.node_channel import NodeChannel


class Node:
    """The node's side: grants space in ``cache`` at once, and sends the ``answers``.

    It calls ``replaces`` before it answers a repeated request.
    """

    def __init__(self, line: socket.socket, cache: Path) -> None:
        self.cache = cache
        self.asked: list[int | FetchCheckpoint] = []
        self.save_answer = SaveAnswer(str(cache))
        self.fetched = FetchAnswer(str(cache))
        self.replaces = lambda: None
        self._line = line
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        decoder = frames.FrameDecoder()
        while data := self._line.recv(1 << 16):
            for kind, payload in decoder.feed(data):
                if kind == frames.ASK_SAVE:
                    self.asked.append(kind)
                    self._answer(frames.SAVE_ANSWER, self.save_answer)
                else:
                    question = checkpoint_messages.decode_fetch(payload)
                    self.asked.append(question)
                    if question.again:
                        self.replaces()
                    self._answer(frames.FETCHED, self.fetched)

    def _answer(self, kind: int, answer: object) -> None:
        self._line.send(frames.frame(kind, checkpoint_messages.encode(answer)))

    def close(self) -> None:
        self._thread.join()


@pytest.fixture
def lines():
    process, node = socket.socketpair()
    with process, node:
        yield process, node


@pytest.fixture
def node(lines, tmp_path):
    node = Node(lines[1], tmp_path / "cache")
    yield node
    lines[0].shutdown(socket.SHUT_WR)
    node.close()


@pytest.fixture
def sink(lines, node):
    return CacheSink(NodeChannel(lines[0]), "train_0")


@pytest.fixture
def source(tmp_path):
    return fill(tmp_path / "source")


def save(sink, source, n=1, attempt=1):
    info = CheckpointInfo(
        trial="t0", attempt=attempt, n=n, step=n, state={"iteration": n}, metrics={"a": 1.0}
    )
    return sink.save(source, info)


def got(sink, ref):
    path = Path(tempfile.mkdtemp(), "files")
    return path, sink.get(ref, path)


def reference(written):
    return CheckpointRef(written.key, "", written.step, written=written.sha256)


def file(node, written, name="model.bin"):
    return node.cache / written.key / "files" / name


def damage(path):
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.unlink()  # its bytes may belong to another checkpoint, too
    path.write_bytes(content)


def test_written_checkpoint_comes_back_verified(sink, node, source):
    written = save(sink, source, n=3, attempt=2)

    path, state = got(sink, reference(written))

    assert (written.trial, written.attempt, written.n, written.step) == ("t0", 2, 3, 3)
    assert written.key == "train_0/checkpoint_2-000003"
    assert written.size == sum(map(len, contents(source).values())) - len(b"<empty>")
    assert not path.is_relative_to(node.cache)
    assert contents(path) == contents(source)
    assert state == {"iteration": 3}
    assert node.asked == [frames.ASK_SAVE, FetchCheckpoint(reference(written))]


def test_space_is_requested_before_a_file_is_written(sink, node, source):
    node.save_answer = SaveAnswer("", "no room within 1800 s: the store does not answer")

    with pytest.raises(StoreError, match="no room within 1800 s"):
        save(sink, source)

    assert not node.cache.exists()


def test_unchanged_files_are_linked_to_the_previous_checkpoint(sink, node, source):
    first = save(sink, source)
    (source / "deep" / "er" / "state").write_bytes(b"other")
    second = save(sink, source, n=2)

    assert file(node, second).samefile(file(node, first))
    assert file(node, first, "deep/er/state").read_bytes() == b"state"
    assert file(node, second, "deep/er/state").read_bytes() == b"other"


def test_files_are_linked_to_the_checkpoint_that_the_trial_was_restored_from(
    sink, lines, node, source
):
    first = save(sink, source)
    resumed = CacheSink(NodeChannel(lines[0]), "train_1")
    got(resumed, reference(first))

    second = save(resumed, source, attempt=2)

    assert second.key == "train_1/checkpoint_2-000001"
    assert file(node, second).samefile(file(node, first))


def test_missing_previous_checkpoint_is_no_problem(sink, node, source):
    first = save(sink, source)
    (node.cache / first.key).rename(node.cache / "gone")

    second = save(sink, source, n=2)

    assert contents(got(sink, reference(second))[0]) == contents(source)


def test_damaged_copy_is_fetched_once_more(sink, node, source, caplog):
    written = save(sink, source)
    damage(file(node, written))
    whole = (source / "model.bin").read_bytes()
    node.replaces = lambda: file(node, written).write_bytes(whole)

    path, _ = got(sink, reference(written))

    assert contents(path) == contents(source)
    assert [question.again for question in node.asked[1:]] == [False, True]
    assert "It is fetched once more." in caplog.text
    assert "model.bin" in caplog.text


def test_copy_that_is_damaged_again_is_corrupt(sink, node, source):
    written = save(sink, source)
    damage(file(node, written))

    with pytest.raises(CheckpointCorrupt, match=r"'model\.bin' is damaged"):
        got(sink, reference(written))

    assert len(node.asked) == 3


def test_copy_that_is_not_where_the_node_said_is_fetched_once_more(sink, node, source):
    written = save(sink, source)
    away = node.cache / written.key
    away.rename(node.cache / "away")
    node.replaces = lambda: (node.cache / "away").rename(away)

    assert contents(got(sink, reference(written))[0]) == contents(source)


def test_copy_of_a_checkpoint_committed_meanwhile_is_verified_by_the_nodes_hash(sink, node, source):
    written = save(sink, source)
    folder = node.cache / written.key
    data = (folder / "manifest.json").read_bytes() + b" "
    (folder / "manifest.json").unlink()
    (folder / "committed.json").write_bytes(data)
    with pytest.raises(CheckpointCorrupt):
        got(sink, reference(written))
    node.fetched = FetchAnswer(str(node.cache), sha256=hashlib.sha256(data).hexdigest())
    assert contents(got(sink, reference(written))[0]) == contents(source)


@pytest.mark.parametrize("is_corrupt", [True, False])
def test_checkpoint_that_the_store_cannot_deliver_is_not_requested_again(sink, node, is_corrupt):
    node.fetched = FetchAnswer("", "there is no manifest", is_corrupt=is_corrupt)

    with pytest.raises(StoreError, match="no manifest") as caught:
        got(sink, CheckpointRef("train_0/checkpoint_1-000001", "sha", 1))

    assert isinstance(caught.value, CheckpointCorrupt) is is_corrupt
    assert len(node.asked) == 1


def test_copy_from_the_store_is_verified_by_its_hash_there(sink, node, source):
    written = save(sink, source)
    folder = node.cache / written.key
    (folder / "manifest.json").rename(folder / "committed.json")

    path, _ = got(sink, CheckpointRef(written.key, written.sha256, 1))

    assert contents(path) == contents(source)
    with pytest.raises(CheckpointCorrupt):
        got(sink, CheckpointRef(written.key, "other", 1, written="another"))


def test_folder_of_a_trial_is_made_while_the_node_removes_empty_ones_above(sink, tmp_path):
    above = tmp_path / "search" / "1"
    is_removing = True

    def remove():
        while is_removing:
            for folder in (above, above.parent):
                with suppress(OSError):
                    folder.rmdir()

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        for number in range(300):
            sink.make_folder(str(above / str(number)))
            (above / str(number)).rmdir()
    finally:
        is_removing = False
        remover.join()
