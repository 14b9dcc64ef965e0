"""Installed packages are imported even if the script's folder has modules of the same name."""

from __future__ import annotations

import sys
import threading
from types import ModuleType

import pytest

from tunemq_scheduler.base.import_precedence import installed_packages_first

NAME = "a_package_of_this_test"


@pytest.fixture
def module(monkeypatch):
    module = ModuleType(NAME)
    monkeypatch.setitem(sys.modules, NAME, module)
    return module


def test_package_that_another_thread_imports_is_waited_for(monkeypatch, module):
    monkeypatch.delitem(sys.modules, NAME)
    is_imported: list[bool] = []

    def begin_another_search() -> None:
        with installed_packages_first(NAME):
            is_imported.append(hasattr(sys.modules[NAME], "__version__"))

    other = threading.Thread(target=begin_another_search)
    before = sys.path.copy()
    with installed_packages_first(NAME):
        sys.modules[NAME] = module  # registered, but its code has only begun to run
        other.start()
        other.join(0.05)
        module.__version__ = "1"
    other.join()
    assert is_imported == [True]
    assert sys.path == before
