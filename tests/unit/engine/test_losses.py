"""Loss values worked out by hand; gradients by finite differences; masks that really mask."""

import math

import pytest
import torch

from engine.losses.aggregate import Totals, aggregate
from engine.losses.config import LossConfig
from engine.losses.policy import importance_weights, k3, ppo_loss, ratio_of, sft_loss

LENGTHS = [4, 2, 1]
LOSS = torch.tensor([1.0, 1, 1, 1, 2, 2, 3])
TOTALS = Totals(tokens=7, sequences=3, horizon=4)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 11 / 7),
        ("token-sum", 11.0),
        ("seq-mean-token-sum", 11 / 3),
        ("seq-mean-token-mean", (1 + 2 + 3) / 3),
        ("seq-mean-token-sum-norm", 11 / 3 / 4),
    ],
)
def test_aggregation_values(mode, expected):
    assert aggregate(LOSS, torch.ones(7), LENGTHS, mode, TOTALS).item() == pytest.approx(expected, rel=1e-6)


MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@pytest.mark.parametrize("mode", MODES)
def test_shares_of_micro_batches_add_up(mode):
    whole = aggregate(LOSS, torch.ones(7), LENGTHS, mode, TOTALS)
    parts = aggregate(LOSS[:4], torch.ones(4), [4], mode, TOTALS) + aggregate(
        LOSS[4:], torch.ones(3), [2, 1], mode, TOTALS
    )
    assert parts.item() == pytest.approx(whole.item(), rel=1e-6)


def test_ranks_with_different_token_counts_are_not_averaged():
    # rank 0: 4 tokens, loss sum 4; rank 1: 1 token, loss 3: 7 / 5, not (1 + 3) / 2
    totals = Totals(5, 2, 8)
    first = aggregate(torch.ones(4), torch.ones(4), [4], "token-mean", totals)
    second = aggregate(torch.tensor([3.0]), torch.ones(1), [1], "token-mean", totals)
    assert (first + second).item() == pytest.approx(1.4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_what_stands_at_a_masked_token_has_no_effect(mode, poison):
    values = LOSS.clone().requires_grad_()
    mask = torch.tensor([1.0, 1, 1, 1, 1, 0, 0])
    spoiled = torch.cat([values[:5], torch.tensor([poison, poison])])
    totals = Totals(5, 2, 4)
    clean = aggregate(torch.cat([values[:5], torch.zeros(2)]), mask, LENGTHS, mode, totals)
    found = aggregate(spoiled, mask, LENGTHS, mode, totals)
    assert found.item() == pytest.approx(clean.item())
    found.backward()
    assert torch.isfinite(values.grad).all()


def test_masked_sequences_leave_the_denominator():
    # three rows of four tokens with loss 1, one row masked as truncated: 1.0, not 2 / 3
    mask = torch.tensor([1.0] * 8 + [0.0] * 4)
    assert aggregate(torch.ones(12), mask, [4, 4, 4], "token-mean", Totals(8, 2, 4)).item() == 1.0


@pytest.mark.parametrize("mode", MODES)
def test_everything_masked_is_zero(mode):
    assert aggregate(LOSS, torch.zeros(7), LENGTHS, mode, Totals(0, 0, 4)).item() == 0.0


@pytest.mark.parametrize("mode", MODES)
def test_nothing_at_all_is_zero(mode):
    assert aggregate(torch.zeros(0), torch.zeros(0), [], mode, Totals(0, 0, 4)).item() == 0.0


def ppo(ratio, advantage, **changes):
    config = LossConfig(clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0).model_copy(update=changes)
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64)
    result = ppo_loss(
        logprobs, torch.zeros(1, dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64), config
    )
    return result.loss.item(), bool(result.clipped), bool(result.dual_clipped)


@pytest.mark.parametrize(
    ("ratio", "loss", "low"), [(0.5, 0.8, False), (1.1, 1.1, False), (5.0, 3.0, True), (10.0, 3.0, True)]
)
def test_dual_clip_of_negative_advantages(ratio, loss, low):
    value, _, dual_clipped = ppo(ratio, -1.0)
    assert value == pytest.approx(loss)
    assert dual_clipped == low


def test_positive_advantages_are_clipped_above():
    assert ppo(10.0, 1.0)[0] == pytest.approx(-1.2)
    assert ppo(10.0, 1.0, clip_ratio_high=0.28)[0] == pytest.approx(-1.28)
    assert ppo(10.0, 1.0)[1] is True


def test_the_dual_clip_constant_matters_and_can_be_off():
    assert ppo(10.0, -1.0, clip_ratio_c=5.0)[0] == pytest.approx(5.0)
    assert ppo(10.0, -1.0, clip_ratio_c=None)[0] == pytest.approx(10.0)


def gradient(advantages, logprobs=None):
    logprobs = torch.zeros(3, dtype=torch.float64) if logprobs is None else logprobs
    logprobs = logprobs.clone().requires_grad_()
    ppo_loss(logprobs, torch.zeros(3, dtype=torch.float64), advantages, LossConfig()).loss.sum().backward()
    return logprobs.grad


def test_gradient_is_linear_in_the_advantages():
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    one = gradient(advantages)
    assert torch.allclose(one, -advantages)  # on policy it is REINFORCE
    assert torch.allclose(gradient(-advantages), -one)
    assert torch.allclose(gradient(2 * advantages), 2 * one)
    assert torch.equal(gradient(torch.zeros(3, dtype=torch.float64)), torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.1, 1.15, 2.0])
@pytest.mark.parametrize("advantage", [-1.5, 0.7])
def test_gradient_equals_finite_differences(ratio, advantage):
    x = torch.full((3,), math.log(ratio), dtype=torch.float64)
    advantages = torch.full((3,), advantage, dtype=torch.float64)
    step = 1e-6

    def total(values):
        return ppo_loss(values, torch.zeros(3, dtype=torch.float64), advantages, LossConfig()).loss.sum()

    expected = (total(x + step) - total(x - step)) / (2 * step)
    assert gradient(advantages, x).sum().item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("difference", [-200.0, -100.0, -30.0, 0.0, 30.0, 100.0, 200.0])
def test_ratios_and_k3_stay_finite(difference, dtype):
    x = torch.tensor([difference], dtype=dtype, requires_grad=True)
    for value in (ratio_of(x, torch.zeros(1, dtype=dtype)), k3(x, torch.zeros(1, dtype=dtype))):
        (slope,) = torch.autograd.grad(value.sum(), x, retain_graph=True)
        assert torch.isfinite(value).all() and torch.isfinite(slope).all()


@pytest.mark.parametrize("difference", [-5.0, -1.0, 0.0, 0.3, 5.0])
def test_k3_value(difference):
    # k3 of policy logprob p and other q: exp(q - p) - 1 - (q - p)
    expected = math.exp(-difference) - 1 + difference
    assert k3(torch.tensor([difference]), torch.zeros(1)).item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_truncated_importance_weights():
    weights, above = importance_weights(torch.tensor([0.0, 1, 3, 200]), torch.zeros(4), cap=2.0)
    assert weights.tolist() == pytest.approx([1, 2, 2, 2])
    assert above.float().mean().item() == 0.75  # from the raw weights: e > 2
    assert not weights.requires_grad


def test_sft_is_the_negative_log_likelihood():
    assert sft_loss(torch.tensor([-0.5, -2.0])).loss.tolist() == [0.5, 2.0]
