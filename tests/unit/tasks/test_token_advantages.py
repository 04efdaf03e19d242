"""Estimators with a number a token: recursions, observation tokens, whitening."""

import time

import numpy as np
import pytest

from tasks.advantages import ESTIMATORS, AlgorithmConfig, Batch, whiten
from tasks.advantages.token import discounted_sums, gae_advantages, reward_to_go

NAN = float("nan")


def test_padding_never_leaks_into_gae():
    """A01: the wrong answer is [5.7, 6, 0]."""
    for behind in (100.0, NAN, np.inf):
        batch = Batch.of([1.0], ["g"], masks=[[1, 1, 0]], values=np.array([0, 0, behind]))
        assert gae_advantages(batch, 1.0, 0.95) == pytest.approx([0.95, 1, 0])


def test_gae_by_hand_with_a_critic():
    batch = Batch.of([1.0], ["g"], masks=[[1, 1, 1]], values=np.array([0.2, 0.4, 0.6]))
    # deltas: .9*.4-.2 = .16, .9*.6-.4 = .14, 1-.6 = .4; gamma*lambda = .45
    expected = [0.16 + 0.45 * (0.14 + 0.45 * 0.4), 0.14 + 0.45 * 0.4, 0.4]
    assert gae_advantages(batch, 0.9, 0.5) == pytest.approx(expected)
    found = ESTIMATORS.find("gae").estimate(batch, AlgorithmConfig(gamma=0.9, lam=0.5))
    assert found.returns == pytest.approx(np.array(expected) + [0.2, 0.4, 0.6])
    assert found.advantages.mean() == pytest.approx(0) and found.advantages.std(ddof=1) == pytest.approx(1, abs=1e-5)


def test_gae_is_carried_over_what_a_tool_wrote():
    whole = Batch.of(
        [1.0, 2.0], ["g", "g"], masks=[[1, 0, 0, 1], [0, 1]], values=np.array([0.1, NAN, 9, 0.3, np.inf, 0.5])
    )
    compact = Batch.of([1.0, 2.0], ["g", "g"], masks=[[1, 1], [1]], values=np.array([0.1, 0.3, 0.5]))
    assert gae_advantages(whole, 0.9, 0.8)[whole.mask] == pytest.approx(gae_advantages(compact, 0.9, 0.8))
    assert not gae_advantages(whole, 0.9, 0.8)[~whole.mask].any()


def test_reward_to_go_is_carried_over_what_a_tool_wrote():
    """A19."""
    batch = Batch.of([1.0], ["g"], masks=[[1, 1, 0, 0, 1, 1]])
    assert reward_to_go(batch, 0.5) == pytest.approx([0.125, 0.25, 0, 0, 0.5, 1])
    assert ESTIMATORS.find("reinforce")(batch, AlgorithmConfig(gamma=0.5)).advantages == pytest.approx(
        [0.125, 0.25, 0, 0, 0.5, 1]
    )


def test_the_outcome_is_at_the_last_trained_token_and_token_rewards_where_they_are():
    batch = Batch.of(
        [1.0, None, 5.0],
        ["g"] * 3,
        masks=[[1, 1, 0], [1], [0, 0]],
        token_rewards=np.array([-0.1, -0.2, NAN, -0.3, 7, 7]),
    )
    assert batch.rewards_by_token() == pytest.approx([-0.1, 0.8, 0, -0.3, 0, 0])
    assert batch.token_counts.tolist() == [2, 1, 0]


def test_reinforce_plus_plus_whitens_the_reward_to_go_over_trained_tokens():
    batch = Batch.of([1.0, 0.0], ["a", "b"], masks=[[1, 0, 1], [1]])
    values = ESTIMATORS.find("reinforce_plus_plus")(batch, AlgorithmConfig(gamma=0.5)).advantages
    trained = np.array([0.5, 1.0, 0.0])
    expected = (trained - 0.5) / np.sqrt(trained.var(ddof=1) + 1e-8)
    assert values == pytest.approx([expected[0], 0, expected[1], expected[2]])


