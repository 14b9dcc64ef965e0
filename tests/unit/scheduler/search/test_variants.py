"""Resolving a search space: grids, nested domains, functions of other values, tags."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest

from tests.unit.shared.hostile_values import all_hostile
from tunemq_scheduler.search.domains import (
    choice,
    grid_search,
    loguniform,
    randint,
    sample_from,
    uniform,
)
from tunemq_scheduler.search.space import (
    GridCombinations,
    count_grid,
    format_tag,
    merge,
    named_in_tag,
    read_space,
    searched,
)
from tunemq_scheduler.search.variants import generators, resolve
from tunemq_shared.base.errors import SearchSpaceError


def configs(space: dict[str, Any], seed: object = 1) -> list[dict[str, Any]]:
    """Return all combinations of a space's grid, with the other values sampled."""
    read = read_space(space)
    grid = GridCombinations(read)
    return [resolve(read, grid.pick(n), generators(seed, n)) for n in range(grid.size)]


def one(space: dict[str, Any], seed: object = 1) -> dict[str, Any]:
    (config,) = configs(space, seed)
    return config


def nested(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(levels):
        inner = {"a": inner}
    return inner


def that_holds_itself() -> dict[str, Any]:
    itself: dict[str, Any] = {}
    itself["x"] = itself
    return itself


@pytest.mark.parametrize("value", [nested(2_000), that_holds_itself()], ids=["deep", "circle"])
@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda value: value, r"param_space\['c'\]"),
        (lambda value: [(value,)], r"param_space\['c'\]\[0\]\[0\]"),
        (lambda value: choice([value]), r"param_space\['c'\]\[0\]"),
        (lambda value: grid_search([1, value]), r"param_space\['c'\]\[1\]"),
        (lambda value: sample_from(lambda _: value), r"sample_from\(c\)"),
    ],
    ids=["constant", "in a tuple", "choice", "grid", "function"],
)
def test_space_with_a_value_nested_too_deeply_names_place_and_limit(make, place, value) -> None:
    with pytest.raises(SearchSpaceError, match=rf"more than 64 levels.*below {place}"):
        one({"c": make(value)})


@pytest.mark.parametrize("value", all_hostile(), ids=lambda one: type(one).__name__)
def test_tag_of_a_hostile_value_is_made(value: Any) -> None:
    tag = format_tag(3, {("a",): value, ("b",): 1})
    assert re.fullmatch(r"3_a=[a-zA-Z0-9_.-]+,b=1", tag)
    assert named_in_tag(tag, {"a": value, "b": 1}).keys() == {"a", "b"}


class Pair(NamedTuple):
    left: Any
    right: Any


def test_grid_gives_every_combination_with_the_first_name_changing_fastest() -> None:
    found = configs({"b": grid_search(["x", "y"]), "a": grid_search([1, 2, 3])})
    assert [(c["a"], c["b"]) for c in found] == [
        (1, "x"), (2, "x"), (3, "x"), (1, "y"), (2, "y"), (3, "y"),
    ]  # fmt: skip


def test_configuration_keys_keep_the_order_of_the_space() -> None:
    assert list(one({"z": 1, "a": uniform(0, 1), "m": 2})) == ["z", "a", "m"]


def test_domains_in_nested_dicts_lists_and_tuples_are_sampled() -> None:
    config = one(
        {
            "layers": [{"units": randint(8, 9)}, 3],
            "pair": (choice(["x"]), 2),
            "named": Pair(choice([1]), "r"),
            "deep": {"er": {"lr": choice([0.1])}},
        }
    )
    assert config == {
        "layers": [{"units": 8}, 3],
        "pair": ("x", 2),
        "named": Pair(1, "r"),
        "deep": {"er": {"lr": 0.1}},
    }
    assert type(config["named"]) is Pair


def test_grid_written_as_a_dict_is_a_grid() -> None:
    assert [c["a"] for c in configs({"a": {"grid_search": [1, 2]}})] == [1, 2]


