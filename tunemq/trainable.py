"""Ray Tune's ``tune.trainable``: what a trial runs."""

from __future__ import annotations

from tunemq_shared.function_runner import FunctionRunner, wrap_function
from tunemq_shared.parameters import with_parameters
from tunemq_shared.status_reporter import StatusReporter
from tunemq_shared.trainable import Trainable

__all__ = ["FunctionRunner", "StatusReporter", "Trainable", "with_parameters", "wrap_function"]
