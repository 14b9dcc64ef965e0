"""The names of the files that the scheduler writes into a trial's folder, here and in a store."""

from __future__ import annotations

from typing import Final

#: The trial's configuration, its results, and its failures.
PARAMS_JSON: Final = "params.json"
PARAMS_PICKLE: Final = "params.pkl"
RESULT_JSON: Final = "result.json"
PROGRESS_CSV: Final = "progress.csv"
ERROR_FILE: Final = "error.txt"

RECORD_FILES: Final = frozenset({PARAMS_JSON, PARAMS_PICKLE, RESULT_JSON, PROGRESS_CSV, ERROR_FILE})
