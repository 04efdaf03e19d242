"""The soft penalty for long responses."""

import json

import pytest
from pydantic import ValidationError

from tasks.reward import response_metrics, reward_metrics
from tasks.rewards import RewardConfig, Scored
from tasks.rewards.shaping import overlong_penalty, penalise_length


def test_dapos_penalty_by_hand():
    """A26."""
    assert overlong_penalty([0, 15, 16, 17, 18, 20], 20, 4, 1.0).tolist() == [0, 0, 0, -0.25, -0.5, -1]
    assert overlong_penalty([18, 20], 20, 4, 0.5).tolist() == [-0.25, -0.5]
    assert overlong_penalty([0, 20], 20, 20, 1.0).tolist() == [0, -1]
    assert overlong_penalty([], 20, 4, 1.0).tolist() == []


def test_a_penalty_over_no_tokens_is_refused_and_off_needs_nothing():
    with pytest.raises(ValidationError, match="overlong_buffer"):
        RewardConfig(overlong_buffer=0)
    assert RewardConfig().overlong_buffer is None


ROWS = [Scored("a", 1.0, '{"acc": 1}', None), Scored("b", 0.0, "{}", None), Scored("c", None, "{}", "failed")]


def test_both_parts_are_kept_and_failures_stay_failures():
    shaped = penalise_length(ROWS, [-0.5, 0.0, -1.0])
    assert [row.reward for row in shaped] == [0.5, 0.0, None]
    assert json.loads(shaped[0].components) == {"acc": 1, "unshaped_reward": 1.0, "overlong_penalty": -0.5}
    assert json.loads(shaped[1].components) == {"unshaped_reward": 0.0, "overlong_penalty": 0.0}
    assert shaped[2] == ROWS[2]


def test_success_is_judged_without_the_penalty():
    metrics = reward_metrics(penalise_length(ROWS, [-0.5, 0.0, -1.0]), RewardConfig())
    assert metrics == {
        "failed": 1,
        "reward": 0.25,
        "reward_std": 0.25,
        "reward_min": 0.0,
        "reward_max": 0.5,
        "success": 0.5,
        "component/acc": 1.0,
        "component/unshaped_reward": 0.5,
        "component/overlong_penalty": -0.25,
    }


def test_metrics_of_nothing_are_left_out_and_nan_components_do_not_spread():
    assert reward_metrics([ROWS[2]], RewardConfig()) == {"failed": 1}
    rows = [Scored("a", 1.0, '{"x": NaN}', None), Scored("b", 1.0, '{"x": 3}', None)]
    assert reward_metrics(rows, RewardConfig())["component/x"] == 3


def test_lengths():
    assert response_metrics([2, 4], [False, True]) == {
        "response_tokens": 3.0,
        "response_tokens_max": 4.0,
        "truncated": 0.5,
    }
    assert response_metrics([], []) == {}
