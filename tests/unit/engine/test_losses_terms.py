"""Aggregation, KL, correction, covariance, value loss and metrics: values worked out by hand, and facts by enumeration."""

import math
from dataclasses import replace

import pytest
import torch

from engine.losses.aggregate import Totals, aggregate
from engine.losses.batch import TokenBatch, ratio_of
from engine.losses.config import DESCRIPTIONS, CorrectionConfig, KLConfig, LossConfig
from engine.losses.correction import correction, mean_weight
from engine.losses.covariance import covariances, select_tokens
from engine.losses.kl import k3, kl_estimate, kl_loss
from engine.losses.metrics import advantage_statistics, metric_names, summary, token_sums
from engine.losses.objective import MiniBatch, objective, with_statistics
from engine.losses.value import explained_variance, value_loss, value_moments
from tests.unit.engine.test_losses import batch

LENGTHS = [4, 2, 1]
LOSS = torch.tensor([1.0, 1, 1, 1, 2, 2, 3])
TOTALS = Totals(tokens=7, sequences=3, horizon=4)
VALUES = {
    "token-mean": 11 / 7,
    "token-sum": 11.0,
    "seq-mean-token-sum": 11 / 3,
    "seq-mean-token-mean": (1 + 2 + 3) / 3,
    "seq-mean-token-sum-norm": 11 / 3 / 4,
}
MODES = list(VALUES)


@pytest.mark.parametrize("mode", MODES)
def test_aggregation_values(mode):
    assert aggregate(LOSS, torch.ones(7), LENGTHS, mode, TOTALS).item() == pytest.approx(VALUES[mode], rel=1e-6)


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
def test_everything_masked_or_nothing_at_all_is_zero(mode):
    assert aggregate(LOSS, torch.zeros(7), LENGTHS, mode, Totals(0, 0, 4)).item() == 0.0
    assert aggregate(torch.zeros(0), torch.zeros(0), [], mode, Totals(0, 0, 4)).item() == 0.0


# The whole objective: every loss, term and aggregation over cuts of a mini-batch into micro-batches, in float64.

SIZES = [3, 5, 1, 4, 2]
TERMS = dict(
    entropy_coef=0.2,
    nll_coef=0.3,
    kl=dict(coef=0.4),
    correction=dict(weights="token-truncate", high=1.1, normalize=True),
)


def mini_batch(seed=0, poison=None):
    """All that an objective can need for five responses; one masked wholly."""
    generator = torch.Generator().manual_seed(seed)
    size = sum(SIZES)
    columns = [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(6)]
    mask = torch.rand(size, generator=generator) > 0.25
    mask[8] = False  # the response of one token
    mask[0] = True
    spoiled = [c if poison is None else torch.where(mask, c, torch.tensor(poison).double()) for c in columns]
    noise = [0.4 * c for c in spoiled]
    positive = torch.tensor([True] * 3 + [False] * 6 + [True] * 6)
    return TokenBatch(
        logprobs=noise[0] - 1, old_logprobs=noise[1] - 1, advantages=spoiled[2], mask=mask, lengths=SIZES,
        entropies=spoiled[3].abs(), rollout_logprobs=noise[4] - 1, reference_logprobs=noise[5] - 1, positive=positive,
    )  # fmt: skip


def shared(whole, config):
    mask, good = whole.mask, whole.mask & whole.positive
    totals, of_good = (Totals(int(m.sum()), sum(bool(p.any()) for p in m.split(SIZES)), 6) for m in (mask, good))
    return with_statistics(whole, config, totals, of_good, seed=3)


def cut(whole, order):
    """The responses at `order` as a micro-batch."""
    pick = torch.cat([torch.arange(sum(SIZES))[sum(SIZES[:i]) : sum(SIZES[: i + 1])] for i in order])
    names = [name for name in whole.__dataclass_fields__ if name != "lengths"]
    chosen = {name: getattr(whole, name)[pick] for name in names if getattr(whole, name) is not None}
    return replace(whole, lengths=[SIZES[i] for i in order], **chosen)


