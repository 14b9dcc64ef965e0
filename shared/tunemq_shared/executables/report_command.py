"""``tunemq report``: the command by which programs in trials report a result.

It runs once per step, so it must start fast: it imports only a few modules, without argparse and
without other modules of TuneMQ.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence

_USAGE = """\
usage: tunemq report NAME=VALUE ... [--checkpoint DIR]
       tunemq report '{"NAME": VALUE, ...}' [--checkpoint DIR]

Reports a result of the trial that this runs in, which `tunemq run` or tune.executable() has
started, and returns when the trial may continue. The files in DIR are kept as the checkpoint that
contains the result; without --checkpoint, those in $TUNEMQ_CHECKPOINT_DIR are.

Exit codes: 0 the trial has the result; 1 it has not, or the trial has ended; 64 invalid arguments,
or no trial runs here.
"""
_EX_USAGE = 64
#: Same as in `report_line`, which is not imported here.
_VARIABLE = "TUNEMQ_REPORT"
#: Same as in `tunemq_shared.base.decoding_errors`.
_NO_JSON = (ValueError, RecursionError)


class _Unusable(Exception):
    pass


def main(arguments: Sequence[str]) -> int:
    """Report the metrics in the arguments; returns the exit code."""
    if "-h" in arguments or "--help" in arguments:
        sys.stdout.write(_USAGE)
        return 0
    try:
        said = json.dumps(_message(arguments)).encode() + b"\n"
        path = os.environ.get(_VARIABLE, "")
        if not path:
            raise _Unusable(
                f"no trial runs here: ${_VARIABLE} is not set. Programs that `tunemq run` or"
                " tune.executable() has started call it; in Python functions call tune.report()."
            )
    except _Unusable as problem:
        return _say(str(problem), _EX_USAGE)
    try:
        answer = _asked(path, said)
    except OSError as problem:
        return _say(f"the trial does not answer at {path}: {problem}; it has ended.", 1)
    if not answer:
        return _say("the trial has ended.", 1)
    problem_told = json.loads(answer)["problem"]
    return _say(problem_told, 1) if problem_told else 0


def _asked(path: str, said: bytes) -> bytes:
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
        line.sendall(said)
        answer = b""
        while not answer.endswith(b"\n"):
            try:
                piece = line.recv(65536)
            except ConnectionResetError:
                return b""
            if not piece:
                return b""
            answer += piece
    return answer


def _message(arguments: Sequence[str]) -> dict[str, object]:
    metrics: dict[str, object] = {}
    checkpoint = ""
    left = list(arguments)
    while left:
        given = left.pop(0)
        if given == "--checkpoint":
            if not left:
                raise _Unusable("--checkpoint needs a folder.")
            checkpoint = _folder(left.pop(0))
        elif given.startswith("--checkpoint="):
            checkpoint = _folder(given.partition("=")[2])
        elif given.startswith("{"):
            metrics.update(_object(given))
        else:
            name, equals, value = given.partition("=")
            if not equals or not name or name.startswith("-"):
                raise _Unusable(f"{given!r} is no metric; write NAME=VALUE, such as loss=0.3.")
            metrics[name] = _value(value)
    if not metrics:
        raise _Unusable("there is nothing to report; write NAME=VALUE, such as loss=0.3.")
    return {"metrics": metrics, "checkpoint": checkpoint}


def _folder(given: str) -> str:
    if not os.path.isdir(given):
        raise _Unusable(f"--checkpoint {given!r} is no folder; put the files into one.")
    return os.path.abspath(given)


def _object(given: str) -> dict[str, object]:
    try:
        found = json.loads(given)
    except _NO_JSON as error:
        raise _Unusable(f"{given!r} is no JSON object: {error}.") from error
    if not isinstance(found, dict):
        raise _Unusable(f"{given!r} is no JSON object.")
    return found


def _value(text: str) -> object:
    """Parse a number, true, false, null, a list or an object of JSON; else return the text."""
    # `1_000` stays a text: only Python takes it for a number.
    for read in (json.loads,) if "_" in text else (int, float, json.loads):
        try:
            return read(text)
        except _NO_JSON:
            continue
    return text


def _say(problem: str, code: int) -> int:
    sys.stderr.write(f"tunemq report: {problem}\n")
    return code
