"""Each public name has an example in its docstring, and it works."""

from __future__ import annotations

import doctest
import inspect
from types import ModuleType

import pytest

import tunemq
import tunemq.schedulers
import tunemq.search.bohb
import tunemq.stopper
import tunemq.testing

#: Bases of errors explain themselves.
WITHOUT = {"TuneError"}


@pytest.mark.parametrize("name", sorted(set(tunemq.__all__) - WITHOUT))
def test_example_of_a_public_name_works(name: str) -> None:
    public = getattr(tunemq, name)
    assert run_examples(public, name), f"{name} has no example"


@pytest.mark.parametrize(
    "module", [tunemq.schedulers, tunemq.search.bohb, tunemq.stopper, tunemq.testing]
)
def test_examples_of_public_modules_work(module: ModuleType) -> None:
    assert sum(run_examples(getattr(module, name), name) for name in module.__all__)


def run_examples(public: object, name: str) -> int:
    """Run the examples of a public name; return their number."""
    found = doctest.DocTestFinder(recurse=False).find(public, name, globs={})
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    said: list[str] = []
    for one in found:
        runner.run(one, out=said.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)
    return sum(len(one.examples) for one in found)


def test_public_functions_and_classes_explain_their_arguments() -> None:
    silent = {
        name
        for name in tunemq.__all__
        if callable(getattr(tunemq, name)) and not inspect.getdoc(getattr(tunemq, name))
    }
    assert not silent
