"""Finds each place of the program where bytes or text become values: none is to be left out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_PACKAGES: Final = {
    "shared": ("tunemq_shared",),
    "scheduler": ("tunemq_scheduler",),
    "workers": ("tunemq_workers",),
    ".": ("tunemq",),
}
#: Functions that decode, by module; a module may be imported under another name.
_READERS: Final = {
    "msgspec": {"convert"},
    "msgspec.msgpack": {"Decoder", "decode"},
    "msgspec.json": {"Decoder", "decode"},
    "msgspec.toml": {"decode"},
    "msgspec.yaml": {"decode"},
    "json": {"load", "loads", "JSONDecoder"},
    "tomllib": {"load", "loads"},
    "base64": {"b64decode", "standard_b64decode", "urlsafe_b64decode"},
    "binascii": {"a2b_base64", "unhexlify"},
    "zlib": {"decompress", "decompressobj"},
    "gzip": {"open", "GzipFile", "decompress"},
    "lzma": {"open", "decompress"},
    "tarfile": {"open", "TarFile"},
    "zipfile": {"ZipFile"},
    "configparser": {"ConfigParser", "RawConfigParser"},
    "csv": {"reader", "DictReader"},
    "pickle": {"load", "loads", "Unpickler"},
    "cloudpickle": {"load", "loads"},
    "xml.etree.ElementTree": {"fromstring", "parse", "XMLParser"},
    "yaml": {"SafeLoader", "safe_load", "load"},
    "pickletools": {"genops"},
    "http.client": {"HTTPResponse"},
    "http.server": {"BaseHTTPRequestHandler"},
}
#: Names of methods that decode a binary layout, on any object.
_METHODS: Final = {"unpack_from", "iter_unpack"}
_STRUCT: Final = {"unpack", "unpack_from", "iter_unpack"}


def decoding_places() -> set[str]:
    """All of them, as ``module:function``, or the name that a module gives a decoder."""
    found = set()
    for folder, packages in _PACKAGES.items():
        for package in packages:
            for path in sorted((ROOT / folder / package).rglob("*.py")):
                module = ".".join(path.relative_to(ROOT / folder).with_suffix("").parts)
                source = path.read_text(encoding="utf-8")
                found |= {f"{module}:{name}" for name in places_in(source)}
    return found


def places_in(source: str) -> set[str]:
    """Likewise of one module, by its source."""
    tree = ast.parse(source)
    names = dict(_imported(tree))
    return {_name(outer) for outer, node in _walk(tree, ()) if _reads(node, names)}


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (
                    alias.asname or alias.name.partition(".")[0],
                    (alias.name if alias.asname else alias.name.partition(".")[0]),
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _walk(
    node: ast.AST, outer: tuple[ast.AST, ...]
) -> Iterator[tuple[tuple[ast.AST, ...], ast.AST]]:
    for child in ast.iter_child_nodes(node):
        yield outer, child
        named = isinstance(child, ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign)
        yield from _walk(child, (*outer, child) if named else outer)


def _name(outer: tuple[ast.AST, ...]) -> str:
    parts = []
    for node in outer:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            parts.append(node.name)
        elif not any(isinstance(one, ast.FunctionDef) for one in outer):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            parts.append(ast.unparse(target))
    return ".".join(parts)


def _reads(node: ast.AST, names: dict[str, str]) -> bool:
    dotted = _dotted(node)
    if dotted is None:
        return False
    first, _, rest = dotted.partition(".")
    if first in names:
        home, _, name = f"{names[first]}{'.' if rest else ''}{rest}".rpartition(".")
        if name in _READERS.get(home, ()) or (home == "struct" and name in _STRUCT):
            return True
    return isinstance(node, ast.Attribute) and (
        node.attr in _METHODS
        or (node.attr == "unpack" and isinstance(node.value, ast.Call))
        or (node.attr == "unpack" and isinstance(node.value, ast.Name) and node.value.id.isupper())
    )


def _dotted(node: ast.AST) -> str | None:
    """A name with its parts; of anything else with an attribute, ``?`` and that."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.append(node.id)
    elif parts:
        parts.append("?")
    else:
        return None
    return ".".join(reversed(parts))
