"""Names in braces, and parameters as text and as environment variables."""

from __future__ import annotations

import pytest

from tunemq_shared.base.errors import TrainableError
from tunemq_shared.executables.templates import (
    check_names,
    parameters_of,
    render,
    text_of,
    variables_of,
)

CONFIG = {"lr": 1e-05, "opt": {"name": "adam", "nesterov": True}, "layers": [64, 32]}


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("{lr}", "1e-05"),
        ("--lr={lr}", "--lr=1e-05"),
        ("{opt.name}/{opt/name}", "adam/adam"),
        ("{opt.nesterov}", "true"),
        ("{layers}", "[64, 32]"),
        ("{opt}", '{"name": "adam", "nesterov": true}'),
        ('{{"lr": {lr}}}', '{"lr": 1e-05}'),
        ("plain", "plain"),
        ("${{HOME}}", "${HOME}"),
    ],
)
def test_names_are_replaced_and_double_braces_are_braces(text, rendered):
    assert render(text, dict(parameters_of(CONFIG))) == rendered


@pytest.mark.parametrize(
    ("value", "text"), [(1, "1"), (0.1, "0.1"), (None, "null"), (False, "false"), ("a b", "a b")]
)
def test_values_are_written_as_in_json_and_text_unquoted(value, text):
    assert text_of(value, "x") == text


def test_value_that_json_cannot_hold_is_named():
    with pytest.raises(TrainableError, match=r"'opt.x' is .* cannot be written"):
        text_of(object(), "opt.x")


def test_unknown_name_lists_the_known_ones_and_the_closest():
    with pytest.raises(TrainableError) as caught:
        check_names(["--lr", "{optt.lr}"], {"opt.lr": False, "seed": False})

    told = str(caught.value)
    assert "{optt.lr}" in told
    assert "Did you mean {opt.lr}?" in told
    assert "There are opt.lr, seed" in told
    assert "checkpoint_dir" in told


def test_group_filled_by_a_function_may_have_any_name():
    check_names(["{opt.lr}"], {"opt": True})

    with pytest.raises(TrainableError, match="no parameter"):
        check_names(["{other.lr}"], {"opt": True})


def test_names_of_tunemq_need_no_parameter():
    check_names(["{trial_id}", "{checkpoint_dir}", "{config}"], {})


@pytest.mark.parametrize("text", ["{lr", "lr}", "{{lr}"])
def test_unmatched_brace_is_rejected(text):
    with pytest.raises(TrainableError, match="without its partner"):
        render(text, {"lr": 1})


def test_parameters_become_uppercase_variables():
    assert variables_of({"lr": 0.1, "opt": {"beta-1": 0.9}}) == {
        "TUNEMQ_PARAM_LR": "0.1",
        "TUNEMQ_PARAM_OPT": '{"beta-1": 0.9}',
        "TUNEMQ_PARAM_OPT_BETA_1": "0.9",
    }


def test_two_parameters_with_one_variable_are_rejected():
    with pytest.raises(TrainableError, match=r"'opt.lr' and 'opt_lr' .* \$TUNEMQ_PARAM_OPT_LR"):
        variables_of({"opt": {"lr": 1}, "opt_lr": 2})
