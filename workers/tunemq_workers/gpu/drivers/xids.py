"""Meanings of the errors that the driver reports by number (XIDs).

The lists follow NVIDIA's XID catalog
(https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html). If the catalog asks to reset
the GPU, restart the machine, or drain it, the device must not be used. If it asks to restart the
application, the application may have caused the error. XID 109 is an exception: the catalog asks
for a reset, but NVIDIA's device plugin for Kubernetes considers the device healthy. Withholding it
would lose a device whenever a trial's kernel hangs, so the device stays usable.

All other errors, and unknown ones, have no consequence.
"""

from __future__ import annotations

from typing import Final

_OF_THE_APPLICATION: Final = {
    8: "the GPU stopped processing",
    11: "an invalid command stream",
    13: "a graphics engine exception, such as an access out of bounds",
    25: "an invalid command stream",
    31: "a GPU memory page fault",
    32: "an invalid command stream",
    39: "a copy engine exception",
    40: "a copy engine exception",
    41: "a copy engine exception",
    43: "the GPU stopped processing",
    45: "what was running is cleaned up after an error, or after its process was killed",
    68: "a video decoder exception",
    69: "a graphics engine class error",
    80: "corrupted data was sent to the GPU",
    94: "a contained memory error",
    109: "a context switch took too long",
}

_OF_THE_DEVICE: Final = {
    46: "the GPU stopped processing and needs a reset",
    48: "a double bit memory error",
    62: "its microcontroller has halted",
    64: "a memory row could not be remapped",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    95: "an uncontained memory error",
    110: "a security fault",
    119: "its system processor does not answer",
    120: "an error of its system processor",
    136: "an NVLink could not be trained",
    140: "an unrecovered memory error",
    143: "the GPU could not be initialised",
    155: "an NVLink error",
    156: "a resource was retired, which needs a reset",
    158: "a fatal timeout of the GPU",
}


def meaning(number: int) -> str:
    """Return a description of the error for people."""
    text = _OF_THE_DEVICE.get(number) or _OF_THE_APPLICATION.get(number)
    return f"XID {number}: {text}" if text else f"XID {number}"


def unusable_after(number: int) -> str:
    """Return why the device must not be used after this error; "" if it stays usable."""
    return meaning(number) if number in _OF_THE_DEVICE else ""
