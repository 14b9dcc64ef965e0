"""Whether other users may replace the entries of a folder."""

from __future__ import annotations

import os
import stat


def lets_others_replace(folder: os.stat_result) -> bool:
    """Whether users other than a folder's owner may replace the entries of others in it."""
    is_for_others = folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return bool(is_for_others) and not folder.st_mode & stat.S_ISVTX
