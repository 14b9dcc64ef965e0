"""Find the addresses at which other machines can reach this one."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Final

_IPV4: Final = Path("/proc/net/fib_trie")
_IPV6: Final = Path("/proc/net/if_inet6")
_LOCAL: Final = re.compile(r"\|-- ([0-9.]+)\n\s+/32 host LOCAL\n")


def own_addresses() -> list[str]:
    """List this machine's addresses, sorted, except loopback and link-local ones.

    Raises:
        OSError: The kernel does not show them.
    """
    found: set[ipaddress.IPv4Address | ipaddress.IPv6Address] = set()
    found |= {ipaddress.IPv4Address(text) for text in _LOCAL.findall(_IPV4.read_text())}
    if _IPV6.exists():  # missing if IPv6 is off
        lines = _IPV6.read_text().splitlines()
        found |= {ipaddress.IPv6Address(int(line.split()[0], 16)) for line in lines}
    return sorted(str(one) for one in found if not (one.is_loopback or one.is_link_local))
