"""KL in the reward: its forms, where it lands, and the controller of its coefficient."""

import math

import numpy as np
import pytest

from tasks.advantages import ESTIMATORS, AlgorithmConfig, BadEstimate, Batch
from tasks.advantages.kl_reward import next_coefficient, penalised, token_kl


@pytest.mark.parametrize(
    "form, expected",
    [("k1", [1, -0.5, 0]), ("abs", [1, 0.5, 0]), ("k2", [0.5, 0.125, 0]), ("k3", [0.367879, 0.148721, 0])],
)
def test_forms_by_hand(form, expected):
    logprobs, reference = np.array([-1.0, -1.5, -1.0]), np.array([-2.0, -1.0, -1.0])
    assert token_kl(logprobs, reference, form) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("form", ["k1", "abs", "k2", "k3"])
def test_no_form_overflows_and_none_is_changed_where_it_would_not(form):
    """A18."""
    assert np.isfinite(token_kl(np.array([-200.0, -100, -30, 0, 30, 100, 200]), np.zeros(7), form)).all()
    if form == "k3":
        ratios = np.linspace(-5, 5, 41)
        exact = [math.exp(-d) - 1 + d for d in ratios]
        assert token_kl(ratios, np.zeros(41), form) == pytest.approx(exact, rel=1e-9, abs=1e-12)


def with_reference():
    return Batch.of(
        [1.0, None],
        ["g", "h"],
        masks=[[1, 0, 1], [1]],
        rollout_logprobs=np.array([-1.0, np.nan, -1.0, -1.0]),
        reference_logprobs=np.array([-1.5, np.inf, -2.0, -9.0]),
    )


def test_the_penalty_is_taken_from_single_tokens_and_observations_are_no_part_of_it():
    batch, mean = penalised(with_reference(), "k1", 0.1)
    assert mean == pytest.approx(0.75)  # of the trained tokens of scored samples: .5 and 1
    assert batch.rewards_by_token()[:3] == pytest.approx([-0.05, 0, 0.9])
    assert batch.rewards[0] == pytest.approx(0.85)
    reinforce = ESTIMATORS.find("reinforce").estimate(batch, AlgorithmConfig()).advantages
    assert reinforce == pytest.approx([0.85, 0, 0.9, 0])


def test_penalties_add_up_and_nothing_is_assumed_without_a_reference():
    twice, _ = penalised(penalised(with_reference(), "k1", 0.1)[0], "k1", 0.1)
    assert twice.rewards[0] == pytest.approx(0.7)
    with pytest.raises(BadEstimate, match="needs the log-probabilities of a reference model"):
        penalised(Batch.of([1], ["g"]), "k1", 0.1)


def test_all_masked_has_no_kl():
    batch = Batch.of([1.0], ["g"], masks=[[0]], rollout_logprobs=np.zeros(1), reference_logprobs=np.ones(1))
    assert penalised(batch, "k1", 1.0)[1] == 0


@pytest.mark.parametrize(
    "kl, samples, expected",
    [
        (6.0, 1000, 0.2),
        (6.6, 1000, 0.2 * 1.01),
        (60.0, 1000, 0.2 * 1.02),
        (0.0, 1000, 0.2 * 0.98),
        (60.0, 10_000, 0.24),
    ],
)
def test_the_adaptive_coefficient_by_hand(kl, samples, expected):
    config = AlgorithmConfig(kl_coef=0.1, kl_target=6.0, kl_horizon=10_000)
    assert next_coefficient(config, {"kl": kl, "kl_coef": 0.2, "samples": samples}) == pytest.approx(expected)


def test_the_first_and_the_fixed_coefficient_are_the_configured_one():
    assert next_coefficient(AlgorithmConfig(kl_coef=0.1, kl_target=6.0), None) == 0.1
    assert next_coefficient(AlgorithmConfig(kl_coef=0.1), {"kl": 9.0, "kl_coef": 0.3, "samples": 8}) == 0.1