def test_grid_inside_a_grids_value_multiplies_only_that_value() -> None:
    space = {
        "model": grid_search(
            [
                {"kind": "tree", "depth": grid_search([1, 2])},
                {"kind": "line"},
                {"kind": "net", "a": grid_search([1, 2]), "b": grid_search([3, 4])},
            ]
        ),
        "fold": grid_search([0, 1]),
    }
    found = configs(space)
    assert count_grid(read_space(space)) == len(found) == 2 * (2 + 1 + 4)
    assert len({repr(config) for config in found}) == len(found)
    assert {"fold": 1, "model": {"kind": "tree", "depth": 2}} in found


def test_grid_among_a_grids_values_is_flattened() -> None:
    assert [c["a"] for c in configs({"a": grid_search([grid_search([1, 2]), 3])})] == [1, 2, 3]


def test_huge_grid_is_counted_and_indexed_without_enumeration() -> None:
    space = read_space({str(axis): grid_search(range(1000)) for axis in range(6)})
    grid = GridCombinations(space)
    assert grid.size == 10**18
    config = resolve(space, grid.pick(10**18 - 1), generators(0))
    assert set(config.values()) == {999}


def test_functions_read_other_values_in_both_of_rays_forms() -> None:
    config = one(
        {
            "b": sample_from(lambda spec: spec.config.a * 2),
            "c": sample_from(lambda config: config["a"] * 3),
            "d": sample_from(lambda spec: spec["config"]["inner"]["x"]),
            "e": sample_from(lambda spec: spec.config.inner.x),
            "a": choice([7]),
            "inner": {"x": choice([5])},
        }
    )
    assert config == {"b": 14, "c": 21, "d": 5, "e": 5, "a": 7, "inner": {"x": 5}}


def test_functions_that_depend_on_functions_are_evaluated_in_order() -> None:
    config = one(
        {
            "a": sample_from(lambda c: c["b"] + 1),
            "b": sample_from(lambda c: c["c"] + 1),
            "c": choice([1]),
        }
    )
    assert config == {"a": 3, "b": 2, "c": 1}


def test_function_sees_the_value_of_a_grid() -> None:
    found = configs({"a": grid_search([1, 2]), "b": sample_from(lambda c: c["a"] * 10)})
    assert [c["b"] for c in found] == [10, 20]


def test_function_may_return_parts_of_the_configuration_as_plain_values() -> None:
    config = one(
        {
            "inner": {"x": choice([5])},
            "copy": sample_from(lambda c: [c["inner"], c.inner]),
            "all": sample_from(lambda c: sorted(c.keys())),
        }
    )
    assert config["copy"] == [{"x": 5}, {"x": 5}]
    assert type(config["copy"][0]) is dict
    assert config["all"] == ["all", "copy", "inner"]


def test_function_may_return_a_domain() -> None:
    assert one({"a": sample_from(lambda: {"x": choice([4])})}) == {"a": {"x": 4}}


def test_function_draws_the_same_from_its_generator_each_time() -> None:
    space = {"a": sample_from(lambda config, rng: rng.random())}
    assert one(space) == one(space)
    assert one(space) != one(space, seed=2)


def test_key_named_config_is_found() -> None:
    config = one({"config": {"x": 1}, "a": sample_from(lambda c: c["config"]["x"])})
    assert config["a"] == 1


def test_values_that_depend_on_each_other_are_named_in_the_error() -> None:
    space = {"a": sample_from(lambda c: c["b"]), "b": sample_from(lambda c: c["a"])}
    with pytest.raises(SearchSpaceError, match="a -> b -> a"):
        one(space)


def test_function_that_raises_is_named_with_the_known_keys() -> None:
    with pytest.raises(SearchSpaceError, match=r"'b' raised KeyError: 'x'.*\['a', 'b'\]"):
        one({"a": 1, "b": sample_from(lambda c: c["x"])})


def test_missing_attribute_is_an_attribute_error_for_getattr() -> None:
    assert one({"b": sample_from(lambda c: getattr(c, "x", 3))}) == {"b": 3}