def test_remax_subtracts_the_greedy_reward_and_leaves_out_what_has_none():
    batch = Batch.of(
        [1.0, 0.0, 1.0], ["a", "a", "b"], masks=[[1, 0, 1], [1], [1]], greedy_rewards=np.array([0.25, 0.25, NAN])
    )
    remax = ESTIMATORS.find("remax")
    assert remax.usable(batch).tolist() == [True, True, False]
    assert remax.estimate(batch, AlgorithmConfig()).advantages == pytest.approx([0.75, 0, 0.75, -0.25, 0])


def test_optimal_token_baseline_by_hand():
    """Weights 1 - 2 pi + sum pi^2, summed up: .08 and .5 at the first place, .58 at the second, which one sample reaches."""
    batch = Batch.of(
        [1.0, 0.0],
        ["g", "g"],
        masks=[[1, 0, 1], [1]],
        rollout_logprobs=np.log([0.8, 1.0, 0.5, 0.5]),
        sum_pi_squared=np.array([0.68, NAN, 0.5, 0.5]),
    )
    values = ESTIMATORS.find("optimal_token_baseline").estimate(batch, AlgorithmConfig()).advantages
    baseline = 0.08 / 0.58
    assert values == pytest.approx([1 - baseline, 0, 0, -baseline])


def test_optimal_token_baseline_of_a_certain_policy_is_finite():
    batch = Batch.of([1.0, 0.0], ["g", "g"], rollout_logprobs=np.zeros(2), sum_pi_squared=np.ones(2))
    assert ESTIMATORS.find("optimal_token_baseline").estimate(batch, AlgorithmConfig()).advantages.tolist() == [1, 0]


def loop(values, counts, factor):
    result, end = np.array(values, dtype=float), 0
    for count in counts:
        start, end = end, end + count
        for place in reversed(range(start, end - 1)):
            result[place] += factor * result[place + 1]
    return result


@pytest.mark.parametrize("factor", [0.0, 0.5, 0.99, 1.0])
def test_discounted_sums_are_those_of_the_plain_loop(factor):
    random = np.random.default_rng(0)
    for counts in ([], [0], [1], [0, 3, 0, 0, 7, 1], [300, 0, 17], [64], [65]):
        values = random.normal(size=sum(counts))
        found = discounted_sums(values, np.array(counts, dtype=np.int64), factor)
        assert found == pytest.approx(loop(values, counts, factor), abs=1e-12)


@pytest.mark.parametrize("counts", [[1_000_000], [1000] * 1000, [1] * 1_000_000])
def test_a_million_tokens_take_less_than_a_second(counts):
    batch = Batch(
        outcomes=np.ones(len(counts)),
        groups=np.arange(len(counts)) // 4,
        offsets=np.cumsum([0, *counts]),
        mask=np.ones(1_000_000, dtype=bool),
        values=np.full(1_000_000, 0.5),
    )
    began = time.process_time()
    ESTIMATORS.find("gae").estimate(batch, AlgorithmConfig(gamma=0.999, lam=0.95))
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize("masked", [1000.0, NAN, np.inf])
def test_whiten_ignores_what_is_masked(masked):
    """A24, ddof 1."""
    assert whiten(np.array([1.0, 2, 3, masked]), np.array([1, 1, 1, 0])) == pytest.approx([-1, 0, 1, 0])
    assert whiten(np.array([1.0, 2, 3, masked]), np.array([True, True, True, False])) == pytest.approx([-1, 0, 1, 0])


def test_whiten_of_one_or_no_value_is_finite():
    assert whiten(np.array([5.0, 7.0]), np.array([1, 0])).tolist() == [0, 0]
    assert whiten(np.array([5.0]), np.array([0])).tolist() == [0]


def test_whitening_is_over_all_rows_together():
    """A24: as many rows as tokens a row, where a mean along the wrong axis would go unnoticed."""
    rows = np.arange(16.0).reshape(4, 4) ** 2
    found = whiten(rows.ravel(), np.ones(16))
    assert found == pytest.approx(((rows - rows.mean()) / rows.std(ddof=1)).ravel())
