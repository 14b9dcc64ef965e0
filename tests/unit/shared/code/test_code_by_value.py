"""A trainable's code reaches a worker, or the error names the obstacle."""

from __future__ import annotations

import functools
import importlib.util
import json
import pickle
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tunemq_shared.base.errors import TrainableError
from tunemq_shared.code import code_by_value
from tunemq_shared.code.code_by_value import (
    load_trainable,
    modules_of,
    pickle_trainable,
    trainable_name,
)

LOCK = threading.Lock()
SETTINGS = {"pool": [1, {"guard": LOCK}]}


def uses_lock(config: dict[str, Any]) -> Any:
    return LOCK


def uses_settings(config: dict[str, Any]) -> Any:
    return SETTINGS["pool"]


def calls_uses_lock(config: dict[str, Any]) -> Any:
    return [uses_lock(config) for _ in range(2)]


class Holder:
    def __init__(self) -> None:
        self.inner = LOCK

    def train(self, config: dict[str, Any]) -> Any:
        return self.inner


class Slotted:
    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = LOCK


HOLDER = Holder()
SLOTTED = Slotted()


def uses_holder(config: dict[str, Any]) -> Any:
    return HOLDER


def uses_slotted(config: dict[str, Any]) -> Any:
    return SLOTTED


def has_default(config: dict[str, Any], lock: Any = LOCK) -> Any:
    return lock


def takes_lock(config: dict[str, Any], lock: Any) -> Any:
    return lock


class UsesLock:
    def setup(self, config: dict[str, Any]) -> None:
        self.lock = LOCK


class HasLock:
    shared = LOCK


class Derived(HasLock):
    pass


def closure_over_lock() -> Any:
    own = threading.Lock()

    def train(config: dict[str, Any]) -> Any:
        return own

    return train


