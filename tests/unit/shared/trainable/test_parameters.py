"""`with_parameters`, and the transfer of trainables and parameters to trial processes as blobs."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tunemq_shared.base.errors import StoreError, TrainableError
from tunemq_shared.code.blob_folder import BlobFolder
from tunemq_shared.code.parameter_blob import dump_parameters, map_parameters, write_parameters
from tunemq_shared.protocol.messages import BlobRef
from tunemq_shared.trainable import trainable_blobs
from tunemq_shared.trainable.attached import attached_to
from tunemq_shared.trainable.parameters import with_parameters
from tunemq_shared.trainable.resources import resources_of, with_resources
from tunemq_shared.trainable.trainable_blobs import load, preload_of, ship


def train(config: dict[str, Any], data: Any, scale: int = 1) -> Any:
    """Trains."""
    return config, data, scale


class Model:
    def setup(self, config: dict[str, Any], data: Any = None, scale: int = 1) -> None:
        self.got = (config, data, scale)


@pytest.fixture
def blobs(tmp_path: Path) -> BlobFolder:
    return BlobFolder(tmp_path / "blobs")


def test_function_gets_the_objects_with_every_call() -> None:
    data = [1]
    bound = with_parameters(train, data=data)
    assert bound({"a": 1}) == ({"a": 1}, [1], 1)  # type: ignore[call-arg]
    assert bound({}, scale=3)[1] is data  # type: ignore[call-arg]


def test_wrapper_has_the_signature_without_the_bound_arguments() -> None:
    bound = with_parameters(train, data=1)
    assert list(inspect.signature(bound).parameters) == ["config", "scale"]
    assert (bound.__name__, bound.__doc__, bound.__module__) == ("train", "Trains.", __name__)
    assert inspect.isfunction(bound)
    inspect.signature(bound).bind({}, scale=2)


def test_argument_after_a_bound_one_keeps_its_position() -> None:
    bound = with_parameters(train, data=1)
    with pytest.raises(TypeError):
        bound({}, 7)


def test_keyword_only_and_catch_all_arguments_can_be_bound() -> None:
    def keywords(config: dict[str, Any], *, data: Any) -> Any:
        return data

    def anything(config: dict[str, Any], **rest: Any) -> Any:
        return rest

    assert with_parameters(keywords, data=1)({}) == 1  # type: ignore[call-arg]
    assert with_parameters(anything, data=1, more=2)({}) == {"data": 1, "more": 2}


def test_methods_partials_and_callable_objects_can_be_bound() -> None:
    class Runner:
        def train(self, config: dict[str, Any], data: Any) -> Any:
            return data

        def __call__(self, config: dict[str, Any], data: Any) -> Any:
            return data

    assert with_parameters(Runner().train, data=1)({}) == 1  # type: ignore[call-arg]
    assert with_parameters(functools.partial(train, scale=5), data=1)({}) == ({}, 1, 5)
    bound = with_parameters(Runner(), data=1)
    assert bound({}) == 1  # type: ignore[call-arg]
    assert bound.__name__ == "Runner"  # type: ignore[attr-defined]


def test_generator_function_still_yields() -> None:
    def train(config: dict[str, Any], data: Any) -> Any:
        yield data

    assert list(with_parameters(train, data=1)({})) == [1]  # type: ignore[call-arg]


def test_class_gets_the_objects_in_setup() -> None:
    bound = with_parameters(Model, data="d")
    assert issubclass(bound, Model)
    assert bound.__name__ == "Model"
    model = bound()
    model.setup({"a": 1})
    assert model.got == ({"a": 1}, "d", 1)
    assert attached_to(Model).parameters is None


def test_binding_again_adds_and_replaces() -> None:
    once = with_parameters(train, data=1)
    twice = with_parameters(once, data=2, scale=3)
    assert twice({}) == ({}, 2, 3)  # type: ignore[call-arg]
    assert once({}) == ({}, 1, 1)  # type: ignore[call-arg]
    assert attached_to(twice).original is train


def test_decorated_wrapper_is_a_separate_trainable(blobs: BlobFolder) -> None:
    bound = with_parameters(train, data=1)

    @functools.wraps(bound)
    def decorated(config: dict[str, Any]) -> Any:
        return "decorated", bound(config)  # type: ignore[call-arg]

    assert attached_to(decorated).original is decorated
    assert load(ship(decorated, blobs))({})[0] == "decorated"


@pytest.mark.parametrize(
    ("trainable", "message"),
    [
        (train, r"with_parameters\(dat=...\): train has no argument 'dat'.*'data', 'scale'"),
        (Model, r"Model.setup has no argument 'dat' after the configuration.*'data', 'scale'"),
        (lambda config: 1, r"it takes none"),
        (object, r"the arguments of object cannot be found out"),
        ("train", r"must be a function or a Trainable class, not 'train'"),
    ],
)
def test_wrong_name_is_rejected_with_the_right_ones(trainable: Any, message: str) -> None:
    with pytest.raises(TrainableError, match=message):
        with_parameters(trainable, dat=1)


def test_configuration_argument_cannot_be_bound() -> None:
    with pytest.raises(TrainableError, match="no argument 'config' after the configuration"):
        with_parameters(train, config={})


# --- through blobs -----------------------------------------------------------------------------


@pytest.mark.parametrize("trainable", [train, lambda config: "lambda", Model])
def test_trainable_without_parameters_round_trips(trainable: Any, blobs: BlobFolder) -> None:
    back = load(ship(trainable, blobs))
    assert back.__name__ == trainable.__name__
    assert len(os.listdir(blobs.root)) == 1


def test_bound_functions_and_classes_round_trip(blobs: BlobFolder) -> None:
    objects = {"data": {"x": np.arange(3), "f": lambda x: x + 1}, "scale": 4}
    _, data, scale = load(ship(with_parameters(train, **objects), blobs))({})
    assert (list(data["x"]), data["f"](1), scale) == ([0, 1, 2], 2, 4)
    model = load(ship(with_parameters(Model, **objects), blobs))()
    model.setup({})
    assert model.got[2] == 4


def test_resources_are_not_sent_and_parameters_are(blobs: BlobFolder) -> None:
    wrapped = with_resources(with_parameters(train, data=1), {"cpu": 2})
    back = load(ship(wrapped, blobs))
    assert back({}) == ({}, 1, 1)
    assert resources_of(back, {}) == {"cpu": 1.0}


def test_code_does_not_contain_the_objects(blobs: BlobFolder) -> None:
    ref = ship(with_parameters(train, data=np.zeros(2**20)), blobs)
    assert ref.size < 4096


@pytest.mark.parametrize(
    "array",
    [
        np.arange(10_000.0),
        np.asfortranarray(np.arange(10_000.0).reshape(100, 100)),
        np.arange(10_000.0)[::2],
        np.zeros(0),
        np.arange(3, dtype=np.int8),
    ],
    ids=["contiguous", "fortran", "strided", "empty", "tiny"],
)
def test_arrays_round_trip_aligned(array: Any, blobs: BlobFolder) -> None:
    objects = {"pad": np.zeros(3, np.int8), "array": array}
    back = map_parameters(write_parameters(dump_parameters(objects), blobs))["array"]
    assert np.array_equal(back, array)
    assert back.dtype == array.dtype
    assert back.ctypes.data % 64 == 0
    assert not back.flags.writeable


def test_objects_in_arrays_round_trip(blobs: BlobFolder) -> None:
    array = np.array([{"a": 1}, None, (2,), "x"], dtype=object)[::2]
    assert list(map_parameters(write_parameters(dump_parameters({"a": array}), blobs))["a"]) == [
        {"a": 1},
        (2,),
    ]


def test_large_arrays_are_read_only_views_of_whole_pages(blobs: BlobFolder) -> None:
    back = map_parameters(
        write_parameters(dump_parameters({"a": np.zeros(1024), "b": np.ones(4096)}), blobs)
    )
    for array in back.values():
        assert array.ctypes.data % 4096 == 0
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_objects_are_written_once_for_all_experiments(
    blobs: BlobFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = with_parameters(train, data=np.zeros(1000))
    first = ship(bound, blobs)
    monkeypatch.setattr(trainable_blobs, "write_parameters", None)
    assert ship(bound, blobs) == first
    other = BlobFolder(tmp_path / "other")
    second = ship(with_resources(bound, {"cpu": 2}), other)
    assert Path(second.path).parent == other.root
    for path in blobs.root.iterdir():
        path.unlink()
    assert len(load(second)({})[1]) == 1000


def test_objects_are_written_again_when_the_first_folder_is_removed(
    blobs: BlobFolder, tmp_path: Path
) -> None:
    bound = with_parameters(train, data=[1])
    for path in [Path(ship(bound, blobs).path), *blobs.root.iterdir()]:
        path.unlink(missing_ok=True)
    assert load(ship(bound, BlobFolder(tmp_path / "other")))({})[1] == [1]


def test_object_that_cannot_be_pickled_is_named(blobs: BlobFolder) -> None:
    bound = with_parameters(train, data={"nets": [threading.Lock()]})
    with pytest.raises(TrainableError, match=r"'data' holds a _thread.lock at data\['nets'\]\[0\]"):
        ship(bound, blobs)


def test_modules_to_import_in_a_trial_process_are_known(blobs: BlobFolder) -> None:
    assert "numpy" in {
        name.partition(".")[0]
        for name in preload_of(ship(with_parameters(train, data=np.zeros(2)), blobs))
    }


@pytest.mark.parametrize("field", ["python", "cloudpickle"])
def test_another_version_is_rejected_with_both_named(
    blobs: BlobFolder, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    ref = ship(train, blobs)
    monkeypatch.setattr(trainable_blobs, f"_{field}", lambda: "0.1")
    with pytest.raises(
        TrainableError, match=r"pickled with .* \d+\.\d+.* and .* on this worker has 0\.1"
    ):
        load(ref)


def test_value_that_is_no_trainable_is_rejected(blobs: BlobFolder) -> None:
    with pytest.raises(StoreError, match="does not hold a trainable"):
        load(blobs.put(b"\xc1"))
    other = msgspec.msgpack.encode([99, "3.11", "3", b"", None])
    with pytest.raises(TrainableError, match="of version 99"):
        load(blobs.put(other))


@pytest.mark.parametrize(
    "content", [b"x", b"TMQPAR01", b"TMQPAR02" + bytes(20), b"TMQPAR01" + bytes(7) + b"\1\xc1"]
)
def test_invalid_parameters_are_rejected(blobs: BlobFolder, content: bytes) -> None:
    with pytest.raises(StoreError, match=r"does not hold parameters|are damaged"):
        map_parameters(blobs.put(content))


#: Python's and its libraries' pages are left out: their share depends on other processes.
HOST = """
import sys
from tunemq_shared.protocol.messages import BlobRef
from tunemq_shared.trainable.trainable_blobs import load
data = load(BlobRef(sys.argv[1], int(sys.argv[2]), sys.argv[3]))({})
print(float(data.sum()), flush=True)
sys.stdin.readline()
shared, kib = (sys.prefix, sys.base_prefix, "/usr/lib", "/lib"), 0
for line in open("/proc/self/smaps"):
    name, *rest = line.split()
    if not name.endswith(":"):
        file = rest[4] if len(rest) > 4 else ""
    elif name == "Pss:" and not file.startswith(shared):
        kib += int(rest[0])
print(kib, flush=True)
sys.stdin.readline()
"""


def test_processes_share_one_copy_of_an_array(blobs: BlobFolder) -> None:
    size = 64 * 2**20

    def give(config: dict[str, Any], data: Any) -> Any:
        return data

    def use(data: Any) -> int:
        ref: BlobRef = ship(with_parameters(give, data=data), blobs)
        command = [sys.executable, "-c", HOST, ref.sha256, str(ref.size), ref.path]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes = [subprocess.Popen(command, **pipes) for _ in range(4)]
        try:
            assert [float(process.stdout.readline()) for process in processes] == [
                float(data.sum())
            ] * 4
            kib = 0
            for process in processes:
                process.stdin.write("\n")
                process.stdin.flush()
                kib += int(process.stdout.readline())
        finally:
            for process in processes:
                process.communicate()
        return kib * 1024

    # The memory of four bare interpreters with numpy is subtracted.
    assert use(np.ones(size // 8)) - use(np.ones(1)) < 1.1 * size
