"""What a command prints where the locale or the file permissions do not fit."""

from __future__ import annotations

import argparse
import errno
import io
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tunemq_scheduler.cli.main import AddParser, main


def command(run: Callable[[argparse.Namespace], int]) -> AddParser:
    def add(groups: Any) -> None:
        groups.add_parser("try").set_defaults(run=run)

    return add


def test_text_that_the_locale_cannot_encode_ends_no_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="iso-8859-1"))

    def say(_options: argparse.Namespace) -> int:
        sys.stdout.write("é a long reason…\nall\n")
        return 0

    assert main("1", ["try"], others=[command(say)]) == 0
    assert written.getvalue().decode("iso-8859-1") == "é a long reason?\nall\n"


def test_missing_permission_is_reported_with_the_file_and_the_user(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def look(_options: argparse.Namespace) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "/root/search.py")

    assert main("1", ["try"], others=[command(look)]) == 64
    said = capsys.readouterr().err
    assert said.startswith("tunemq: the user ")
    assert said.endswith(" has no permission for /root/search.py.\n")
