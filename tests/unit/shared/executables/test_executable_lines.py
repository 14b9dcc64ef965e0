"""Which text that a program prints or writes to a file counts as a metric."""

from __future__ import annotations

import math

import pytest

from tunemq_shared.base.errors import MetricError
from tunemq_shared.executables.followed_file import FollowedFile
from tunemq_shared.executables.metric_lines import LineSplitter, MetricLines, metrics_in, visible


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("loss=0.3", {"loss": 0.3}),
        ("loss: 0.3, acc : .5", {"loss": 0.3, "acc": 0.5}),
        ("Epoch 3/10 - loss: 1.2e-3 - val_loss: 2", {"loss": 0.0012, "val_loss": 2}),
        ('{"loss": 0.3, "note": "ok"}', {"loss": 0.3, "note": "ok"}),
        ("{'loss': 0.35, 'learning_rate': 5e-05}", {"loss": 0.35, "learning_rate": 5e-05}),
        ('[tune-metric]: {"loss": 0.3, "epoch": 1}', {"loss": 0.3, "epoch": 1}),
        ("[val/loss=-1.5] (acc=93.2%)", {"val/loss": -1.5, "acc": 93.2}),
        ("The loss: 0.3.", {"loss": 0.3}),
        ("a=1 a=2", {"a": 2}),
        ("steps=9007199254740993", {"steps": 9007199254740993}),
        ("12:30:05 http://host:9000 version=1.2.3 took=5s --lr=0.1", {}),
        ("loss 0.3", {}),
        ("loss=1,234.5 cost=0,3 took=12:30 epoch=3/10 many=1'000", {}),
        ("loss=1 done=25%", {"loss": 1}),
        ('{"loss": 1, "done": true}', {"loss": 1, "done": True}),
        ("loss=1,acc=2, step: 3,", {"loss": 1, "acc": 2, "step": 3}),
        ("", {}),
        ("[1, 2]", {}),
    ],
)
def test_numbers_with_a_name_are_metrics(line, found):
    assert metrics_in(line) == found


def test_line_with_a_long_run_of_digits_is_read_at_once():
    assert metrics_in("loss=0.5 state: " + "1" * 200_000 + "x") == {"loss": 0.5}


def test_nan_and_infinity_are_numbers():
    found = metrics_in("loss=nan acc=-inf")

    assert math.isnan(found["loss"])
    assert found["acc"] == -math.inf


def test_line_counts_as_a_terminal_would_show_it():
    assert visible(b"loss: 9\rloss: 5\r\x1b[32mloss: 0.3\x1b[0m\r") == "loss: 0.3"


def test_line_is_a_result_if_all_expected_metrics_are_on_it():
    lines = MetricLines(("loss", "acc"))

    assert lines.result_in(b"loss=1 acc=2 lr=3") == {"loss": 1, "acc": 2, "lr": 3}
    assert lines.result_in(b"loss=1") is None
    assert lines.result_in(b"val_loss=1 acc=2") is None
    assert list(lines.seen) == ["loss", "val_loss", "acc"]


def test_nested_metric_is_found_in_json_and_in_pairs():
    lines = MetricLines(("val/loss",))

    assert lines.result_in(b'{"val": {"loss": 1}}') == {"val": {"loss": 1}}
    assert lines.result_in(b"val/loss=1") == {"val/loss": 1}


def test_without_an_expected_metric_no_line_is_a_result():
    assert MetricLines(()).result_in(b"loss=1") is None


def test_pattern_names_the_metrics_itself():
    lines = MetricLines(("loss",), r"loss (?P<loss>\S+)(?: on (?P<set>\w+))?")

    assert lines.result_in(b"loss 0.3 on valid") == {"loss": 0.3, "set": "valid"}
    assert lines.result_in(b"loss 3") == {"loss": 3}
    assert lines.result_in(b"loss=1") is None


def test_pieces_are_joined_into_lines():
    splitter = LineSplitter()

    assert splitter.split(b"a\nb") == [b"a"]
    assert splitter.split(b"c\n\n") == [b"bc", b""]
    assert splitter.last() == []
    splitter.split(b"end")
    assert splitter.last() == [b"end"]


