"""Counts the phrases that this project avoids, in what people read.

That is strings, docstrings, comments, documents and the names of tests; in shell, YAML and
Dockerfiles the comments.

    python tools/check_phrases.py [--list]

Fails where there are more than `MOST` of them. `--list` prints each with its place. Which words to
use instead: CONTRIBUTING.md.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

#: This many remain, most in `deploy`, user names and the list below. Lower it with each rewrite.
MOST: Final = 54
_PHRASES: Final = (
    "nobody",
    "somebody",
    "whoever",
    "what is",
    "of its own",
    "of one's own",
    "so many",
    "is over",
    "are over",
    "goes on",
    "go on",
    "went on",
    "mend",
    "mends",
    "mended",
    "is of no use",
    "of use",
    "keeper",
    "ear",
    "luggage",
    "mailbox",
    "goodbye",
    "incarnation",
    "tenant",
)
#: Not after "{", where a placeholder begins.
_PATTERN: Final = re.compile(
    r"(?<![\w{-])("
    + "|".join(re.escape(one).replace(r"\ ", r"[\s_]+") for one in _PHRASES)
    + r")(?![\w-])",
    re.IGNORECASE,
)


def main() -> None:
    """Count, and fail above the limit."""
    root = Path(__file__).resolve().parents[1]
    listed = subprocess.run(
        ["git", "ls-files"],  # noqa: S607
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    count: Counter[str] = Counter()
    for name in listed:
        for line, text in _texts(root / name):
            for found in _PATTERN.finditer(text):
                count[re.sub(r"\s+", " ", found[0].lower())] += 1
                if "--list" in sys.argv:
                    print(f"{name}:{line}: {found[0]!r}")
    total = count.total()
    print(", ".join(f"{phrase} {times}" for phrase, times in count.most_common()))
    print(f"{total} phrases to be avoided, {MOST} are the most")
    sys.exit(total > MOST)


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """The text for people in a file, with the line where it begins."""
    if path.suffix == ".md" and "decisions" not in path.parts:
        yield from enumerate(path.read_text("utf-8").split("\n"), 1)
    if path.suffix in {".sh", ".yml", ".yaml", ".Dockerfile"} or path.name == "Makefile":
        for line, text in enumerate(path.read_text("utf-8").split("\n"), 1):
            yield line, " ".join(re.findall(r"(?:^|\s)#(.*)", text))
    if path.suffix != ".py":
        return
    source = path.read_text("utf-8")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.lineno, node.name.replace("_", " ")


if __name__ == "__main__":
    main()