@pytest.mark.parametrize(
    ("trainable", "named"),
    [
        (uses_lock, r"uses_lock cannot.*the variable 'LOCK' it uses is a _thread\.lock"),
        (
            uses_settings,
            r"'SETTINGS' it uses holds a _thread\.lock at SETTINGS\['pool'\]\[1\]\['gu",
        ),
        (calls_uses_lock, r"'uses_lock' it uses holds a _thread\.lock at uses_lock -> LOCK"),
        (uses_holder, r"'HOLDER' it uses holds a _thread\.lock at HOLDER\.inner"),
        (uses_slotted, r"'SLOTTED' it uses holds a _thread\.lock at SLOTTED\.lock"),
        (has_default, r"the default of its argument 'lock' is a _thread\.lock"),
        (closure_over_lock(), r"train cannot.*the variable 'own' it uses is a _thread\.lock"),
        (HOLDER.train, r"the object it is a method of holds a _thread\.lock at self\.inner"),
        (functools.partial(takes_lock, lock=LOCK), r"its argument 'lock' is a _thread\.lock"),
        (
            functools.partial(uses_lock),
            r"the function it calls holds a _thread\.lock at func -> LO",
        ),
        (UsesLock, r"UsesLock cannot.*its method 'setup' holds a _thread\.lock at setup -> LOCK"),
        (HasLock, r"its attribute 'shared' is a _thread\.lock"),
        (Derived, r"its base class 'HasLock' holds a _thread\.lock at HasLock\.shared"),
    ],
)
def test_value_that_cannot_be_pickled_is_named(
    trainable: Any, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Treat this file as the user's script, which workers do not have.
    monkeypatch.setattr(code_by_value, "_can_be_found", lambda module: False)
    with pytest.raises(TrainableError, match=named) as caught:
        pickle_trainable(trainable)
    place = "setup()" if isinstance(trainable, type) else "the function"
    assert str(caught.value).endswith(f"create it inside {place}.")


def test_object_with_a_special_pickling_error_is_reported() -> None:
    class Rejects:
        def __reduce__(self) -> Any:
            raise ZeroDivisionError("no reason")

        def __call__(self, config: dict[str, Any]) -> None: ...

    with pytest.raises(TrainableError, match="no reason"):
        pickle_trainable(Rejects())


def in_another_process(pickled: bytes, tmp_path: Path, *path: Path) -> Any:
    """Return the trainable's result for {"x": 4} from a fresh process."""
    blob = tmp_path / "pickled"
    blob.write_bytes(pickled)
    program = (
        f"import sys, json; sys.path[:0] = {[str(folder) for folder in path]!r}\n"
        "from tunemq_shared.code.code_by_value import load_trainable\n"
        "trainable = load_trainable(open(sys.argv[1], 'rb').read())\n"
        "print(json.dumps(trainable({'x': 4})))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, blob], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


def test_functions_of_a_module_that_only_the_script_can_import_are_sent_by_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "not_on_the_path.py"
    file.write_text(
        "def helper(x):\n    return x * 10\n\ndef train(config):\n    return helper(config['x'])\n"
    )
    spec = importlib.util.spec_from_file_location("not_on_the_path", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "not_on_the_path", module)
    spec.loader.exec_module(module)
    assert in_another_process(pickle_trainable(module.train), tmp_path) == 40


def test_functions_of_a_script_are_sent_by_value(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        from tunemq_shared.code.code_by_value import pickle_trainable
        factor = 3
        def train(config):
            return config["x"] * factor
        sys.stdout.buffer.write(pickle_trainable(train))
        """)
    )
    done = subprocess.run([sys.executable, script], check=True, capture_output=True)
    assert in_another_process(done.stdout, tmp_path) == 12


def test_functions_of_an_importable_module_are_sent_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "their_training.py").write_text("def train(config):\n    return config['x'] + 1\n")
    monkeypatch.syspath_prepend(str(folder))
    import their_training

    pickled = pickle_trainable(their_training.train)
    assert len(pickled) < 100
    assert in_another_process(pickled, tmp_path, folder) == 5
    assert modules_of(pickled) == ()
    monkeypatch.delitem(sys.modules, "their_training")


def test_module_made_by_hand_does_not_count_as_importable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = types.ModuleType("made_by_hand")
    exec("def train(config):\n    return config['x'] + 2\n", vars(module))
    monkeypatch.setitem(sys.modules, "made_by_hand", module)
    assert in_another_process(pickle_trainable(module.train), tmp_path) == 6


def test_loading_code_that_needs_a_missing_module_names_it() -> None:
    pickled = b"cno_such_module\ntrain\n."
    with pytest.raises(TrainableError, match=r"no_such_module.*install the missing module"):
        load_trainable(pickled)


def test_large_trainable_causes_a_warning_with_its_largest_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(code_by_value, "LARGE_TRAINABLE", 2**20)
    small, table = np.zeros(10), np.zeros(3 * 2**17)

    def train(config: dict[str, Any]) -> Any:
        return small, table

    with pytest.warns(UserWarning, match=r"train takes 3 MiB.*'table'.*3 MiB.*with_parameters"):
        pickle_trainable(train)


def test_modules_that_loading_imports_are_found_without_loading() -> None:
    import sklearn.svm

    def train(config: dict[str, Any]) -> Any:
        return np.zeros(1), sklearn.svm.SVC(), json.dumps({})

    # cloudpickle itself is among them: a trial process that has imported it starts faster.
    found = modules_of(pickle_trainable(train))
    assert {"cloudpickle.cloudpickle", "numpy", "sklearn"} <= set(found)
    assert not {name for name in found if name.startswith(("json", "builtins", "tests", "tunemq"))}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_modules_are_found_in_pickles_of_every_protocol(protocol: int) -> None:
    value = [np.float64(1), np.float64(2), np.dtype("f4"), {"numpy": "a string"}]
    found = modules_of(pickle.dumps(value, protocol=protocol))
    assert found
    assert {name.partition(".")[0] for name in found} == {"numpy"}


def test_search_for_modules_runs_no_code() -> None:
    assert modules_of(b"cbuiltins\nexec\n(S'raise SystemExit'\ntR.") == ()


def test_trainables_have_names() -> None:
    assert trainable_name(uses_lock) == "uses_lock"
    assert trainable_name(functools.partial(uses_lock)) == "uses_lock"
    assert trainable_name(Holder) == "Holder"
    assert trainable_name(HOLDER) == "Holder"


def test_modules_used_by_a_module_of_the_user_are_found_too(tmp_path, monkeypatch):
    package = tmp_path / "their_project"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "model.py").write_text("import numpy as np\nfrom sklearn.svm import SVC\n")
    (package / "train.py").write_text("from . import model\ndef train(config): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    train = importlib.import_module("their_project.train").train
    found = modules_of(pickle_trainable(train))
    assert "numpy" in found
    assert any(name.startswith("sklearn.svm") for name in found)
    assert not any(name.startswith(("their_project", "tunemq")) for name in found)
