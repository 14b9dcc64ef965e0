"""Ray Tune's ``tune.logger``: loggers write trials' results to files."""

from __future__ import annotations

from tunemq_scheduler.output.loggers import CSVLoggerCallback, JsonLoggerCallback, LoggerCallback

__all__ = ["CSVLoggerCallback", "JsonLoggerCallback", "LoggerCallback"]
