"""The mutants in ``mutants.toml``: small edits that each take one defence out of the product."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Final

import msgspec

ROOT: Final = Path(__file__).parents[2]
TABLE: Final = Path(__file__).with_name("mutants.toml")


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One edit of one file, and the tests that must fail with it.

    Attributes:
        why: what can happen without the defence.
        file: the file to edit, below the repository.
        old: the text to replace; occurs exactly once.
        new: its replacement.
        tests: node ids of the tests that must fail; one without ``[...]`` stands for each of its
            parameters, of which one must fail.
        error: a regular expression for the error of the tests, where that is not an assertion's.
    """

    why: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    error: str = ""

    def mutated(self, text: str) -> str:
        """The file's text with the edit.

        Raises:
            ValueError: the text to replace does not occur exactly once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} has {count} times, not once:\n{self.old}")
        return text.replace(self.old, self.new)

    def is_noticed_by(self, message: str) -> bool:
        """Whether a test's error shows that the test noticed the edit, and not a broken import."""
        expected = self.error or r"AssertionError|assert |Failed: (?!Timeout)"
        return re.match(expected, message) is not None


def all_mutants() -> dict[str, Mutant]:
    """The mutants by name."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {name: msgspec.convert(fields, Mutant) for name, fields in table.items()}
