"""Algorithms that a configuration cannot have are refused before anything starts; `onecopy algorithms` says what there is."""

import json
from typing import get_args

import pytest

from engine.losses import config as losses
from flows.cli import main
from flows.cli.algorithms import algorithms
from flows.config import PostTrainConfig
from flows.loading import ConfigError, load_config
from tasks.advantages import ESTIMATORS


@pytest.fixture
def recipe(tmp_path, values):
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(values))
    return path


def violations(recipe, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(PostTrainConfig, recipe, overrides)
    return caught.value.violations


@pytest.mark.parametrize("name", [name for name in ESTIMATORS.names() if ESTIMATORS.find(name).group])
def test_a_group_of_one_is_refused_where_samples_are_compared(recipe, name):
    """A05."""
    overrides = [f"algorithm.estimator={name}", "generation.samples_per_prompt=1", "algorithm.gdpo_weights={reward: 1}"]
    found = violations(recipe, *overrides)
    assert f"generation.samples_per_prompt: must be at least 2: {name} compares" in "\n".join(found)


@pytest.mark.parametrize("name", ["reinforce", "reinforce_plus_plus", "remax"])
def test_a_group_of_one_is_fine_elsewhere(recipe, name):
    overrides = [f"algorithm.estimator={name}", "generation.samples_per_prompt=1"]
    assert load_config(PostTrainConfig, recipe, overrides).samples_per_step == 3


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["estimator=optimal_token_baseline"], "algorithm.estimator: optimal_token_baseline needs the sum of squared"),
        (["estimator=gdpo"], "algorithm.gdpo_weights: gdpo needs at least one component"),
        (["estimator=gpro"], "algorithm.estimator: unknown advantage estimator 'gpro' (did you mean 'grpo'?)"),
        (["estimator=json:dumps"], "algorithm.estimator: advantage estimator 'json:dumps' must be callable as"),
        (["kl_target=6"], "algorithm.kl_target and algorithm.kl_coef: a coefficient of 0 stays 0"),
        (["normalize_by_std=often"], "algorithm.normalize_by_std: input should be 'group', 'batch' or 'none'"),
        (["gamma=0"], "algorithm.gamma: input should be greater than 0"),
        (["max_rollout_batches=0"], "algorithm.max_rollout_batches: input should be greater than or equal to 1"),
    ],
)
def test_algorithms_that_cannot_work(recipe, overrides, message):
    found = violations(recipe, *(f"algorithm.{override}" for override in overrides))
    assert [line for line in found if line.startswith(message)], found


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["reward.overlong_buffer=0"], "reward.overlong_buffer: input should be greater than or equal to 1"),
        (
            ["reward.overlong_buffer=9"],
            "reward.overlong_buffer and generation.max_response_tokens: the last 9 tokens of 8",
        ),
        (
            ["reward.overlong_buffer=4", "algorithm.estimator=maxrl"],
            "algorithm.estimator and reward.overlong_buffer: maxrl needs rewards from 0 up",
        ),
        (
            ["algorithm.dynamic_sampling=true", "generation.samples_per_prompt=1", "algorithm.estimator=reinforce"],
            "algorithm.dynamic_sampling and generation.samples_per_prompt: a group of one never has any variance",
        ),
    ],
)
def test_combinations_that_cannot_work(recipe, overrides, message):
    found = violations(recipe, *overrides)
    assert [line for line in found if line.startswith(message)] == found, found


def test_all_of_it_at_once(recipe):
    overrides = ["estimator=optimal_token_baseline", "dynamic_sampling=true", "gamma=2"]
    found = violations(recipe, *(f"algorithm.{item}" for item in overrides), "generation.samples_per_prompt=1")
    assert len(found) == 4


def test_a_users_decorated_estimator_is_held_to_what_it_declares(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(ESTIMATORS, "_functions", dict(ESTIMATORS._functions))
    (tmp_path / "mine.py").write_text(
        "from tasks.advantages import estimator\n"
        "@estimator('mine_with_critic', group=True, needs=('sum_pi_squared',))\n"
        "def mine(batch, config):\n    return batch.centred()\n"
    )
    found = violations(recipe, f"algorithm.estimator={tmp_path}/mine.py:mine", "generation.samples_per_prompt=1")
    assert [line.split(":")[0] for line in found] == ["generation.samples_per_prompt", "algorithm.estimator"]


def test_every_name_that_a_configuration_takes_is_listed_with_one_line():
    listed: dict[str, set[str]] = {}
    for row in algorithms():
        listed.setdefault(row["kind"], set()).add(row["name"])
        assert row["summary"] and "\n" not in row["summary"]
    assert listed == {
        "estimator": set(ESTIMATORS.names()),
        "loss": set(losses.DESCRIPTIONS),
        "aggregation": set(get_args(losses.Aggregation)),
        "kl": set(get_args(losses.Estimator)),
        "correction": set(get_args(losses.WeightRule)),
    }
    assert all(row["source"] for row in algorithms() if row["kind"] in ("estimator", "loss"))


def test_the_command(capsys):
    assert main(["algorithms", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    (gae,) = [row for row in rows if row["name"] == "gae"]
    assert gae == {
        "kind": "estimator",
        "name": "gae",
        "summary": "Generalised advantage estimation with a critic, whitened over all trained tokens of the step",
        "source": "arXiv 1506.02438 eq. 16",
        "needs": ["values"],
    }
    assert main(["algorithms"]) == 0
    assert "rloo" in capsys.readouterr().out
