"""Each public name has an example in its docstring, and it works."""

from __future__ import annotations

import doctest
import inspect

import pytest

import tunemq

#: Bases of errors explain themselves.
WITHOUT = {"TuneError"}


@pytest.mark.parametrize("name", sorted(set(tunemq.__all__) - WITHOUT))
def test_example_of_a_public_name_works(name: str) -> None:
    public = getattr(tunemq, name)
    found = doctest.DocTestFinder(recurse=False).find(public, name, globs={})
    assert any(one.examples for one in found), f"{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    said: list[str] = []
    for one in found:
        runner.run(one, out=said.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)


def test_public_functions_and_classes_explain_their_arguments() -> None:
    silent = {
        name
        for name in tunemq.__all__
        if callable(getattr(tunemq, name)) and not inspect.getdoc(getattr(tunemq, name))
    }
    assert not silent