def test_choice_may_hold_domains() -> None:
    space = {"opt": choice([{"kind": "sgd", "lr": uniform(0, 1)}, {"kind": "adam"}])}
    kinds = set()
    for seed in range(30):
        optimizer = one(space, seed)["opt"]
        kinds.add(optimizer["kind"])
        assert optimizer.keys() == ({"kind", "lr"} if optimizer["kind"] == "sgd" else {"kind"})
    assert kinds == {"sgd", "adam"}


def test_choice_of_domains_draws_the_value_separately_from_the_choice() -> None:
    space = {"x": choice([uniform(0, 1), uniform(2, 3)])}
    values = [one(space, seed)["x"] for seed in range(200)]
    low = [value for value in values if value < 1]
    assert 60 < len(low) < 140
    assert min(low) < 0.2
    assert max(low) > 0.8


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ([1], "dict"),
        ({"a": {"b": {"grid_search": []}}}, "a/b.*no values"),
        ({"a": choice([{"x": grid_search([1, 2])}])}, "a: a grid_search stands inside a choice"),
        ({"a": choice([grid_search([1])])}, "inside a choice"),
    ],
)
def test_invalid_space_is_rejected(space: Any, words: str) -> None:
    with pytest.raises(SearchSpaceError, match=words):
        read_space(space)


def test_grid_returned_by_a_function_is_rejected() -> None:
    with pytest.raises(SearchSpaceError, match="'a' gave a grid_search"):
        one({"a": sample_from(lambda: grid_search([1, 2]))})


def test_added_domain_leaves_the_values_of_others_unchanged() -> None:
    before = one({"lr": uniform(0, 1)})
    assert one({"lr": uniform(0, 1), "width": randint(0, 99)})["lr"] == before["lr"]


def test_configuration_shares_no_container_with_the_space_or_another() -> None:
    space = {"fixed": {"sizes": [1, 2]}, "a": choice([[1, 2]])}
    first, second = one(space), one(space)
    first["fixed"]["sizes"].append(3)
    first["a"].append(3)
    assert second == {"fixed": {"sizes": [1, 2]}, "a": [1, 2]}
    assert space["fixed"] == {"sizes": [1, 2]}


def test_sampled_values_are_listed_by_path() -> None:
    space = read_space(
        {
            "a": choice([1]),
            "b": 2,
            "c": [choice([3])],
            "opt": choice([{"kind": "x", "lr": choice([4])}]),
        }
    )
    assert searched(space, resolve(space, {}, generators(0))) == {
        ("a",): 1,
        ("c", 0): 3,
        ("opt", "kind"): "x",
        ("opt", "lr"): 4,
    }


def test_tag_is_short_and_valid_in_a_file_name() -> None:
    evaluated = {("lr",): 0.01, ("net", "width"): 32, ("act",): "re lu/6", ("tiny",): 1e-05}
    tag = format_tag(3, evaluated)
    assert tag == "3_act=re_lu_6,lr=0.0100,width=32,tiny=1e-05"
    assert re.fullmatch(r"[\w.,=-]+", format_tag(0, {("x",): 1e30, ("y",): float("nan")}))
    assert format_tag(4, {}) == "4"
    assert len(format_tag(5, {("x",): "y" * 1000})) < 100


def test_merge_recurses_into_dicts_and_replaces_other_values() -> None:
    base = {"a": {"x": 1, "y": 2}, "l": [1, 2], "k": 1}
    merged = merge(base, {"a": {"y": 3, "z": 4}, "l": [9]})
    assert merged == {"a": {"x": 1, "y": 3, "z": 4}, "l": [9], "k": 1}
    assert base["a"] == {"x": 1, "y": 2}


def test_constant_float_is_not_a_searched_value() -> None:
    space = read_space({"lr": loguniform(1, 2), "c": 0.5})
    assert list(searched(space, resolve(space, {}, generators(0)))) == [("lr",)]
