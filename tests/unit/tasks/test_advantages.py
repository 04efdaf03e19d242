"""Estimators against values computed by hand."""

import numpy as np
import pytest

from tasks.advantages import ESTIMATORS, AlgorithmConfig, Batch, whiten
from tasks.plugins import UnknownFunction

NAMES = ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"]


def advantages(name, rewards, groups=None, counts=None, **config):
    batch = Batch.of(rewards, groups or ["g"] * len(rewards), counts)
    return ESTIMATORS.find(name)(batch, AlgorithmConfig(estimator=name, **config))


def test_grpo_divides_by_the_sample_deviation():
    assert advantages("grpo", [1, 0, 0, 0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_grpo_without_division_and_dr_grpo_only_centre():
    for values in (advantages("grpo", [1, 0, 0, 0], normalize_by_std=False), advantages("dr_grpo", [1, 0, 0, 0])):
        assert values == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_rloo_leaves_the_sample_out_of_its_own_baseline():
    third = 2 / 3
    assert advantages("rloo", [1, 0, 0, 1]) == pytest.approx([third, -third, -third, third])


def test_groups_do_not_mix_and_need_not_be_adjacent():
    values = advantages("grpo", [1, 10, 0, 0], ["a", "b", "a", "b"])
    half = np.sqrt(0.5)
    assert values == pytest.approx([half, half, -half, -half], abs=1e-5)


def test_reinforce_plus_plus_whitens_over_tokens():
    values = advantages("reinforce_plus_plus_baseline", [1, 0], counts=[1, 3])
    tokens = np.array([0.5, -0.5, -0.5, -0.5])
    expected = (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    assert values == pytest.approx([expected[0], expected[1]])


@pytest.mark.parametrize("name", NAMES)
def test_failed_scoring_is_not_a_zero(name):
    batch = Batch.of([1, None, 0], ["g"] * 3)
    values = ESTIMATORS.find(name)(batch, AlgorithmConfig())
    assert batch.comparable.tolist() == [True, False, True]
    if name == "grpo":
        assert values[[0, 2]] == pytest.approx([0.7071, -0.7071], abs=1e-4)
    assert np.isfinite(values[batch.comparable]).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rewards", [[0.3], [0.3, None, None, None], [None, None]])
def test_group_of_one_or_none_is_not_comparable_and_never_nan(name, rewards):
    batch = Batch.of(rewards, ["g"] * len(rewards))
    assert not batch.comparable.any()
    assert np.isfinite(ESTIMATORS.find(name)(batch, AlgorithmConfig())).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "rewards", [[float(np.float32(0.1))] * 6 + [0.1], [0.7] * 5, [1 / 3] * 3, [0.1 + 0.2, 0.3], [-1e9] * 2]
)
def test_equal_rewards_are_no_signal(name, rewards):
    batch = Batch.of(rewards, ["g"] * len(rewards))
    assert batch.constant_groups().tolist() == [True]
    assert advantages(name, rewards) == pytest.approx(np.zeros(len(rewards)), abs=1e-9)


def test_small_but_real_differences_are_a_signal():
    assert not Batch.of([0.5, 0.501], ["g", "g"]).constant_groups().any()


def test_whiten_ignores_what_is_masked():
    assert whiten(np.array([1.0, 2, 3, 1000]), np.array([1, 1, 1, 0])) == pytest.approx([-1, 0, 1, 0])
    assert whiten(np.array([1.0, 2, 3, np.nan]), np.array([1, 1, 1, 0])) == pytest.approx([-1, 0, 1, 0])


def test_whiten_of_one_or_no_value_is_finite():
    assert whiten(np.array([5.0, 7.0]), np.array([1, 0])).tolist() == [0, 0]
    assert whiten(np.array([5.0]), np.array([0])).tolist() == [0]


def test_empty_batch():
    for name in NAMES:
        assert len(advantages(name, [])) == 0


def test_unknown_estimator_suggests_the_nearest():
    with pytest.raises(UnknownFunction, match="did you mean 'grpo'"):
        ESTIMATORS.find("grp0")
