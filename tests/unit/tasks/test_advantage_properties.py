"""What holds for every estimator, whatever the batch: order, company and masked places do not matter."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.advantages import ESTIMATORS, AlgorithmConfig, Batch
from tasks.advantages.batch import PER_TOKEN

CONFIG = AlgorithmConfig(gamma=0.9, lam=0.8, gdpo_weights={"reward": 1.0, "acc": 2.0})
OVER_THE_BATCH = {"gae", "gdpo", "gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}
"""Estimators whose result depends on all groups of the step, by whitening or scaling."""


@st.composite
def steps(draw):
    """Samples of several groups as (rewards, group ids, masks, numbers a token, numbers a sample)."""
    samples = draw(st.integers(1, 9))
    rewards = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, None]), min_size=samples, max_size=samples))
    groups = draw(st.lists(st.sampled_from("abc"), min_size=samples, max_size=samples))
    masks = draw(st.lists(st.lists(st.sampled_from([0, 1, 1]), max_size=6), min_size=samples, max_size=samples))
    seed = draw(st.integers(0, 2**16))
    return rewards, groups, masks, seed


def make(rewards, groups, masks, seed):
    random = np.random.default_rng(seed)
    per_token = [
        {
            "values": random.uniform(0, 1, len(mask)),
            "token_rewards": random.uniform(0, 0.1, len(mask)),
            "rollout_logprobs": -random.uniform(0.1, 3, len(mask)),
            "reference_logprobs": -random.uniform(0.1, 3, len(mask)),
            "sum_pi_squared": random.uniform(0.7, 1, len(mask)),
        }
        for mask in masks
    ]
    per_sample = {"greedy": random.choice([0.0, 1.0], len(rewards)), "acc": random.choice([0.0, 1.0], len(rewards))}
    return list(zip(rewards, groups, masks, per_token, per_sample["greedy"], per_sample["acc"], strict=True))


def batch_of(samples, spoil=None):
    flat = {name: np.concatenate([s[3][name] for s in samples] + [[]]) for name in PER_TOKEN}
    if spoil is not None:
        mask = np.array([bool(m) for s in samples for m in s[2]], dtype=bool)
        flat = {name: np.where(mask, values, spoil) for name, values in flat.items()}
    return Batch.of(
        [s[0] for s in samples],
        [s[1] for s in samples],
        masks=[s[2] for s in samples],
        greedy_rewards=np.array([s[4] for s in samples]),
        components={"acc": np.array([s[5] for s in samples])},
        **flat,
    )


def rows(name, samples, spoil=None):
    """A list of advantages a sample."""
    batch = batch_of(samples, spoil)
    if name == "gdpo" and not batch.scored.any():
        return [np.zeros(len(s[2])) for s in samples]
    found = ESTIMATORS.find(name).estimate(batch, CONFIG)
    assert np.isfinite(found.advantages).all() and not found.advantages[~batch.mask].any()
    return np.split(found.advantages, batch.offsets[1:-1])


def same(left, right):
    return all(np.allclose(a, b, atol=1e-9) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("name", ESTIMATORS.names())
@settings(max_examples=25, deadline=None)
@given(step=steps(), data=st.data())
def test_order_company_and_masked_places_do_not_matter(name, step, data):
    samples = make(*step)
    expected = rows(name, samples)
    for spoil in (np.nan, np.inf, 1e9):
        assert same(rows(name, samples, spoil), expected)
    order = data.draw(st.permutations(range(len(samples))))
    shuffled = rows(name, [samples[index] for index in order])
    assert same(shuffled, [expected[index] for index in order])
    if name not in OVER_THE_BATCH:
        for group in sorted({s[1] for s in samples}):
            members = [index for index, s in enumerate(samples) if s[1] == group]
            assert same(rows(name, [samples[index] for index in members]), [expected[index] for index in members])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "maxrl", "gpg", "reinforce_plus_plus_baseline"])
@settings(max_examples=25, deadline=None)
@given(step=steps())
def test_advantages_against_the_groups_mean_sum_to_zero(name, step):
    rewards, groups, _, seed = step
    samples = make(rewards, groups, [[1]] * len(rewards), seed)  # one token each, so that whitening weighs all alike
    sums = dict.fromkeys(groups, 0.0)
    for sample, row in zip(samples, rows(name, samples), strict=True):
        sums[sample[1]] += row.sum()
    total = [sum(sums.values())] if name == "reinforce_plus_plus_baseline" else list(sums.values())
    assert total == pytest.approx([0.0] * len(total), abs=1e-6)
