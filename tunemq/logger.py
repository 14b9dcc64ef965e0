"""Ray Tune's ``tune.logger``: what writes a trial's results to files."""

from __future__ import annotations

from tunemq_scheduler.output.loggers import CSVLoggerCallback, JsonLoggerCallback, LoggerCallback

__all__ = ["CSVLoggerCallback", "JsonLoggerCallback", "LoggerCallback"]
