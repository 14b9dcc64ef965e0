"""`LogPolicy`: which fields are rejected, and how policies reach nodes and the runner."""

from __future__ import annotations

import pickle

import pytest

import tunemq as tune
from tunemq_scheduler.core.runner_settings import DO_NOT_RETRY, EXCLUDE_NODE, LogRule
from tunemq_scheduler.experiment.start_checks import prepare
from tunemq_shared.base.errors import ConfigError


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("", "give a regular expression"),
        (b"bytes", "give a regular expression"),
        (None, "give a regular expression"),
        ("(", "it is not a regular expression"),
        ("a{99999999999999999999}", "it is not a regular expression"),
        ("x" * 501, "give at most 500 characters"),
        ("a*", "it matches every line"),
    ],
)
def test_log_policy_with_an_unusable_pattern_is_rejected_with_the_fix(pattern, why):
    with pytest.raises(ConfigError, match=rf"LogPolicy\(pattern=.*is invalid: .*{why}"):
        tune.LogPolicy(pattern, "do_not_retry")


@pytest.mark.parametrize("action", ["retry", "", None, "DO_NOT_RETRY"])
def test_log_policy_with_an_unknown_action_is_rejected(action):
    with pytest.raises(ConfigError, match=r"choose one of 'do_not_retry', 'exclude_node'"):
        tune.LogPolicy("x", action)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("NCCL", "give a list of LogPolicy"),
        (None, "give a list of LogPolicy"),
        (tune.LogPolicy("x", "do_not_retry"), "give a list of LogPolicy"),
        (["NCCL"], "has 'NCCL', which is not a LogPolicy"),
        ([tune.LogPolicy(f"x{n}", "do_not_retry") for n in range(21)], "and 20 are possible"),
        (
            [tune.LogPolicy("x", "do_not_retry"), tune.LogPolicy("x", "exclude_node")],
            "has the pattern 'x' more than once",
        ),
    ],
)
def test_log_policies_in_an_unusable_list_are_rejected_with_the_fix(given, why):
    with pytest.raises(ConfigError, match=rf"FailureConfig\(log_policies=\.\.\.\).*{why}"):
        tune.FailureConfig(log_policies=given)


def test_exclusion_limit_is_a_whole_number_or_minus_one():
    assert tune.FailureConfig().max_excluded_nodes == 2
    assert tune.FailureConfig(max_excluded_nodes=-1).max_excluded_nodes == -1
    with pytest.raises(ConfigError, match=r"max_excluded_nodes=-2\) is invalid"):
        tune.FailureConfig(max_excluded_nodes=-2)


@pytest.mark.parametrize("given", [1, 0, "always", None])
def test_retry_cuda_memory_is_true_false_or_alone(given):
    assert tune.FailureConfig(retry_cuda_memory="alone").retry_cuda_memory == "alone"
    with pytest.raises(ConfigError, match="give True, False or 'alone'"):
        tune.FailureConfig(retry_cuda_memory=given)


def test_log_policies_become_rules_of_the_runner():
    policies = [
        tune.LogPolicy("device-side assert", "do_not_retry"),
        tune.LogPolicy(pattern="ECC", action="exclude_node"),
    ]
    failures = tune.FailureConfig(log_policies=policies, retry_cuda_memory="alone")
    assert pickle.loads(pickle.dumps(failures)) == failures
    run = tune.RunConfig(failure_config=failures)
    settings = prepare(lambda config: None, {}, tune.TuneConfig(), run).settings
    assert settings.log_rules == (
        LogRule("device-side assert", DO_NOT_RETRY),
        LogRule("ECC", EXCLUDE_NODE),
    )
    assert (settings.max_excluded_nodes, settings.retry_cuda_memory) == (2, "alone")
    assert not settings.nodes_may_come
