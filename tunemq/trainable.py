"""Ray Tune's ``tune.trainable``: the code that a trial runs."""

from __future__ import annotations

from tunemq_shared.trainable.function_runner import FunctionRunner, wrap_function
from tunemq_shared.trainable.parameters import with_parameters
from tunemq_shared.trainable.reporter_argument import StatusReporter
from tunemq_shared.trainable.trainable import Trainable

__all__ = ["FunctionRunner", "StatusReporter", "Trainable", "with_parameters", "wrap_function"]
