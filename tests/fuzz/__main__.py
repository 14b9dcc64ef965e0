"""`make fuzz`: run malformed input through every decoder of the program, for some minutes.

    python -m tests.fuzz --seconds 300 --jobs 2
    python -m tests.fuzz --decoder manifest --seconds 60
    python -m tests.fuzz --decoder manifest --input build/fuzz/manifest-1a2b3c   # what was found

Exits with 1 if a decoder raised an unexpected error or a process died; keeps that input.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import mmap
import os
import resource
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from pathlib import Path
from typing import Any, Final

from tests.fuzz.decoder import Bench, Decoder
from tests.fuzz.decoders import all_decoders
from tests.fuzz.fuzzing import Fuzzer, in_turns

_FOUND: Final = Path("build", "fuzz")
#: A reader that takes more of it than this for a few bytes of input is at fault.
_MEMORY: Final = 4 * 2**30
_ROUND: Final = 50


def main() -> int:
    """Fuzz; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--decoder", help="only those whose name has this in it")
    parser.add_argument("--input", type=Path, help="try only the content of this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.seed is None:
        options.seed = int.from_bytes(os.urandom(4), "big")
    if options.input:
        return _again(options)
    return _child(options) if options.child else _all(options)


def _all(options: argparse.Namespace) -> int:
    _FOUND.mkdir(parents=True, exist_ok=True)
    sys.stdout.write(f"seed {options.seed}, {options.jobs} processes, {options.seconds:g} s\n")
    children = []
    for number in range(options.jobs):
        line = [sys.executable, "-m", "tests.fuzz", "--seconds", str(options.seconds)]
        line += ["--seed", str(options.seed + number), "--child", str(_FOUND / f"now-{number}")]
        line += ["--decoder", options.decoder] if options.decoder else []
        children.append(subprocess.Popen(line, stdout=subprocess.PIPE, text=True))
    tallies: dict[str, dict[str, Any]] = {}
    failures, deaths = [], []
    for number, child in enumerate(children):
        said, _ = child.communicate()
        with contextlib.suppress(json.JSONDecodeError, IndexError):
            for name, one in json.loads(said.splitlines()[-1]).items():
                _add(tallies.setdefault(name, {"taken": 0, "rejected": 0, "failures": []}), one)
        if child.returncode:
            deaths.append((number, child.returncode))
    sys.stdout.write(f"{'decoder':<60}{'taken':>10}{'rejected':>10}{'wrong':>7}\n")
    for name, one in sorted(tallies.items()):
        failures += one["failures"]
        wrong = len(one["failures"])
        sys.stdout.write(f"{name:<60}{one['taken']:>10}{one['rejected']:>10}{wrong:>7}\n")
    tried = sum(one["taken"] + one["rejected"] for one in tallies.values())
    sys.stdout.write(f"{tried} inputs on {len(tallies)} decoders, {len(failures)} wrong\n")
    for problem, path in failures:
        sys.stdout.write(f"WRONG {problem}\n  {path}\n")
    for number, code in deaths:
        sys.stdout.write(f"DEAD  exit code {code}; its last input: {_FOUND}/now-{number}\n")
    return int(bool(failures or deaths))


def _add(total: dict[str, Any], one: dict[str, Any]) -> None:
    for name in ("taken", "rejected"):
        total[name] += one[name]
    known = {problem for problem, _ in total["failures"]}
    total["failures"] += [found for found in one["failures"] if found[0] not in known]


def _child(options: argparse.Namespace) -> int:
    _prepare()
    with _last_input(Path(options.child)) as note, _bench() as bench:
        fuzzers = [Fuzzer(one, options.seed, note) for one in _chosen(options, bench)]
        until = time.monotonic() + options.seconds
        for fuzzer in fuzzers:
            fuzzer.begin()
        for fuzzer in in_turns(fuzzers, until):
            for _ in range(_ROUND):
                fuzzer.step()
    found = {}
    for fuzzer in fuzzers:
        tally = fuzzer.tally
        kept = [(one.kind, str(_keep(one.decoder, one.data))) for one in tally.failures]
        found[fuzzer.decoder.name] = {
            "taken": tally.taken,
            "rejected": tally.rejected,
            "failures": kept,
        }
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


def _again(options: argparse.Namespace) -> int:
    """Try one input, with all that a person wants to see."""
    _prepare()
    code = 0
    with _bench() as bench:
        for decoder in _chosen(options, bench):
            sys.stdout.write(f"{decoder.name}: ")
            try:
                sys.stdout.write(f"{decoder.read(options.input.read_bytes())!r}\n")
            except decoder.refuses as rejection:
                sys.stdout.write(f"refused: {rejection!r}\n")
            except Exception:  # noqa: BLE001  shown to the developer
                sys.stdout.write(traceback.format_exc())
                code = 1
    return code


def _prepare() -> None:
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))


@contextlib.contextmanager
def _bench() -> Any:
    with tempfile.TemporaryDirectory(prefix="tunemq-fuzz-") as folder, Bench(Path(folder)) as bench:
        yield bench


def _chosen(options: argparse.Namespace, bench: Bench) -> list[Decoder]:
    chosen = [one for one in all_decoders(bench) if (options.decoder or "") in one.name]
    if not chosen:
        sys.exit(f"no decoder has {options.decoder!r} in its name")
    return chosen


@contextlib.contextmanager
def _last_input(path: Path) -> Any:
    """Return a function that copies each input to a file that outlives this process."""
    size = 2**20
    with path.open("wb+") as file:
        file.truncate(size)
        with mmap.mmap(file.fileno(), size) as shared:

            def note(data: bytes) -> None:
                shared[: len(data) + 8] = len(data).to_bytes(8, "big") + data

            yield note
    path.unlink()


def _keep(decoder: str, data: bytes) -> Path:
    name = "".join(letter if letter.isalnum() else "-" for letter in decoder)
    path = _FOUND / f"{name}-{zlib.crc32(data):08x}"
    path.write_bytes(data)
    return path


if __name__ == "__main__":
    sys.exit(main())
