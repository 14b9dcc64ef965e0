"""`make defences`: take one defence after another out of the product; a test must notice each time.

    python -m tests.mutants --jobs 4
    python -m tests.mutants -k journal

Works on copies of the checkout in a temporary folder. The tests of ``mutants.toml`` run once on an
unchanged copy, where they must pass, then with each mutant, where they must fail. The exit code is
1 where a mutant survives.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import psutil

from tests.mutants.table import ROOT, Mutant, all_mutants
from tunemq_shared.system.process_attributes import become_subreaper

_OPTIONS: Final = ("-q", "--tb=no", "-rfEs", "-p", "no:randomly", "-p", "no:cacheprovider")


class _Verdict(NamedTuple):
    """The outcome of one mutant."""

    is_noticed: bool
    seconds: float
    #: A line for each test that must fail.
    lines: list[str]


def main() -> int:
    """Run the command line; 0 when a test noticed each mutant."""
    parser = argparse.ArgumentParser(prog="make defences", description=__doc__.split("\n")[0])
    parser.add_argument("-k", metavar="TEXT", default="", help="only mutants with this in the name")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at once")
    options = parser.parse_args()
    chosen = {name: mutant for name, mutant in all_mutants().items() if options.k in name}
    if not chosen:
        parser.error(f"no mutant has {options.k!r} in its name")
    with tempfile.TemporaryDirectory(prefix="tunemq-mutants-") as scratch:
        return _run_all(Path(scratch), chosen, options.jobs)


def _run_all(scratch: Path, mutants: dict[str, Mutant], jobs: int) -> int:
    unchanged = _copy_checkout(scratch / "unchanged")
    tests = dict.fromkeys(test for mutant in mutants.values() for test in mutant.tests)
    print(f"{len(tests)} tests on the unchanged copy ...", flush=True)
    code, output = _pytest(unchanged, list(tests), "-n", str(jobs), "--dist", "worksteal")
    if code != 0 or "\nSKIPPED" in output:
        print(output, "The tests must pass before a mutant can be judged.", sep="\n")
        return 1
    survivors = []
    width = max(map(len, mutants))
    with ProcessPoolExecutor(jobs, initializer=become_subreaper) as pool:
        running = {
            pool.submit(_run_one, unchanged, scratch / name, mutant): name
            for name, mutant in mutants.items()
        }
        for done in as_completed(running):
            name, verdict = running[done], done.result()
            word = "noticed" if verdict.is_noticed else "SURVIVED"
            print(
                f"{name:{width}}  {word} in {verdict.seconds:.0f} s", *verdict.lines, sep="\n    "
            )
            sys.stdout.flush()
            if not verdict.is_noticed:
                survivors.append(name)
    print(f"{len(mutants)} mutants, {len(mutants) - len(survivors)} noticed.")
    if survivors:
        print(f"SURVIVED: {', '.join(sorted(survivors))}")
    return 1 if survivors else 0


def _copy_checkout(folder: Path) -> Path:
    """Copy the files that git does not ignore, as they are now."""
    listing = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.split("\0"):
        if name and os.path.lexists(ROOT / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    packages = _build()["targets"]["wheel"]["packages"]
    code = f"import {', '.join(Path(one).name for one in packages)}"
    for package in packages:
        code += f"\nprint({Path(package).name}.__file__)"
    line = [sys.executable, "-P", "-c", code]
    environ = _environ(folder)
    found = subprocess.run(line, env=environ, cwd="/", capture_output=True, text=True, check=True)
    if found.stdout.split() != [str(folder / package / "__init__.py") for package in packages]:
        raise RuntimeError(f"the copy in {folder} is not what runs: {found.stdout}")
    return folder


def _build() -> dict[str, Any]:
    """How pyproject.toml has the packages built: where they are."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return cast("dict[str, Any]", tomllib.loads(text)["tool"]["hatch"]["build"])


def _run_one(unchanged: Path, folder: Path, mutant: Mutant) -> _Verdict:
    begun = time.monotonic()
    shutil.copytree(unchanged, folder, symlinks=True)
    path = folder / mutant.file
    path.write_text(mutant.mutated(path.read_text(encoding="utf-8")), encoding="utf-8")
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()
    try:
        _, output = _pytest(folder, mutant.tests)
    finally:
        for left in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
    shutil.rmtree(folder, ignore_errors=True)
    lines = [_line_of(mutant, test, output) for test in mutant.tests]
    is_noticed = all(line.startswith("failed ") for line in lines)
    return _Verdict(is_noticed, time.monotonic() - begun, lines)


def _line_of(mutant: Mutant, test: str, output: str) -> str:
    """The outcome of a test: ``failed``, or why that does not count."""
    found = re.findall(
        rf"^(FAILED|ERROR) {re.escape(test)}(?:\[.*?\])?(?: - (.*))?$", output, re.MULTILINE
    )
    name = test.partition("::")[2]
    if any(how == "FAILED" and mutant.is_noticed_by(message) for how, message in found):
        return f"failed {name}"
    return f"NOT FAILED {name} {found or output[-2000:]}"


def _pytest(folder: Path, tests: Sequence[str], *options: str) -> tuple[int, str]:
    """Run pytest; return its exit code and output."""
    # A file: processes that a mutant leaves running would keep a pipe open.
    with tempfile.TemporaryFile("w+") as output:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *_OPTIONS, *options, *tests],
            env=_environ(folder),
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
            start_new_session=True,  # a mutant may kill its whole process group
        )
        output.seek(0)
        return done.returncode, output.read()


def _environ(folder: Path) -> dict[str, str]:
    """The environment in which the packages of this copy run, in processes of tests, too."""
    roots = os.pathsep.join(str(folder / root) for root in _build()["dev-mode-dirs"])
    # CI: a missing service fails a test, and the lines of failed tests are whole.
    return {**os.environ, "PYTHONPATH": roots, "CI": "true"}


if __name__ == "__main__":
    sys.exit(main())
