"""Builds one configuration of a space: copies constants, picks from grids, draws, calls functions.

Each domain draws from a separate generator, seeded by the experiment's seed, the number of the
configuration and the domain's path. So a configuration does not depend on earlier draws, a resumed
search continues exactly, and a new domain in a space does not change the values of the others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tunemq_scheduler.search.domain_types import Domain, Function, GridSearch
from tunemq_scheduler.search.space import SpacePath, check_depth, path_name, rebuild
from tunemq_shared.base.errors import SearchSpaceError
from tunemq_shared.base.failure_text import one_line

Generators = Callable[[SpacePath], random.Random]


def generators(*seed: object) -> Generators:
    """Return a function that creates the generator of a path, seeded by ``seed`` and the path."""
    prefix = "/".join(map(str, seed))
    return lambda path: random.Random(f"{prefix}/{path_name(path)}")


def resolve(
    space: dict[Any, Any], picked: Mapping[SpacePath, Any], rng_for: Generators
) -> dict[Any, Any]:
    """Return a configuration of a space.

    Args:
        space: a space from `space.read_space`.
        picked: the value at each grid's path, from `space.GridCombinations.pick`.
        rng_for: returns the generator for the domain at a path.

    Raises:
        SearchSpaceError: a ``sample_from`` function raised, or such functions depend on each other.
    """
    resolver = _Resolver(picked, rng_for)
    resolver.root = space
    config: dict[Any, Any] = resolver.settle(space, ())
    return config


class _Resolver:
    """Resolves domains on demand: first those that a function reads."""

    def __init__(self, picked: Mapping[SpacePath, Any], rng_for: Generators) -> None:
        self.root: dict[Any, Any] = {}
        self._drawn: dict[SpacePath, Any] = {}
        self._picked = picked
        self._rng_for = rng_for
        self._underway: list[SpacePath] = []

    def settle(self, node: Any, path: SpacePath) -> Any:
        """Return the value at ``path`` in the configuration."""
        if isinstance(node, Domain):
            if path not in self._drawn:
                self._drawn[path] = self._draw(node, path)
            return self._drawn[path]
        if isinstance(node, SpecView):
            return node.plain()
        return rebuild(node, path, self.settle)

    def open(self, node: Any, path: SpacePath) -> Any:
        """Return the node at ``path``, resolved only as far as needed to access its children."""
        value = node if isinstance(node, dict) else self.settle(node, path)
        return SpecView(self, value, path) if isinstance(value, dict) else value

    def _draw(self, domain: Domain, path: SpacePath) -> Any:
        if path in self._underway:
            circle = [*self._underway[self._underway.index(path) :], path]
            raise SearchSpaceError(
                f"the sample_from at {path_name(path)!r} needs its own value: "
                f"{' -> '.join(map(path_name, circle))}; remove one of them from the circle."
            )
        self._underway.append(path)
        try:
            rng = self._rng_for(path)
            value: Any = domain
            # A drawn value may be or contain a domain: choice([{"lr": uniform(0, 1)}, None]).
            while isinstance(value, Domain):
                value = self._sample(value, path, rng)
            return self.settle(value, path)
        finally:
            self._underway.pop()

    def _sample(self, domain: Domain, path: SpacePath, rng: random.Random) -> Any:
        if isinstance(domain, GridSearch):
            if path not in self._picked:
                raise SearchSpaceError(
                    f"the sample_from at {path_name(path)!r} gave a grid_search, so the number of "
                    "trials would depend on it; return one of the values, or a choice."
                )
            return self._picked[path]
        if isinstance(domain, Function):
            return self._call(domain, rng, path)
        return domain.sample(rng)

    def _call(self, function: Function, rng: random.Random, path: SpacePath) -> Any:
        try:
            value = function.evaluate(SpecView(self, self.root, ()), rng)
        except SearchSpaceError:
            raise
        except Exception as error:  # the user's code may raise anything; add the place
            raise SearchSpaceError(
                f"the sample_from at {path_name(path)!r} raised {one_line(error)}. "
                f"The configuration that it gets has the keys {list(self.root)}."
            ) from error
        check_depth(value, f"sample_from({path_name(path)})")
        return value


class SpecView(Mapping[Any, Any]):
    """The configuration as ``sample_from`` functions see it; reading a value resolves it.

    Both of Ray's forms work: ``config["optimizer"]["lr"]`` and ``spec.config.optimizer.lr``.
    """

    def __init__(self, resolver: _Resolver, node: dict[Any, Any], path: SpacePath) -> None:
        self._resolver, self._node, self._path = resolver, node, path

    def __getitem__(self, key: Any) -> Any:
        if key not in self._node:
            if key == "config" and not self._path:
                return self
            raise KeyError(key)
        return self._resolver.open(self._node[key], (*self._path, key))

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the configuration has no {name!r} here") from None

    def __iter__(self) -> Iterator[Any]:
        return iter(self._node)

    def __len__(self) -> int:
        return len(self._node)

    def plain(self) -> dict[Any, Any]:
        """Return it as an ordinary dict."""
        settled: dict[Any, Any] = self._resolver.settle(self._node, self._path)
        return settled
