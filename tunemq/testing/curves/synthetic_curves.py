"""`SyntheticCurves`: learning curves that approach a known function."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from tunemq_scheduler.search.domains import uniform
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.trial.results import DONE, TIME_THIS_ITER_S

#: Of the Hartmann function in six dimensions: weights, scales, and centres in ten-thousandths.
_WEIGHTS: Final = (1.0, 1.2, 3.0, 3.2)
_SCALES: Final = (
    (10, 3, 17, 3.5, 1.7, 8),
    (0.05, 10, 17, 0.1, 8, 14),
    (3, 3.5, 1.7, 10, 17, 8),
    (17, 8, 0.05, 10, 0.1, 14),
)
_CENTRES: Final = (
    (1312, 1696, 5569, 124, 8283, 5886),
    (2329, 4135, 8307, 3736, 1004, 9991),
    (2348, 1451, 3522, 2883, 3047, 6650),
    (4047, 8828, 8732, 5743, 1091, 381),
)


def _branin(x: Sequence[float]) -> float:
    a, b = 15 * x[0] - 5, 15 * x[1]
    bend = b - 5.1 / (4 * math.pi**2) * a**2 + 5 / math.pi * a - 6
    return bend**2 + 10 * (1 - 1 / (8 * math.pi)) * math.cos(a) + 10


def _hartmann(x: Sequence[float]) -> float:
    return -sum(
        weight
        * math.exp(
            -sum(
                scale * (one - centre / 10_000) ** 2
                for scale, one, centre in zip(scales, x, centres, strict=True)
            )
        )
        for weight, scales, centres in zip(_WEIGHTS, _SCALES, _CENTRES, strict=True)
    )


#: Name -> function on the unit cube, its dimensions, its minimum, and its usual size.
_FUNCTIONS: Final[dict[str, tuple[Callable[[Sequence[float]], float], int, float, float]]] = {
    "branin": (_branin, 2, 0.397887, 50.0),
    "hartmann6": (_hartmann, 6, -3.32237, 3.0),
}


class SyntheticCurves:
    """Learning curves that approach the value of a known function, as `simulate` takes them.

    The metric ``loss`` of a configuration ends at the function's value above its minimum. It begins
    above that by the function's usual size, and comes down with a power of the step between 1/2 and
    3/2 that is random for each configuration. So curves cross each other. A step takes 0.5 to 1.5
    seconds.

    Args:
        function (str): ``"branin"`` or ``"hartmann6"``. Its parameters ``x0``, ``x1``, ... are
            between 0 and 1.
        steps (int): the length of each curve.
        noise (float): the standard deviation of normal noise on each loss, in units of the
            function's usual size.
        seed (int): seeds the noise, the speeds and the durations.

    Attributes:
        param_space: the search space.
        steps: the length of each curve.

    Raises:
        ConfigError: there is no such function.

    Example:
        >>> from tunemq.testing import SyntheticCurves, simulate
        >>> curves = SyntheticCurves("branin", steps=27)
        >>> search = simulate("asha", None, curves, metric="loss", mode="min", num_samples=100)
        >>> search.best_over_time()[-1].value < 3
        True
    """

    def __init__(
        self, function: str, *, steps: int = 81, noise: float = 0.01, seed: int = 0
    ) -> None:
        if function not in _FUNCTIONS:
            raise ConfigError(
                f"SyntheticCurves({function!r}): there is no such function; use "
                f"{' or '.join(map(repr, _FUNCTIONS))}."
            )
        self._function, dimensions, self._minimum, self._size = _FUNCTIONS[function]
        self.param_space = {f"x{place}": uniform(0.0, 1.0) for place in range(dimensions)}
        self.steps, self._noise, self._seed = steps, noise, seed

    def __call__(self, config: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Return the loss of a configuration at a step."""
        x = [config[name] for name in self.param_space]
        own = random.Random(f"{self._seed} {x}")
        rate, seconds = 0.5 + own.random(), 0.5 + own.random()
        above = self._function(x) - self._minimum
        noise = random.Random(f"{self._seed} {x} {step}").gauss(0.0, self._noise)
        last = self.steps**-rate
        left = max(0.0, step**-rate - last) / (1 - last) if step > 1 else 1.0
        found = {"loss": above + self._size * (left + noise), TIME_THIS_ITER_S: seconds}
        return {**found, DONE: True} if step >= self.steps else found
