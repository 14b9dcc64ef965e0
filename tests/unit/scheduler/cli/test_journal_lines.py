"""The lines of `tunemq journal show`."""

from __future__ import annotations

import json

import pytest

from tunemq_scheduler.cli.journal_command import _fields
from tunemq_shared.code.config_packing import pack_config
from tunemq_shared.protocol import messages as m


@pytest.mark.parametrize(("config", "shown"), [(b"", None), (pack_config({"lr": 0.1}), "lr")])
def test_journal_show_action_with_and_without_a_configuration_is_shown(
    config: bytes, shown: str | None
) -> None:
    fields = _fields(m.ActionTaken("t_00001", m.EXPLOIT, "better", "t_00002", config=config))
    text = json.dumps(fields, default=repr)
    assert (fields["config"] is None) is (shown is None)
    assert (shown or "null") in text
