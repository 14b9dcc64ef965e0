"""GPU use of trials, summed over their attempts."""

from __future__ import annotations

import pytest

from tunemq_shared.protocol.device_use import DeviceUse, add_up


def test_uses_of_one_device_are_added_up_and_others_kept_apart():
    first = DeviceUse("A", "H100", 10.0, 0.5, 0.2, 3e9, 100.0)
    second = DeviceUse("A", "H100", 30.0, 1.0, 0.6, 1e9, 50.0)
    other = DeviceUse("B", "H100", 5.0)
    one, two = add_up(add_up((), [first]), [second, other])
    assert one == DeviceUse("A", "H100", 40.0, 0.875, pytest.approx(0.5), 3e9, 150.0)
    assert two == other


def test_unknown_value_does_not_hide_a_known_one():
    silent = DeviceUse("A", "H100", 10.0, 0.5)
    told = DeviceUse("A", "H100", 0.0, 0.5, 0.5, 1e9, 7.0)
    assert add_up([silent], [silent]) == (DeviceUse("A", "H100", 20.0, 0.5),)
    (one,) = add_up([silent], [told])
    assert one == DeviceUse("A", "H100", 10.0, 0.5, 0.5, 1e9, 7.0)
