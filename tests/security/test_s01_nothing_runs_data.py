"""S01: data becomes code in one place only, and in no process that holds a farm's keys."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tunemq_shared.base.errors import BugError, TrainableError
from tunemq_shared.base.pickling import dump
from tunemq_shared.base.unpickling import load_pickled

pytestmark = pytest.mark.security

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("shared", "scheduler", "workers", "tunemq")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
#: Modules whose readers execute their input.
_RUNNING = frozenset({
    *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"),
    *("jsonpickle", "copyreg", "kombu.serialization"),
})  # fmt: skip
_READERS = frozenset({"load", "loads", "Unpickler", "open", "register"})
_BUILTINS = frozenset({"eval", "exec", "__import__"})
_YAML = frozenset({
    *("load", "load_all", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all"),
    *("Loader", "UnsafeLoader", "FullLoader"),
})  # fmt: skip
#: All that there is, with the reason why it may be.
ALLOWED = {
    # The one place, see there.
    "shared/tunemq_shared/base/unpickling.py: pickle.loads",
    "shared/tunemq_shared/base/unpickling.py: pickle.Unpickler",
}


def runs_of_data(source: str) -> Iterator[str]:
    """Each expression of a module that may execute its input."""
    tree = ast.parse(source)
    modules: dict[str, str] = {}  # local names of modules and of their functions
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                modules[name.asname or name.name] = name.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                modules[name.asname or name.name] = f"{node.module}.{name.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in modules:
            home, _, name = modules[node.id].rpartition(".")
            if is_running(home, name):
                yield f"{home}.{name}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            home = modules.get(node.value.id, "")
            if is_running(home, node.attr):
                yield f"{home}.{node.attr}"
        if isinstance(node, ast.Name) and node.id in _BUILTINS:
            yield node.id


def is_running(module: str, name: str) -> bool:
    """Whether the module's function executes its input."""
    if module == "yaml":
        return name in _YAML
    return module in _RUNNING and name in _READERS


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(data)",
        "import pickle as p\np.Unpickler(file)",
        "from pickle import loads as read\nread(data)",
        "def f(data):\n    import cloudpickle\n    return cloudpickle.loads(data)",
        "import dill\nmap(dill.load, files)",
        "import marshal\nmarshal.loads(data)",
        "import yaml\nyaml.load(text, yaml.SafeLoader)",
        "from yaml import unsafe_load\nunsafe_load(text)",
        "eval(text)",
        "list(map(exec, texts))",
    ],
)
def test_s01_calls_that_run_data_are_found(source: str) -> None:
    assert list(runs_of_data(source))


def test_s01_data_is_run_only_in_the_allowed_places() -> None:
    assert len(SOURCES) > 400
    found = {
        f"{path.relative_to(ROOT)}: {what}"
        for path in SOURCES
        for what in runs_of_data(path.read_text(encoding="utf-8"))
    }
    assert found == ALLOWED


#: The entry points of processes with a farm's keys, and the line that rules unpickling out.
KEY_HOLDERS = {
    "the supervisor": "scheduler/tunemq_scheduler/farm/scheduler_service.py",
    "the node": "workers/tunemq_workers/node/node_process.py",
    "the consumer": "workers/tunemq_workers/broker/celery_consumer.py",
    "transfers and log scanners": "workers/tunemq_workers/processes/child_entry.py",
}


@pytest.mark.parametrize("holder", KEY_HOLDERS)
def test_s01_process_that_holds_keys_disables_unpickling(holder: str) -> None:
    tree = ast.parse((ROOT / KEY_HOLDERS[holder]).read_text(encoding="utf-8"))
    called = [
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    assert "never_unpickle" in called


def test_s01_disabled_unpickling_holds_for_the_process_and_its_forks() -> None:
    code = """
import os, pickle, sys
from tunemq_shared.base.errors import BugError
from tunemq_shared.code.config_packing import unpack_config
from tunemq_shared.base.unpickling import load_pickled, never_unpickle, unpickle

class Harm:
    def __reduce__(self):
        return print, ("harm",)

never_unpickle()
child = os.fork()
for read in (unpickle, lambda pickled: load_pickled(pickled, "it")):
    try:
        read(pickle.dumps(Harm()))
    except BugError:
        pass
    else:
        sys.exit("it was read")
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_s01_load_pickled_works_in_a_process_without_keys() -> None:
    assert load_pickled(dump({"a": (1, 2)}), "it") == {"a": (1, 2)}
    assert issubclass(BugError, RuntimeError)
    with pytest.raises(TrainableError, match="it cannot be loaded on this worker"):
        load_pickled(b"cno_such_module\nname\n.", "it")


def test_s01_the_supervisor_loads_no_code_that_unpickles_experiments() -> None:
    """The supervisor does not even import the code that unpickles trainables and configurations."""
    code = """
import sys
import tunemq_scheduler.farm.scheduler_service, tunemq_scheduler.farm.service.supervisor
never = {"packing", "code", "shipping", "parameter_blob"}
sys.exit(" ".join(sorted(never & {name.rpartition(".")[2] for name in sys.modules
                                  if name.startswith("tunemq_shared.")})) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
