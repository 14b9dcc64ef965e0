"""Write ``docs/parity.md``: for each thing that Ray Tune did, which test here shows it.

    python docs/parity.py            write it
    python docs/parity.py --check    exit 1 where it is not up to date

The items and their titles are in ``parity.toml``, and so is what replaces one or what one still
lacks. What shows that one holds is a test marked with ``@pytest.mark.parity(12, 13)``, or a whole
file with ``pytestmark = pytest.mark.parity(...)``. The tests are read, not imported, so this takes
no time and needs no service.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests"
PAGE = HERE / "parity.md"

HEAD = """\
# Parity with Ray Tune

One line for each of the {count} things that Ray Tune's function runner, trial runner, trial, trial
executor and syncer do, or were meant to do, over the years. Shown by a test: {shown}. Replaced by
something else: {replaced}. Not yet, or only in part: {open}.

Written by `python docs/parity.py` from the markers in the tests; not to be edited by hand.
"""


def marks(nodes: list[ast.expr]) -> Iterator[int]:
    """The items in those of the expressions that are calls of ``pytest.mark.parity``."""
    for node in nodes:
        if isinstance(node, (ast.List, ast.Tuple)):
            yield from marks(node.elts)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.parity":
            for argument in node.args:
                yield int(ast.literal_eval(argument))


def marked(tree: ast.AST, prefix: str = "") -> Iterator[tuple[int, str]]:
    """Each marked item of a file with the name of its test, "" for the whole file."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            yield from ((item, prefix.removesuffix("::")) for item in marks([node.value]))
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield from ((item, prefix + node.name) for item in marks(node.decorator_list))
            if isinstance(node, ast.ClassDef):
                yield from marked(node, f"{prefix}{node.name}::")


def evidence() -> dict[int, list[str]]:
    """Item -> the tests that show it, as links."""
    found: dict[int, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        place = path.relative_to(HERE.parent).as_posix()
        for item, name in marked(ast.parse(path.read_text(encoding="utf-8"))):
            title = f"{path.stem}::{name}" if name else path.stem
            found.setdefault(item, []).append(f"[{title}](../{place})")
    return found


def page() -> str:
    """The whole page."""
    table = tomllib.loads((HERE / "parity.toml").read_text(encoding="utf-8"))
    titles = {int(item): title for item, title in table["titles"].items()}
    instead = {int(item): text for item, text in table["instead"].items()}
    lacking = {int(item): text for item, text in table["lacking"].items()}
    sections = {section["from"]: section["title"] for section in table["section"]}
    shown = evidence()
    if unknown := sorted(set(shown) - set(titles)):
        raise SystemExit(f"tests are marked with parity items that do not exist: {unknown}")
    whole = set(shown) - set(lacking)
    replaced = set(instead) - set(lacking) - whole

    lines = [
        HEAD.format(
            count=len(titles),
            shown=len(whole),
            replaced=len(replaced),
            open=len(titles) - len(whole) - len(replaced),
        )
    ]
    for item, title in sorted(titles.items()):
        if item in sections:
            lines += [f"## {sections[item]}\n", "| item | what | where |", "|--:|---|---|"]
        parts = [f"not yet: {lacking[item]}"] if item in lacking else []
        parts += [f"instead: {instead[item]}"] if item in instead else []
        parts += shown.get(item, [])
        lines.append(f"| {item} | {title} | {'; '.join(parts) or 'not yet'} |")
        if item + 1 in sections:
            lines.append("")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page, or check it; returns the exit status."""
    new = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(new, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == new:
        return 0
    print("docs/parity.md is not up to date: run `python docs/parity.py`.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