def test_endless_line_keeps_its_end():
    splitter = LineSplitter()
    for _ in range(40):
        splitter.split(b"x" * 100_000)
    (line,) = splitter.split(b"loss=1\n")

    assert len(line) < 2_000_000
    assert line.endswith(b"loss=1")


def test_growing_file_is_followed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"loss": 9}\n')  # left by an earlier attempt
    file = FollowedFile(str(path))

    assert list(file.new_objects()) == []
    with path.open("a") as out:
        out.write('{"loss": 1}\n{"lo')
        out.flush()
        assert list(file.new_objects()) == [{"loss": 1}]
        out.write('ss": 2}\n\n{"loss": {"val": 3}')
        out.flush()
        assert list(file.new_objects()) == [{"loss": 2}]
        out.write("}")
        out.flush()
        assert list(file.new_objects()) == [{"loss": {"val": 3}}]
        out.write('\r\n{"loss": 4}')
        out.flush()
        assert list(file.new_objects()) == [{"loss": 4}]
    assert list(file.new_objects(is_last=True)) == []
    assert (tmp_path / "metrics.jsonl.1").read_text() == '{"loss": 9}\n'


def write_in_place(path, text):
    path.write_text(text)


def replace(path, text):
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("write", [write_in_place, replace])
def test_line_that_the_next_result_replaces_is_read_each_time(tmp_path, write, end):
    path = tmp_path / "metrics.jsonl"
    file = FollowedFile(str(path))
    found = []
    for loss in (3, 2, 10, 1, 2):  # of any length
        write(path, f'{{"loss": {loss}}}{end}')
        found += file.new_objects()
        found += file.new_objects()
    assert [one["loss"] for one in found] == [3, 2, 10, 1, 2]


@pytest.mark.parametrize("write", [write_in_place, replace])
@pytest.mark.parametrize("length", [5, 100_000])
def test_lines_that_change_after_they_were_read_are_an_error(tmp_path, write, length):
    path = tmp_path / "metrics.jsonl"
    file = FollowedFile(str(path))
    lines = [f'{{"loss": {n}, "x": "{"x" * length}"}}\n' for n in range(4)]
    write(path, "".join(lines[:2]))
    assert len(list(file.new_objects())) == 2
    write(path, "".join(lines[:3]))
    assert [one["loss"] for one in file.new_objects()] == [2]
    write(path, "".join(line.replace("}", ', "val": null}') for line in lines))
    with pytest.raises(MetricError, match="line 1 is another one than was read before"):
        list(file.new_objects())


@pytest.mark.parametrize("is_ended", [True, False])
def test_lines_of_a_file_that_is_written_anew_each_time_are_read_once(tmp_path, is_ended):
    path = tmp_path / "metrics.jsonl"
    file = FollowedFile(str(path))
    lines = [f'{{"loss": {n}}}\n' for n in (3, 2, 2, 1)]
    if not is_ended:
        lines = [f"\n{line.strip()}" for line in lines]
    found = []
    for number in range(1, 5):
        path.write_text("".join(lines[:number]))
        found += file.new_objects()
        path.write_text(lines[0])  # caught while it is written
        found += file.new_objects()
    assert [one["loss"] for one in found] == [3, 2, 2, 1]


def test_line_that_equals_one_of_the_attempt_before_is_a_result(tmp_path):
    path = tmp_path / "metrics.jsonl"
    line = '{"loss": 0.1, "training_iteration": 0}\n'
    path.write_text(line * 2)
    file = FollowedFile(str(path))
    path.write_text(line)
    assert [one["loss"] for one in file.new_objects()] == [0.1]


@pytest.mark.parametrize("line", ["loss=1", "[1]"])
def test_line_that_is_no_object_is_reported_with_its_number(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    file = FollowedFile(str(path))
    path.write_text(f'{{"loss": 1}}\n{line}\n')

    with pytest.raises(MetricError, match=r"metrics.jsonl, line 2: .* JSON object"):
        list(file.new_objects())
