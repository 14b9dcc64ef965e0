"""Valid metrics, their conversion, and the error messages for others."""

from __future__ import annotations

import enum
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunemq_shared.base.errors import MetricError
from tunemq_shared.protocol.messages import ResultReported, decode_node_event, encode
from tunemq_shared.trial.metrics import check_comparable, check_metrics, named

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=10,
)


class Phase(enum.StrEnum):
    EVAL = "eval"


class OldPhase(str, enum.Enum):  # noqa: UP042  what people have
    EVAL = "eval"


class Tensor:
    """Resembles a tensor of another library."""

    def __init__(self, value, shape=()):
        self.value, self.shape = value, shape

    def item(self):
        return self.value


class EagerTensor:
    shape = ()

    def numpy(self):
        return np.float32(0.5)


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), plain))
def test_plain_values_pass_unchanged_and_round_trip(metrics):
    checked = check_metrics(metrics, step=1)
    event = ResultReported("t", 1, 1, checked, 0.0, 0.0, 0.0, 0.0, 1)

    assert checked == metrics
    assert decode_node_event(encode(event)).metrics == metrics


def test_reported_dict_is_copied():
    inner = {"a": 1}
    given_metrics = {"loss": 1.0, "inner": inner}

    checked = check_metrics(given_metrics, step=1)
    inner["a"] = given_metrics["loss"] = 2

    assert checked == {"loss": 1.0, "inner": {"a": 1}}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.float64(0.25), 0.25),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array(7), 7),
        (np.str_("x"), "x"),
        (Tensor(1.5), 1.5),
        (EagerTensor(), 0.5),
        (Phase.EVAL, "eval"),
        (OldPhase.EVAL, "eval"),
        ((1, np.float32(2.0)), [1, 2.0]),
        ({Phase.EVAL: {"acc": np.float32(0.5)}}, {"eval": {"acc": 0.5}}),
    ],
)
def test_scalars_of_libraries_become_python_values(value, expected):
    made = check_metrics({"m": value}, step=1)["m"]

    assert made == expected
    assert type(made) is type(expected)


def test_keys_that_are_enums_of_strings_become_strings():
    checked = check_metrics({OldPhase.EVAL: 1, "loss": np.float64(1.0)}, step=1)

    assert [(type(key), key) for key in checked] == [(str, "eval"), (str, "loss")]
    assert type(checked["loss"]) is float


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros(3), ["'m'", "step 7", "(3,)", ".item()", "float(x.mean())"]),
        (Tensor(0, shape=(2, 2)), ["'m'", "Tensor", "(2, 2)"]),
        (2**64, ["'m'", "65 bits", "float"]),
        (-(2**63) - 1, ["'m'", "64 bits", "float"]),
        (1j, ["'m'", "complex"]),
        (b"x", ["'m'", "bytes", "str()"]),
        ({1, 2}, ["'m'", "set"]),
        (object, ["'m'", "type"]),
        (Tensor(1j), ["'m'", "complex"]),
        ("\ud800", ["'m'", "Unicode", "errors='replace'"]),
        ({"a": {"b": {1: 2}}}, ["'m/a/b'", "1 (int)", "str(1)"]),
        ([0, {"a": {3}}], ["'m[1]/a'", "set"]),
    ],
)
def test_f25_other_values_are_rejected_with_key_and_fix(value, words):
    with pytest.raises(MetricError) as caught:
        check_metrics({"m": value}, step=7)

    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_dict_that_contains_itself_is_rejected():
    metrics: dict = {}
    metrics["m"] = {"again": metrics}

    with pytest.raises(MetricError, match="nested more than"):
        check_metrics(metrics, step=1)


def test_key_that_is_no_string_is_rejected():
    with pytest.raises(MetricError, match=r"name 0 \(int\).*str\(0\)"):
        check_metrics({0: 1.0}, step=1)


def test_missing_required_metric_names_the_reported_ones_and_its_user():
    with pytest.raises(MetricError) as caught:
        check_metrics({"acc": 1.0}, required=("loss",), step=3)

    assert "'loss' is missing" in str(caught.value)
    assert "step 3; reported keys are 'acc'" in str(caught.value)
    assert "TuneConfig" in str(caught.value)


def test_nested_metric_counts_as_present():
    metrics = {"eval": {"loss": 1.0}}

    assert check_metrics(metrics, ("eval/loss",), ("eval/loss",), step=1) == metrics


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_metric_that_is_not_finite_is_rejected_where_it_is_optimised(value):
    with pytest.raises(MetricError, match=r"'loss' is -?(nan|inf) at step 2.*nonfinite='worst'"):
        check_metrics({"loss": value}, finite=("loss",), step=2)

    assert "loss" in check_metrics({"loss": value}, required=("loss",), step=2)


@pytest.mark.parametrize("value", ["0.1", None, [0.1]])
def test_optimised_metric_has_to_be_a_number(value):
    for roles in ({"required": ("loss",)}, {"finite": ("loss",)}):
        with pytest.raises(MetricError, match=r"'loss' is .* at step 1.*report a number"):
            check_metrics({"loss": value}, **roles, step=1)


def test_string_under_a_stop_criterion_is_rejected():
    with pytest.raises(MetricError, match=r"'acc' is 'high' \(str\) at step 1"):
        check_comparable({"acc": "high"}, ("acc", "other"), step=1)


def test_single_number_gets_a_name():
    assert named(0.5) == {"_metric": 0.5}
    assert named(np.float32(0.5)) == {"_metric": np.float32(0.5)}
    with pytest.raises(MetricError, match="takes a dict of metrics"):
        named("0.5")
