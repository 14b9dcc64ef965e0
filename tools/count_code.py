"""Counts the product's lines of code: those that hold more than a comment or a docstring.

    python tools/count_code.py [CHECKOUT]

Prints a table by folder. `tunemq/testing` is for tests of others, and counts apart.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path
from typing import Final

_PRODUCT: Final = ("tunemq", "scheduler", "workers", "shared")
_APART: Final = Path("tunemq", "testing")
_NO_CODE: Final = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
)
_HAVE_DOCSTRINGS: Final = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def main() -> None:
    """Print the table."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parents[1])
    lines: Counter[Path] = Counter()
    for top in _PRODUCT:
        for path in sorted((root / top).rglob("*.py")):
            lines[path.parent.relative_to(root)] += len(code_lines(path.read_text("utf-8")))
    apart = sum(count for folder, count in lines.items() if folder.is_relative_to(_APART))
    for folder, count in sorted(lines.items()):
        print(f"{count:7,}  {folder}")
    print(f"{lines.total() - apart:7,}  without {_APART}")


def code_lines(source: str) -> set[int]:
    """The numbers of the lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _HAVE_DOCSTRINGS) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return lines


if __name__ == "__main__":
    main()