def gradient_in_cuts(whole, config, cuts):
    """Gradient by log-probabilities and entropies, loss, and metrics, added up over micro-batches."""
    x, h = (t.clone().requires_grad_() for t in (whole.logprobs, whole.entropies))
    known = shared(whole, config)
    given = replace(whole, logprobs=x, entropies=h, selected=known.selected)
    sums: dict[str, float] = {}
    for order in cuts:
        result = objective(cut(given, order), config, known)
        result.loss.backward()
        for name, value in token_sums(result, config).items():
            sums[name] = sums.get(name, 0.0) + float(value)
    return torch.cat([x.grad, torch.zeros_like(h) if h.grad is None else h.grad]), sums


CUTS = [[[4, 2, 0, 3, 1]], [[0], [1], [2], [3], [4]], [[2], [3, 0], [4, 1]]]


@pytest.mark.parametrize("name", DESCRIPTIONS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("terms", [{}, TERMS], ids=["alone", "all terms"])
def test_the_objective_does_not_depend_on_micro_batches(name, mode, terms):
    config = LossConfig(name=name, aggregation=mode, covariance={"fraction": 0.3, "low": -0.2}, **terms)
    expected, sums = gradient_in_cuts(mini_batch(), config, [list(range(5))])
    assert expected.abs().max() > 1e-3
    names = metric_names(config, rollout=True, reference=True)
    assert set(names.all) == set(sums)
    for cuts in CUTS:
        found, others = gradient_in_cuts(mini_batch(), config, cuts)
        assert (found - expected).abs().max() <= 1e-12
        assert others == pytest.approx(sums, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", DESCRIPTIONS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_the_objective_does_not_see_masked_places(name, poison):
    config = LossConfig(
        name=name, aggregation="seq-mean-token-mean", covariance={"fraction": 0.3, "low": -0.2}, **TERMS
    )
    expected, sums = gradient_in_cuts(mini_batch(), config, [list(range(5))])
    found, others = gradient_in_cuts(mini_batch(poison=poison), config, CUTS[2])
    assert (found - expected).abs().max() <= 1e-12
    assert others == pytest.approx(sums, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_gradient_of_the_whole_objective_equals_finite_differences(mode):
    """With a correction, whose weights are constants, and all further terms; ppo has no other stop-gradient."""
    terms = TERMS | {"kl": {"coef": 0.4, "estimator": "k3"}}
    config, whole, step = LossConfig(aggregation=mode, **terms), mini_batch(1), 1e-6
    known, (found, _) = shared(whole, config), gradient_in_cuts(whole, config, CUTS[2])
    for number in range(len(found) // 2):
        moved = torch.zeros_like(whole.logprobs).index_fill(0, torch.tensor([number]), step)
        losses = [objective(replace(whole, logprobs=whole.logprobs + s * moved), config, known).loss for s in (1, -1)]
        assert ((losses[0] - losses[1]) / (2 * step)).item() == pytest.approx(found[number].item(), rel=1e-6, abs=1e-9)


def test_the_horizon_is_the_configured_one():
    config = LossConfig(aggregation="seq-mean-token-sum-norm")
    whole = mini_batch()
    totals = [Totals(8, 4, horizon) for horizon in (10, 20)]
    one, two = (objective(whole, config, MiniBatch(t, t)).loss.item() for t in totals)
    assert one == pytest.approx(2 * two)


def test_imitated_are_the_good_samples_by_their_own_count():
    given = batch(
        [-1.0, -3.0, -5.0], [-1.0, -3.0, -5.0], [0.0] * 3, lengths=[2, 1], positive=torch.tensor([True, True, False])
    )
    config = LossConfig(nll_coef=0.5)
    assert objective(given, config, MiniBatch(Totals(3, 2, 9), Totals(2, 1, 9))).loss.item() == pytest.approx(0.5 * 2.0)
    assert objective(given, config, MiniBatch(Totals(3, 2, 9), Totals(0, 0, 9))).terms["policy_loss"].item() == 0.0


def test_the_entropy_bonus_raises_entropy():
    given = replace(batch([-1.0] * 2, [-1.0] * 2, [0.0] * 2), entropies=torch.tensor([0.5, 1.5], dtype=torch.float64))
    assert objective(
        given, LossConfig(entropy_coef=0.1), MiniBatch(Totals(2, 1, 9), TOTALS)
    ).loss.item() == pytest.approx(-0.1)


# KL


@pytest.mark.parametrize("difference", [-5.0, -1.0, 0.0, 0.3, 5.0])
def test_kl_estimates(difference):
    p, q = torch.tensor([difference], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    expected = {
        "k1": difference,
        "k2": difference**2 / 2,
        "k3": math.exp(-difference) - 1 + difference,
        "abs": abs(difference),
    }
    expected |= {"k1+": expected["k1"], "k3+": expected["k3"]}
    for name, number in expected.items():
        assert kl_estimate(p, q, name).item() == pytest.approx(number, rel=1e-9, abs=1e-12)
    assert k3(p.float(), q.float()).item() == pytest.approx(expected["k3"], rel=1e-5, abs=1e-6)
    with pytest.raises(ValueError, match="whole distribution"):
        kl_estimate(p, q, "full")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("difference", [-1e4, -200.0, -100.0, -30.0, 0.0, 30.0, 100.0, 200.0, 1e4])
@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs", "k1+", "k3+"])
def test_ratios_and_estimates_stay_finite(name, difference, dtype):
    x = torch.tensor([difference], dtype=dtype, requires_grad=True)
    zero = torch.zeros(1, dtype=dtype)
    for found in (ratio_of(x, zero), kl_estimate(x, zero, name)):
        (slope,) = torch.autograd.grad(found.sum(), x, retain_graph=True)
        assert torch.isfinite(found).all() and torch.isfinite(slope).all()


def _policies():
    generator = torch.Generator().manual_seed(4)
    logits, other, old = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(3))
    return logits.requires_grad_(), other.log_softmax(0), old.log_softmax(0)


def _expected_gradient(estimator, weighted):
    """Of the estimator as a loss, over all seven outcomes of the policy (of the old policy, if it is weighted)."""
    logits, reference, old = _policies()
    logprobs = logits.log_softmax(0)
    sampler = old if weighted else logprobs.detach()
    given = replace(batch(logprobs, old, [0.0] * 7), logprobs=logprobs, reference_logprobs=reference)
    loss = kl_loss(given, KLConfig(coef=1.0, estimator=estimator, weighted=weighted))
    (slope,) = torch.autograd.grad((sampler.exp() * loss).sum(), logits)
    return slope


def _gradient_of(divergence):
    logits, reference, _ = _policies()
    logprobs = logits.log_softmax(0)
    values = {
        "reverse": (logprobs.exp() * (logprobs - reference)).sum(),
        "forward": (reference.exp() * (reference - logprobs)).sum(),
        "distance": (logprobs.exp() - reference.exp()).abs().sum(),
    }
    return torch.autograd.grad(values[divergence], logits)[0]


@pytest.mark.parametrize(
    ("estimator", "weighted", "divergence"),
    [
        ("k2", False, "reverse"), ("k1+", False, "reverse"), ("k3+", False, "reverse"), ("k3", False, "forward"),
        ("abs", False, "distance"), ("k1", True, "reverse"), ("k3", True, "reverse"),
    ],
)  # fmt: skip
def test_whose_gradient_an_estimator_has(estimator, weighted, divergence):
    assert torch.allclose(_expected_gradient(estimator, weighted), _gradient_of(divergence), atol=1e-12)


def test_k1_in_the_loss_has_no_expected_gradient():
    assert _expected_gradient("k1", False).abs().max() < 1e-12


def test_the_kl_term_needs_a_reference_only_if_it_counts():
    given = batch([-1.0], [-1.0], [1.0])
    assert not LossConfig().needs_reference
    objective(given, LossConfig(), MiniBatch(TOTALS, TOTALS))
    with pytest.raises(ValueError, match="reference"):
        objective(given, LossConfig(kl={"coef": 0.1}), MiniBatch(TOTALS, TOTALS))


@pytest.mark.parametrize("estimator", ["k2", "k3", "abs", "k1+", "k3+"])
def test_a_step_against_the_kl_term_goes_towards_the_reference(estimator):
    x = torch.tensor([-1.0, -3.0], dtype=torch.float64, requires_grad=True)
    reference = torch.full((2,), -2.0, dtype=torch.float64)
    given = replace(batch(x, [-1.0, -3.0], [0.0] * 2), logprobs=x, reference_logprobs=reference)
    config = LossConfig(kl={"coef": 1.0, "estimator": estimator})
    objective(given, config, MiniBatch(Totals(2, 1, 9), TOTALS)).loss.backward()
    assert x.grad[0] > 0 > x.grad[1]


def test_an_adaptive_coefficient():
    fixed, adaptive = KLConfig(coef=0.1), KLConfig(coef=0.1, target=0.5, horizon=1000)
    assert fixed.next_coef(0.1, 9.0, 100) == 0.1
    assert adaptive.next_coef(0.1, 0.55, 100) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert adaptive.next_coef(0.1, 9.0, 100) == pytest.approx(0.1 * 1.02)
    assert adaptive.next_coef(0.1, 0.0, 100) == pytest.approx(0.1 * 0.98)


# Train/rollout correction


def weights(gaps, lengths=None, mask=None, **config):
    given = batch([0.0] * len(gaps), gaps, [1.0] * len(gaps), lengths=lengths, mask=mask)
    given = replace(given, rollout_logprobs=torch.zeros(len(gaps), dtype=torch.float64))
    return correction(given, CorrectionConfig(**config))


def test_truncated_token_weights():
    found = weights([0.0, 1.0, 3.0, 200.0], weights="token-truncate", high=2.0)
    assert found.weights.tolist() == pytest.approx([1, 2, 2, 2])
    assert found.outside.double().mean().item() == 0.75  # from the raw weights: e > 2
    assert not found.weights.requires_grad


def test_masked_token_weights_and_icepop():
    gaps = [math.log(x) for x in (0.4, 0.6, 1.9, 2.1)]
    assert weights(gaps, weights="token-mask").weights.tolist() == pytest.approx([0.4, 0.6, 1.9, 0])
    pop = weights(gaps, weights="token-mask", low=0.5, high=2.0)
    assert pop.weights.tolist() == pytest.approx([0, 0.6, 1.9, 0])
    assert pop.outside.tolist() == [True, False, False, True]


def test_masked_tokens_have_no_weight_and_no_say():
    found = weights([math.log(1.5), 9.0, math.log(1.2)], mask=[1, 0, 1], weights="sequence-truncate", high=4.0)
    assert found.weights.tolist() == pytest.approx([1.8, 0, 1.8])
    assert found.unit.tolist() == pytest.approx([0.5, 0, 0.5])


def test_sequence_weights_are_products():
    gaps, lengths = [math.log(1.5), math.log(2.0), math.log(0.5), 0.0], [2, 2]
    assert weights(gaps, lengths, weights="sequence-truncate", high=2.0).weights.tolist() == pytest.approx(
        [2, 2, 0.5, 0.5]
    )
    assert weights(gaps, lengths, weights="sequence-mask", high=2.0).weights.tolist() == pytest.approx([0, 0, 0.5, 0.5])
    assert weights(gaps, lengths, weights="sequence-mask", low=0.6, high=4.0).weights.tolist() == pytest.approx(
        [3, 3, 0, 0]
    )


def test_geometric_mask_drops_whole_sequences():
    gaps, lengths = [0.5, -0.3, 0.2, 0.4], [2, 2]  # means 0.1 and 0.3
    found = weights(gaps, lengths, geometric_high=math.exp(0.2))
    assert found.weights.tolist() == [1, 1, 0, 0] and found.outside.tolist() == [False, False, True, True]
    assert weights(gaps, lengths, geometric_low=math.exp(0.2)).weights.tolist() == [0, 0, 1, 1]
    masked = weights([0.5, 9.0, 0.3], [3], mask=[1, 0, 1], geometric_high=math.exp(0.39))
    assert masked.weights.tolist() == [0, 0, 0]  # a mean of 0.4 over the two trained tokens, not of 0.27 over three
    both = weights(gaps, lengths, geometric_high=math.exp(0.2), weights="token-truncate", high=1.2)
    assert both.weights.tolist() == pytest.approx([1.2, math.exp(-0.3), 0, 0])


def test_missing_rollout_log_probabilities_are_an_error():
    config = LossConfig(correction={"weights": "token-truncate"})
    with pytest.raises(ValueError, match="rollout"):
        objective(batch([0.0], [0.0], [1.0]), config, MiniBatch(TOTALS, TOTALS))


def test_normalised_weights_have_mean_one():
    found = weights([0.0, math.log(3.0)], weights="token-truncate", high=5.0)
    assert mean_weight(found).item() == pytest.approx(2.0)
    nothing = weights([1.0], weights="token-mask", high=2.0)
    assert mean_weight(nothing).item() == 1.0  # nothing is left, and nothing is divided
    of_sequences = weights([math.log(3.0), 0.0, 0.0, math.log(2.0)], [3, 1], weights="sequence-truncate", high=5.0)
    assert mean_weight(of_sequences).item() == pytest.approx(2.5)


def test_in_bypass_mode_the_weight_is_of_the_present_policy():
    x = torch.tensor([math.log(1.5)], dtype=torch.float64, requires_grad=True)
    given = replace(batch(x, [0.0], [2.0]), logprobs=x, rollout_logprobs=torch.zeros(1, dtype=torch.float64))
    config = LossConfig(name="reinforce", correction={"weights": "token-truncate", "bypass": True})
    objective(given, config, MiniBatch(Totals(1, 1, 1), TOTALS)).loss.backward()
    assert x.grad.item() == pytest.approx(-2 * 1.5)


# Covariance


def test_covariances_are_over_the_trained_tokens():
    given = batch([1.0, 3.0, 50.0], [0.0] * 3, [1.0, -1.0, 9.0], mask=[1, 1, 0])
    assert covariances(given).tolist() == pytest.approx([-1.0, -1.0, 0.0])


def test_kl_cov_takes_the_highest_covariances():
    given = batch([-1.0, -2.0, -3.0, -9.0], [0.0] * 4, [1.0, 0.0, -2.0, -99.0], mask=[1, 1, 1, 0])
    config = LossConfig(name="kl_cov", covariance={"fraction": 0.34})
    assert select_tokens(given, config, 0).tolist() == [False, False, True, False]
    two = LossConfig(name="kl_cov", covariance={"fraction": 0.67})
    assert select_tokens(given, two, 0).tolist() == [True, False, True, False]


def test_clip_cov_draws_between_its_bounds():
    generator = torch.Generator().manual_seed(0)
    x, a = (torch.randn(400, generator=generator, dtype=torch.float64) for _ in range(2))
    given = batch(x, [0.0] * 400, a + x)
    config = LossConfig(name="clip_cov", covariance={"fraction": 0.05, "low": 0.5, "high": 2.0})
    draws = [select_tokens(given, config, seed) for seed in (1, 1, 2)]
    inside = (covariances(given) > 0.5) & (covariances(given) < 2.0)
    assert [int(d.sum()) for d in draws] == [20] * 3 and int(inside.sum()) > 40
    assert all(bool(inside[d].all()) for d in draws)
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_a_selection_of_no_candidate_is_empty():
    config = LossConfig(name="clip_cov", covariance={"low": 1e3, "high": 1e4})
    assert not select_tokens(batch([1.0, 2.0], [0.0] * 2, [1.0, 2.0]), config, 0).any()
    assert not select_tokens(batch([1.0, 2.0], [0.0] * 2, [1.0, 2.0], mask=[0, 0]), config, 0).any()


# Metrics and value loss


def test_metrics_are_means_over_the_trained_tokens():
    given = batch([-1.0, -1.0, -1.0, 7.0], [-1.5, -1.0, -1.0, 0.0], [1.0] * 4, mask=[1, 1, 1, 0], lengths=[2, 2])
    rollout = torch.tensor([-1.5, -1.05, -3.0, 99.0], dtype=torch.float64)
    given = replace(given, rollout_logprobs=rollout).cleaned()
    config = LossConfig(correction={"weights": "token-truncate", "high": 2.0})
    sums = {
        n: float(v) for n, v in token_sums(objective(given, config, MiniBatch(Totals(3, 2, 9), TOTALS)), config).items()
    }
    found = summary(sums, metric_names(config, rollout=True, reference=False), 1)
    assert found["clip_fraction"] == pytest.approx(1 / 3)
    assert found["approx_kl_k1"] == pytest.approx(-0.5 / 3)
    assert found["approx_kl"] == pytest.approx((math.exp(0.5) - 1.5) / 3)
    assert found["rollout_logprob_gap"] == pytest.approx((0 + 0.05 + 2) / 3)
    histogram = [found[name] for name in found if name.startswith("rollout_gap/")]
    assert histogram == pytest.approx([1 / 3, 0, 1 / 3, 0, 1 / 3])
    raw = [1.0, math.exp(0.05), 2.0]
    assert found["correction_outside"] == pytest.approx(1 / 3)
    assert found["correction_ess"] == pytest.approx(sum(raw) ** 2 / 3 / sum(w * w for w in raw))
    assert "entropy" in found and not any(name in found for name in ("tokens", "weight", "unit"))


def test_without_a_trained_token_no_mean_is_reported():
    given = batch([1.0], [0.0], [1.0], mask=[0])
    sums = {
        n: float(v)
        for n, v in token_sums(objective(given, LossConfig(), MiniBatch(TOTALS, TOTALS)), LossConfig()).items()
    }
    found = summary(sums, metric_names(LossConfig(), rollout=False, reference=False), 0)
    assert found == {"loss": 0.0, "policy_loss": 0.0}
    assert advantage_statistics([[1.0]], [[0]]) == {}


def test_advantage_statistics_are_of_the_trained_tokens():
    found = advantage_statistics([[1.0, 99.0], [3.0]], [[1, 0], [1]])
    assert found == {"advantage_mean": 2.0, "advantage_std": 1.0, "advantage_min": 1.0, "advantage_max": 3.0}


@pytest.mark.parametrize(
    ("value", "clip", "expected", "clipped"),
    [(1.5, None, 0.125, False), (1.5, 0.2, 0.32, True), (0.1, 0.2, 0.405, False), (3.0, 0.2, 2.0, False)],
)
def test_value_loss(value, clip, expected, clipped):
    # return 1, old prediction 0: held to [-0.2, 0.2], whose nearest end is 0.8 away
    x = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    loss, flag = value_loss(x, zero, one, clip)
    assert (loss.item(), bool(flag)) == (pytest.approx(expected), clipped)
    loss.backward()
    step = 1e-6
    moved = [value_loss(x.detach() + s * step, zero, one, clip)[0].item() for s in (1, -1)]
    assert x.grad.item() == pytest.approx((moved[0] - moved[1]) / (2 * step), abs=1e-8)


def test_explained_variance_adds_up_over_ranks_and_ignores_masked_values():
    values, returns = torch.tensor([1.0, 2.0, 2.5, math.nan]), torch.tensor([1.0, 2.0, 3.0, 100.0])
    mask = torch.tensor([1, 1, 1, 0])
    whole = value_moments(values, returns, mask)
    parts = value_moments(values[:1], returns[:1], mask[:1]) + value_moments(values[1:], returns[1:], mask[1:])
    assert whole.tolist() == pytest.approx(parts.tolist())
    errors = torch.tensor([0.0, 0.0, 0.5], dtype=torch.float64)
    expected = 1 - errors.var(correction=0) / torch.tensor([1.0, 2, 3], dtype=torch.float64).var(correction=0)
    assert explained_variance(whole) == pytest.approx(expected.item())
    assert explained_variance(value_moments(values, torch.ones(4), mask)) is None
    assert explained_variance(value_moments(values, returns, torch.zeros(4))) is None
