"""Every policy loss: values worked out by hand, gradients beside an independent scalar formula, extreme numbers, signs."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine.losses.batch import TokenBatch, TokenLoss
from engine.losses.config import DESCRIPTIONS, LossConfig
from engine.losses.registry import FUNCTIONS, loss_function

LOSSES = [name for name in DESCRIPTIONS if name != "sft"]
SELECTED = [False, True, False]


def batch(logprobs, old, advantages, lengths=None, mask=None, **more):
    """A cleaned batch in float64 from lists; by default one sequence, all of it trained on."""
    size = len(logprobs)

    def tensor(values):
        return values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.float64)

    mask = torch.ones(size, dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    more.setdefault("selected", torch.zeros(size, dtype=torch.bool))
    given = TokenBatch(
        tensor(logprobs), tensor(old), tensor(advantages), mask, lengths or [size], torch.zeros(size, dtype=torch.float64),
        **more,
    )  # fmt: skip
    return given.cleaned()


def value(name, ratio, advantage, **config):
    """Loss and flag of a single token whose old probability is 0.1."""
    old = math.log(0.1)
    result = loss_function(name)(batch([math.log(ratio) + old], [old], [advantage]), LossConfig(name=name, **config))
    return result.loss.item(), result.clipped is not None and bool(result.clipped), result


def test_every_description_has_its_function():
    assert list(FUNCTIONS) == list(DESCRIPTIONS)
    assert all(entry.summary and entry.source for entry in DESCRIPTIONS.values())


@pytest.mark.parametrize(
    ("ratio", "expected", "low"), [(0.5, 0.8, False), (1.1, 1.1, False), (5.0, 3.0, True), (10.0, 3.0, True)]
)
def test_ppo_dual_clip_of_negative_advantages(ratio, expected, low):
    loss, _, result = value("ppo", ratio, -1.0)
    assert loss == pytest.approx(expected)
    assert bool(result.dual_clipped) == low


@pytest.mark.parametrize(
    ("ratio", "advantage", "config", "expected", "clipped"),
    [
        (10.0, 1.0, {}, -1.2, True),
        (10.0, 1.0, {"clip_ratio_high": 0.28}, -1.28, True),
        (0.5, 1.0, {}, -0.5, False),
        (0.5, -1.0, {"clip_ratio_low": 0.3}, 0.7, True),
        (10.0, -1.0, {"clip_ratio_c": 5.0}, 5.0, False),
        (10.0, -1.0, {"clip_ratio_c": None}, 10.0, False),
    ],
)
def test_ppo_clips_below_and_above(ratio, advantage, config, expected, clipped):
    assert value("ppo", ratio, advantage, **config)[:2] == (pytest.approx(expected), clipped)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"), [(2.0, 1.0, 1.2), (0.5, 1.0, 0.8), (1.1, -2.0, 1.1), (2.0, -2.0, 1.2)]
)
def test_cispo_weighs_the_log_probability_by_the_clipped_ratio(ratio, advantage, weight):
    loss, clipped, _ = value("cispo", ratio, advantage)
    assert loss == pytest.approx(-weight * advantage * (math.log(0.1) + math.log(ratio)))
    assert clipped == (weight != ratio)


@pytest.mark.parametrize(("ratio", "advantage", "tau"), [(2.0, 1.0, 1.0), (0.5, -3.0, 1.05), (1.0, 1.0, 1.0)])
def test_sapo_gate(ratio, advantage, tau):
    expected = -advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
    assert value("sapo", ratio, advantage)[0] == pytest.approx(expected)
    assert value("sapo", ratio, advantage, sapo_tau_positive=2.0)[0] == pytest.approx(
        -advantage * 2 / (1 + math.exp(-2 * (ratio - 1))) if advantage > 0 else expected
    )


def test_gspo_takes_the_geometric_mean_of_the_trained_tokens():
    # log-ratios 0.1, 0.3 and a masked one: s = e^0.2 = 1.2214, clipped at 1.2 for A > 0
    given = batch([0.1, 0.3, 9.0], [0.0] * 3, [1.0] * 3, mask=[1, 1, 0])
    result = loss_function("gspo")(given, LossConfig(name="gspo"))
    assert result.loss[:2].tolist() == pytest.approx([-1.2, -1.2])
    free = loss_function("gspo")(given, LossConfig(name="gspo", clip_ratio_high=0.3))
    assert free.loss[:2].tolist() == pytest.approx([-math.exp(0.2)] * 2)
    assert result.clipped[:2].all() and not free.clipped[:2].any()


def test_gspo_gradient_is_the_objectives_where_a_sequence_has_one_advantage():
    x = torch.tensor([0.1, 0.05, -0.1, 0.2], dtype=torch.float64, requires_grad=True)
    given = batch(x, [0.0] * 4, [0.7, 0.7, -1.0, -1.0], lengths=[2, 2])
    loss_function("gspo")(given, LossConfig(name="gspo")).loss.sum().backward()
    # d/dx of 2 tokens x -A exp(mean): -A s / 2 for each of 2 tokens
    assert x.grad.tolist() == pytest.approx([-0.7 * math.exp(0.075)] * 2 + [math.exp(0.05)] * 2)


def test_gmpo_clips_token_by_token_in_the_direction_of_the_advantage():
    # A > 0: 0.5 is held at 0.4, -0.9 is not: mean -0.25. A < 0: -0.9 is held at -0.4, 0.5 is not: mean 0.05
    config = LossConfig(name="gmpo", clip_ratio_low=0.4, clip_ratio_high=0.4)
    for advantage, mean, clipped in ((2.0, -0.25, [True, False]), (-2.0, 0.05, [False, True])):
        result = loss_function("gmpo")(batch([0.5, -0.9], [0.0, 0.0], [advantage] * 2), config)
        assert result.loss.tolist() == pytest.approx([-advantage * math.exp(mean)] * 2)
        assert result.clipped.tolist() == clipped


@pytest.mark.parametrize("name", ["gpg", "reinforce"])
def test_the_plain_policy_gradient_has_no_ratio(name):
    assert value(name, 7.0, 2.0)[0] == pytest.approx(-2 * (math.log(0.1) + math.log(7)))


def test_dro():
    assert value("dro", 2.0, 3.0, dro_beta=0.5)[0] == pytest.approx(-(3 * math.log(0.2) - 0.25 * math.log(2) ** 2))


@pytest.mark.parametrize(
    ("ratio", "advantage", "threshold", "stopped"),
    [(3.0, 1.0, 0.19, True), (3.0, 1.0, 0.21, False), (3.0, -1.0, 0.19, False), (0.1, -1.0, 0.08, True), (0.1, 1.0, 0.08, False)],
)  # fmt: skip
def test_dppo_stops_by_total_variation_in_the_direction_of_the_advantage(ratio, advantage, threshold, stopped):
    # from probability 0.1 to 0.3, total variation 0.2; to 0.01, 0.09
    loss, flag, _ = value("dppo_tv", ratio, advantage, clip_ratio_high=threshold, clip_ratio_low=threshold)
    assert flag == stopped
    assert loss == pytest.approx(0 if stopped else -advantage * ratio * math.log(0.1 * ratio))


@pytest.mark.parametrize("margin", [-1e-3, 1e-3])
def test_dppo_stops_by_the_divergence_of_two_outcomes(margin):
    divergence = 0.1 * math.log(0.1 / 0.3) + 0.9 * math.log(0.9 / 0.7)  # KL(old || policy)
    loss, stopped, _ = value("dppo_kl", 3.0, 1.0, clip_ratio_high=divergence + margin)
    assert stopped == (margin < 0)
    assert loss == pytest.approx(0 if stopped else -3 * math.log(0.3))


def test_dppo_truncates_the_ratio():
    for cap, weight in ((3.0, 3.0), (20.0, 9.0), (None, 9.0)):
        assert value("dppo_tv", 9.0, 1.0, clip_ratio_c=cap, clip_ratio_high=0.9)[0] == pytest.approx(
            -weight * math.log(0.9)
        )


def test_selected_tokens_of_the_covariance_losses():
    given = batch([0.1, 0.2, -0.3], [0.0] * 3, [1.0, 1.0, -1.0], selected=torch.tensor(SELECTED))
    stopped = loss_function("clip_cov")(given, LossConfig(name="clip_cov"))
    assert stopped.loss.tolist() == pytest.approx([-math.exp(0.1), 0, 0.8])
    assert stopped.clipped.tolist() == [False, True, True]
    penalised = loss_function("kl_cov")(given, LossConfig(name="kl_cov", covariance={"coef": 3.0}))
    assert penalised.loss.tolist() == pytest.approx([-math.exp(0.1), -math.exp(0.2) + 0.6, math.exp(-0.3)])


def test_sft_is_the_negative_log_likelihood():
    assert loss_function("sft")(batch([-0.5, -2.0], [0, 0], [0, 0]), LossConfig(name="sft")).loss.tolist() == [0.5, 2.0]


# An independent scalar formula for each loss: `x` varies, `s` is the same number held constant (stop-gradient), per sequence.


def _clip(value, low, high):
    return min(max(value, low), high)


def _surrogate(r, a, c=3.0):
    loss = max(-a * r, -a * _clip(r, 0.8, 1.2))
    return min(loss, -a * c) if a < 0 and c else loss


def formula(name, x, s, old, adv):
    """Sum over the tokens of one sequence of a loss with default settings; tokens flagged by SELECTED, cyclically."""
    n = len(x)
    r = [math.exp(a - b) for a, b in zip(x, old, strict=True)]
    fixed = [math.exp(a - b) for a, b in zip(s, old, strict=True)]
    chosen = [SELECTED[i % 3] for i in range(n)]
    if name == "ppo":
        return sum(map(_surrogate, r, adv))
    if name == "gspo":
        mean = sum(math.log(q) for q in fixed) / n
        return sum(_surrogate(math.exp(mean + a - b), g, None) for a, b, g in zip(x, s, adv, strict=True))
    if name == "gmpo":
        logs = [
            min(math.log(q), 0.2) if a > 0 else max(math.log(q), -0.2) if a < 0 else math.log(q)
            for q, a in zip(r, adv, strict=True)
        ]
        return -sum(adv) * math.exp(sum(logs) / n)
    if name == "cispo":
        return sum(-_clip(q, 0.8, 1.2) * a * v for q, a, v in zip(fixed, adv, x, strict=True))
    if name == "sapo":
        taus = [1.0 if a > 0 else 1.05 for a in adv]
        return sum(-a * 4 / t / (1 + math.exp(-t * (q - 1))) for a, t, q in zip(adv, taus, r, strict=True))
    if name == "clip_cov":
        return sum(0 if c else _surrogate(q, a) for q, a, c in zip(r, adv, chosen, strict=True))
    if name == "kl_cov":
        return sum(-a * q + (abs(math.log(q)) if c else 0) for q, a, c in zip(r, adv, chosen, strict=True))
    if name.startswith("dppo"):
        return sum(map(lambda *t: _dppo(name, *t), x, s, old, adv))
    if name == "dro":
        return sum(-(a * v - 0.025 * (v - o) ** 2) for a, v, o in zip(adv, x, old, strict=True))
    return sum(-a * v for a, v in zip(adv, x, strict=True))


def _dppo(name, x, s, old, a):
    p, q = math.exp(s), math.exp(old)
    kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    far = (abs(p - q) if name == "dppo_tv" else kl) > 0.2
    stopped = far and ((a > 0 and p > q) or (a < 0 and p < q))
    return 0 if stopped else -a * min(p / q, 3.0) * x


def both(name, x, old, adv, lengths):
    """Our values and gradient, and those of the formula by central differences."""
    ours = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    chosen = torch.tensor([SELECTED[i % 3] for n in lengths for i in range(n)])
    loss = loss_function(name)(batch(ours, old, adv, lengths=lengths, selected=chosen), LossConfig(name=name)).loss
    loss.sum().backward()
    value, slopes, start, step = 0.0, [], 0, 1e-6
    for n in lengths:
        s, o, a = x[start : start + n], old[start : start + n], adv[start : start + n]
        value += formula(name, s, s, o, a)
        for i in range(n):
            moved = [[v + sign * step * (j == i) for j, v in enumerate(s)] for sign in (1, -1)]
            slopes.append((formula(name, moved[0], s, o, a) - formula(name, moved[1], s, o, a)) / (2 * step))
        start += n
    return loss.sum().item(), ours.grad.tolist(), value, slopes


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(6))
def test_value_and_gradient_equal_the_scalar_formula(name, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = [4, 1, 6]
    old = (-0.05 - 2 * torch.rand(11, generator=generator, dtype=torch.float64)).tolist()
    width = (0.1, 0.6)[seed % 2]  # near the clip, and far outside
    x = [min(-0.01, o + d) for o, d in zip(old, (torch.randn(11, generator=generator) * width).tolist(), strict=True)]
    adv = torch.randn(11, generator=generator, dtype=torch.float64).tolist()
    if seed > 2:
        adv = [adv[0]] * 4 + [0.0] + [adv[5]] * 6
    value, gradient, expected, slopes = both(name, x, old, adv, lengths)
    assert value == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert gradient == pytest.approx(slopes, rel=1e-6, abs=1e-8)


def gradient(name, x, old, advantages, mask=None, lengths=None, dtype=torch.float64):
    x = torch.tensor(x, dtype=dtype, requires_grad=True)
    given = batch(x, torch.tensor(old, dtype=dtype), torch.tensor(advantages, dtype=dtype), lengths=lengths, mask=mask)
    loss = loss_function(name)(given, LossConfig(name=name)).loss
    loss.sum().backward()
    return loss.detach(), x.grad


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "dro"])
def test_on_policy_every_loss_is_reinforce(name):
    x, advantages = [-1.0, -0.7, -2.0, -0.3], [1.0, 1.0, 1.0, -2.0]
    _, slope = gradient(name, x, x, advantages, lengths=[3, 1])
    assert slope.tolist() == pytest.approx([-a for a in advantages])
    assert gradient("dro", x, x, advantages)[1].tolist() == pytest.approx([-a for a in advantages])


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_linear_in_the_advantages_on_policy_and_zero_without(name):
    x, advantages = [-1.0, -0.7, -2.0], [1.0, -2.0, 0.5]
    one = gradient(name, x, x, advantages)[1]
    assert torch.allclose(gradient(name, x, x, [-a for a in advantages])[1], -one)
    assert torch.allclose(gradient(name, x, x, [2 * a for a in advantages])[1], 2 * one)
    assert gradient(name, x, x, [0.0] * 3)[1].tolist() == [0.0] * 3


@pytest.mark.parametrize("name", [name for name in LOSSES if not DESCRIPTIONS[name].sequence])
def test_a_masked_token_takes_exactly_its_own_gradient_away(name):
    x, old, advantages = [-1.0, -0.7, -2.0], [-1.1, -0.6, -2.05], [1.0, -2.0, 0.5]
    whole, less = gradient(name, x, old, advantages)[1], gradient(name, x, old, advantages, mask=[1, 0, 1])[1]
    assert less.tolist() == pytest.approx([whole[0].item(), 0.0, whole[2].item()])


@pytest.mark.parametrize("name", DESCRIPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [20.0, 88.0, 200.0, 1e4])
@pytest.mark.parametrize("advantage", [-3.0, 0.0, 2.0])
def test_extreme_log_ratios_stay_finite(name, dtype, size, advantage):
    x, old = [-size, size, 0.0, -size, -1.0], [0.0, 0.0, size, size, -size]
    loss, slope = gradient(name, x, old, [advantage] * 5, lengths=[2, 3], dtype=dtype)
    assert torch.isfinite(loss).all() and torch.isfinite(slope).all()
    assert loss.dtype == torch.float32  # half precision is widened


@pytest.mark.parametrize("name", DESCRIPTIONS)
@given(
    st.lists(st.tuples(*[st.floats(-1e4, 1e4)] * 3), min_size=1, max_size=6), st.sampled_from([torch.float32, torch.float64])
)  # fmt: skip
@hypothesis_settings(max_examples=30, deadline=None)
def test_any_numbers_stay_finite(name, tokens, dtype):
    x, old, advantages = (list(column) for column in zip(*tokens, strict=True))
    loss, slope = gradient(name, x, old, advantages, dtype=dtype)
    assert torch.isfinite(loss).all() and torch.isfinite(slope).all()


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_nothing_and_everything_masked(name):
    loss, slope = gradient(name, [], [], [], lengths=[])
    assert loss.shape == slope.shape == (0,)
    loss, slope = gradient(
        name, [-1.0, -2.0, -1.0], [float("nan")] * 3, [float("inf")] * 3, [0, 0, 0], lengths=[2, 0, 1]
    )
    assert slope.tolist() == [0.0] * 3 and torch.isfinite(loss).all()


def test_the_dual_clip_constant_comes_from_the_configuration():
    assert value("ppo", 10.0, -1.0, clip_ratio_c=5.0)[0] != value("ppo", 10.0, -1.0)[0]


def own_loss(given: TokenBatch, config: LossConfig) -> TokenLoss:
    return TokenLoss(-given.advantages * given.logprobs * 2)


def test_a_users_own_loss():
    name = "tests.unit.engine.test_losses:own_loss"
    assert loss_function(name)(batch([-1.0], [0.0], [3.0]), LossConfig(name=name)).loss.item() == 6.0
    with pytest.raises(ValueError, match="no_such"):
        loss_function("no_such_module:f")
