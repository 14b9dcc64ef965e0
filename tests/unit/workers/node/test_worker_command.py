"""What `tunemq worker` checks before it starts."""

from __future__ import annotations

import errno
import os

import pytest

from tunemq.__main__ import main


def test_worker_on_a_kernel_that_is_too_old_names_the_version_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rejected(_pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", rejected)
    assert main(["worker", "--redis", "redis://127.0.0.1:1/0"]) == 64
    said = capsys.readouterr().err
    assert f"(Linux {os.uname().release}) rejects pidfd_open (Function not implemented)" in said
    assert "needs Linux 5.4 or newer" in said
