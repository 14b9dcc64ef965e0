"""Loggers: write trials' results into their folders; they run only in the scheduler."""

from tunemq_scheduler.output.loggers.csv_logger import CSVLoggerCallback
from tunemq_scheduler.output.loggers.json_logger import JsonLoggerCallback
from tunemq_scheduler.output.loggers.logger import LoggerCallback

__all__ = ["CSVLoggerCallback", "JsonLoggerCallback", "LoggerCallback"]
