"""How a scheduler that runs is named to another one that wants its place."""

from __future__ import annotations

from tunemq_scheduler.farm.holder import Holder


def test_holder_of_a_farm_names_no_search():
    assert "search" not in str(Holder.this_process(""))
    assert str(Holder.this_process("mnist")).endswith(", with the search mnist")
