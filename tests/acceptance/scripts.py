"""Scripts as users write and start them, each with its farm, in separate folders."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def write(folder: Path, files: dict[str, str]) -> Path:
    """Write files into a folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return folder


def run(folder: Path, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` in the folder, as a person would at a prompt; ``given`` is typed."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        input=given,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
