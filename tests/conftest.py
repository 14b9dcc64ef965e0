"""Give each test a clean environment and its own results folder, and check that it leaves nothing.

A test whose service is missing asks `tests.support.waiting.need`, which skips on a laptop and fails
where CI is set.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support.fake_gpus import FakeGpus
from tests.support.stores.object_servers import bucket, minio, served, shared_minio, shared_served  # noqa: F401
from tests.support.waiting import descendants, eventually
from tunemq_shared.system.process_attributes import is_memory_private

hypothesis.settings.register_profile("tunemq", deadline=None, print_blob=True)
#: `make parity` takes it for the trial schedulers.
hypothesis.settings.register_profile("thorough", max_examples=1000, deadline=None, print_blob=True)
hypothesis.settings.load_profile("tunemq")

# A shell, or nohup, starts what runs in its background so, and every child would ignore them, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

for _name in [name for name in os.environ if name.startswith("TUNEMQ_")]:
    del os.environ[_name]  # before any test, fixture or child process can see it


@pytest.fixture(scope="session", autouse=True)
def _gpus_of_this_machine_are_hidden(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let processes of tests see no real GPU: a worker locks those that it offers.

    Tests in `tests/gpu` undo this.
    """
    with pytest.MonkeyPatch.context() as patch:
        if os.path.exists("/dev/nvidiactl"):
            none = FakeGpus(tmp_path_factory.mktemp("gpus") / "none.json", [])
            for name, value in none.environment().items():
                patch.setenv(name, value)
        yield


@pytest.fixture(autouse=True)
def _results_in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEMQ_RESULTS", str(tmp_path / "tunemq_results"))


@pytest.fixture(autouse=True)
def _memory_stays_as_it_was() -> Iterator[None]:
    """Fail a test that hides this process's memory: its children would get no keys from then on.

    Linux does so whenever the process's user changes, even for a moment.
    """
    yield
    assert not is_memory_private()


@pytest.fixture(autouse=True)
def _nothing_is_left_running(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a unit test that leaves a process or a thread; other tests may share warm ones."""
    if "unit" not in request.node.path.relative_to(Path(__file__).parent).parts:
        yield
        return
    threads, children = set(threading.enumerate()), descendants(os.getpid())
    yield

    def left() -> list[object]:
        # A farm that another test left warm may still be starting what belongs to it.
        running = descendants(os.getpid(), besides=children)
        return [*running, *(one for one in threading.enumerate() if one not in threads)]

    eventually(lambda: not left(), message=lambda: f"left running: {left()}")
