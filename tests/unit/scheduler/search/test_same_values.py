"""Values of a search space that an earlier run pickled, compared with those of this run."""

from __future__ import annotations

import dataclasses

import pytest

from tunemq_scheduler.search.domains import choice
from tunemq_scheduler.search.same_values import same

FUNCTIONS = """
import functools

def named(): pass
def other(): pass
def within(number): return lambda: number
def recursive():
    def again(): return again
    return again
"""


class Plain:
    def __init__(self, width):
        self.width = width


class Slotted:
    __slots__ = ("width",)

    def __init__(self, width):
        self.width = width


class NoState:
    def method(self): ...
    def other(self): ...


class Reduced:
    """Pickles itself as a call of its class; the arguments may be a text, the name of a global."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        if isinstance(self.arguments[0], str):
            return self.arguments[0]
        return Reduced, self.arguments


class Pairs(dict):
    """Compares by identity, and pickles its values apart from its state."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


@dataclasses.dataclass(frozen=True)
class Compared:
    content: object


class Node:
    def __init__(self):
        self.next = self


def linked(length):
    """Return a list of objects; comparing them one within another needs too many calls."""
    first = None
    for _ in range(length):
        second, first = first, Plain(1)
        first.width = second
    return first


def shared(depth):
    """Return lists that contain each list twice: 2 to the power of ``depth`` paths."""
    inner = NoState()
    for _ in range(depth):
        inner = [inner, inner]
    return inner


def made_by_a_run(value):
    """Evaluate this with the functions of a script that is loaded anew."""
    script = {**globals(), "choice": choice, "__name__": "__main__"}
    exec(FUNCTIONS, script)
    return eval(value, script)


@pytest.mark.parametrize(
    "value",
    [
        "named",
        "lambda: 1",
        "within(3)",
        "functools.partial(named, 1, key=[other])",
        "Plain(1)",
        "Plain({'activation': (named, Plain(2))})",
        "Slotted(named)",
        "NoState()",
        "NoState().method",
        "Plain(1).__init__",
        "recursive()",
        "Node()",
        "linked(3000)",
        "shared(60)",
        "Reduced(1)",
        "Reduced('named')",
        "Pairs(a=named, b=Plain(1))",
        "Compared(lambda: 1)",
        "Compared([NoState()])",
        "choice([Plain(1), {'a': choice([within(3)])}])",
    ],
)
def test_values_that_only_equal_themselves_are_the_same_in_another_run(value):
    assert made_by_a_run(value) != made_by_a_run(value)
    assert same(made_by_a_run(value), made_by_a_run(value))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("named", "other"),
        ("lambda: 1", "lambda: 2"),
        ("within(3)", "within(4)"),
        ("functools.partial(named, 1)", "functools.partial(named, 2)"),
        ("Plain(1)", "Plain(2)"),
        ("Plain([named])", "Plain([other])"),
        ("Slotted(1)", "Slotted(2)"),
        ("NoState()", "Plain(1)"),
        ("NoState().method", "NoState().other"),
        ("Plain(1).__init__", "Plain(2).__init__"),
        ("linked(3000)", "linked(3001)"),
        ("Reduced(1)", "Reduced(2)"),
        ("Reduced('named')", "Reduced('other')"),
        ("Pairs(a=1)", "Pairs(a=2)"),
        ("Compared(named)", "Compared(other)"),
        ("[True]", "[1]"),
        ("[1]", "(1,)"),
        ("object()", "object()"),
        ("(x for x in ())", "(x for x in ())"),
    ],
)
def test_values_that_consist_of_others_differ(one, other):
    assert not same(made_by_a_run(one), made_by_a_run(other))


def test_lambda_whose_lines_moved_is_the_same():
    assert same(eval("lambda: 1"), eval("(\n\nlambda: 1)"))
    assert not same(eval("lambda: 1"), eval("(\n\nlambda: 2)"))
