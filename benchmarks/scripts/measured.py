"""How a script reports its measurements: a line of JSON with a prefix; libraries print, too.

Each script runs in an interpreter that has one of the peers. So the modules that scripts share are
in the same folder, and import nothing else of this package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MARK = "MEASURED "


def tell(figures: Mapping[str, Any]) -> None:
    print(MARK + json.dumps(figures), flush=True)
