"""Group estimators against values computed by hand, and the registry around all estimators."""

import numpy as np
import pytest

from tasks.advantages import ESTIMATORS, AlgorithmConfig, BadEstimate, Batch, Estimate, estimator, find_estimator
from tasks.plugins import UnknownFunction

GROUP = [
    "grpo", "dr_grpo", "grpo_passk", "rloo", "reinforce_plus_plus_baseline", "gpg", "maxrl", "opo", "gdpo",
    "optimal_token_baseline",
]  # fmt: skip
ALONE = ["reinforce", "reinforce_plus_plus", "gae", "remax"]
SETTINGS = {"gdpo": {"gdpo_weights": {"reward": 1.0}}}


def batch_of(rewards, groups=None, counts=None, **further):
    """A batch that has whatever any estimator may need."""
    counts = counts or [1] * len(rewards)
    tokens, samples = sum(counts), len(rewards)
    needed = {
        "values": np.linspace(0, 1, tokens),
        "rollout_logprobs": np.full(tokens, -0.7),
        "sum_pi_squared": np.full(tokens, 0.5),
        "greedy_rewards": np.full(samples, 0.25),
    }
    return Batch.of(rewards, groups or ["g"] * samples, counts, **(needed | further))


def advantages(name, rewards, groups=None, counts=None, **config):
    """(samples,) the estimator's own result; of token estimators the first token of each sample."""
    batch = batch_of(rewards, groups, counts)
    result = ESTIMATORS.find(name)(batch, AlgorithmConfig(**(SETTINGS.get(name, {}) | config)))
    return result.advantages[batch.offsets[:-1]] if isinstance(result, Estimate) else result


def test_every_built_in_estimator_is_tested_here():
    assert sorted(GROUP + ALONE) == ESTIMATORS.names()
    assert [name for name in ESTIMATORS.names() if ESTIMATORS.find(name).group] == sorted(GROUP)


def test_grpo_divides_by_the_sample_deviation():
    assert advantages("grpo", [1, 0, 0, 0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_grpo_without_division_and_dr_grpo_only_centre():
    for values in (advantages("grpo", [1, 0, 0, 0], normalize_by_std="none"), advantages("dr_grpo", [1, 0, 0, 0])):
        assert values == pytest.approx([0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize(
    "scale, expected",
    [
        ("group", [0.70711, -0.70711, 0.70711, -0.70711]),
        (True, [0.70711, -0.70711, 0.70711, -0.70711]),
        ("batch", [0.5 / 4.856267, -0.5 / 4.856267, 5 / 4.856267, -5 / 4.856267]),
        ("none", [0.5, -0.5, 5, -5]),
        (False, [0.5, -0.5, 5, -5]),
    ],
)
def test_whose_deviation_grpo_divides_by(scale, expected):
    """A36."""
    values = advantages("grpo", [1, 0, 10, 0], ["a", "a", "b", "b"], normalize_by_std=scale)
    assert values == pytest.approx(expected, abs=1e-5)


def test_rloo_leaves_the_sample_out_of_its_own_baseline():
    """A05."""
    third = 2 / 3
    assert advantages("rloo", [1, 0, 0, 1]) == pytest.approx([third, -third, -third, third])


def test_passk_rewards_only_what_raises_the_maximum():
    assert advantages("grpo_passk", [0, 1, 0, 0]) == pytest.approx([0, 2, 0, 0], abs=1e-5)
    assert advantages("grpo_passk", [0, 1, 1, 0]).tolist() == [0, 0, 0, 0]
    assert advantages("grpo_passk", [3, 0.5, 2, 7, 1], ["a", "b", "a", "c", "b"], normalize_by_std="none") == (
        pytest.approx([1, 0, 0, 0, 0.5])
    )
    assert advantages("grpo_passk", [None, 2, 1], normalize_by_std="none") == pytest.approx([0, 1, 0])


def test_gpg_scales_by_the_share_of_groups_that_teach_something():
    assert advantages("gpg", [1, 0, 1, 1], ["a", "a", "b", "b"]) == pytest.approx([1, -1, 0, 0])
    assert advantages("gpg", [1, 0, None, 1], ["a", "a", "b", "b"])[:2] == pytest.approx([0.5, -0.5])
    assert advantages("gpg", [1, 1]).tolist() == [0, 0]


def test_maxrl_divides_by_the_rate_of_success():
    assert advantages("maxrl", [1, 0, 0, 0]) == pytest.approx([3, -1, -1, -1])
    assert advantages("maxrl", [0, 0]).tolist() == [0, 0]
    with pytest.raises(BadEstimate, match="needs rewards from 0 up, the lowest is -1"):
        advantages("maxrl", [1, -1])


def test_opo_weighs_the_baseline_by_length():
    assert advantages("opo", [1, 0], counts=[1, 3]) == pytest.approx([0.75, -0.25])
    assert advantages("opo", [1, 0, None], counts=[1, 3, 9])[:2] == pytest.approx([0.75, -0.25])


def test_reinforce_plus_plus_baseline_whitens_over_tokens():
    values = advantages("reinforce_plus_plus_baseline", [1, 0], counts=[1, 3])
    tokens = np.array([0.5, -0.5, -0.5, -0.5])
    expected = (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    assert values == pytest.approx([expected[0], expected[1]])


def test_gdpo_normalises_each_component_by_itself():
    """Two components of very different size count alike; a sum normalised as one would hear only the larger."""
    parts = {"right": np.array([1.0, 0, 1, 0]), "format": np.array([0.0, 0, 100, 100])}
    batch = Batch.of([1, 0, 101, 100], ["g"] * 4, components=parts)
    values = ESTIMATORS.find("gdpo")(batch, AlgorithmConfig(gdpo_weights={"right": 1, "format": 0.5}))
    raw = np.array([1, -1, 1, -1]) * 0.8660 + 0.5 * np.array([-1, -1, 1, 1]) * 0.8660
    assert values == pytest.approx(raw / raw.std(ddof=1), abs=1e-3)


def test_gdpo_with_a_component_that_some_samples_lack():
    batch = Batch.of([1, 0, 1, 0], ["g"] * 4, components={"acc": np.array([1.0, 0, np.nan, np.nan])})
    values = ESTIMATORS.find("gdpo")(batch, AlgorithmConfig(gdpo_weights={"acc": 1}))
    assert values[2:] == pytest.approx([0, 0]) and values[0] == pytest.approx(-values[1])
    with pytest.raises(BadEstimate, match="component 'accuracy' .* the rewards have: acc"):
        ESTIMATORS.find("gdpo")(batch, AlgorithmConfig(gdpo_weights={"accuracy": 1}))


def test_groups_do_not_mix_and_need_not_be_adjacent():
    values = advantages("grpo", [1, 10, 0, 0], ["a", "b", "a", "b"])
    half = np.sqrt(0.5)
    assert values == pytest.approx([half, half, -half, -half], abs=1e-5)


@pytest.mark.parametrize("name", GROUP)
def test_failed_scoring_is_not_a_zero(name):
    """F13: with the failure as 0, GRPO would give [1.1547, -.5773, -.5773]."""
    batch = batch_of([1, None, 0])
    found = ESTIMATORS.find(name)
    assert found.usable(batch).tolist() == [True, False, True]
    values = found.estimate(batch, AlgorithmConfig(**SETTINGS.get(name, {}))).advantages
    assert values[1] == 0
    if name == "grpo":
        assert values == pytest.approx([0.7071, 0, -0.7071], abs=1e-4)
    without = found.estimate(batch_of([1, 0]), AlgorithmConfig(**SETTINGS.get(name, {}))).advantages
    assert values[[0, 2]] == pytest.approx(without)


@pytest.mark.parametrize("name", GROUP)
@pytest.mark.parametrize("rewards", [[0.3], [0.3, None, None, None]])
def test_a_group_of_one_is_left_out_by_group_estimators_and_never_nan(name, rewards):
    batch = batch_of(rewards)
    found = ESTIMATORS.find(name)
    assert not found.usable(batch).any()
    assert not found.estimate(batch, AlgorithmConfig(**SETTINGS.get(name, {}))).advantages.any()


@pytest.mark.parametrize("name", ALONE)
def test_a_group_of_one_is_trained_on_by_the_others(name):
    batch = batch_of([0.3, None, 0.9], ["a", "b", "c"])
    assert ESTIMATORS.find(name).usable(batch).tolist() == [True, False, True]
    assert ESTIMATORS.find(name).estimate(batch, AlgorithmConfig()).advantages[[0, 2]].any()


@pytest.mark.parametrize("name", [name for name in GROUP + ALONE if name != "gdpo"])
def test_nothing_scored_and_nothing_at_all(name):
    for rewards in ([None, None], []):
        assert not ESTIMATORS.find(name).estimate(batch_of(rewards), AlgorithmConfig()).advantages.any()


@pytest.mark.parametrize("name", GROUP)
@pytest.mark.parametrize(
    "rewards", [[float(np.float32(0.1))] * 6 + [0.1], [0.7] * 5, [1 / 3] * 3, [0.1 + 0.2, 0.3], [1e9] * 2, [0.0] * 3]
)
def test_equal_rewards_are_no_signal(name, rewards):
    """A06."""
    assert Batch.of(rewards, ["g"] * len(rewards)).constant_groups().tolist() == [True]
    assert advantages(name, rewards) == pytest.approx(np.zeros(len(rewards)), abs=1e-9)


def test_small_but_real_differences_are_a_signal():
    assert not Batch.of([0.5, 0.501], ["g", "g"]).constant_groups().any()


def test_a_reward_at_tokens_counts_in_the_whole_reward():
    batch = batch_of([1, 1], counts=[2, 1], token_rewards=np.array([-0.5, -0.5, 0.0]))
    assert batch.rewards.tolist() == [0, 1]
    assert ESTIMATORS.find("dr_grpo")(batch, AlgorithmConfig()).tolist() == [-0.5, 0.5]


def test_unknown_estimator_suggests_the_nearest():
    with pytest.raises(UnknownFunction, match="did you mean 'grpo'"):
        find_estimator("grp0")


MINE = '''
from tasks.advantages import Estimate, estimator

@estimator("half_of_user", group=True, needs=("values",), source="made up")
def half(batch, config):
    """Half of what the sample is better than its group."""
    return batch.centred() / 2

def plain(batch, config):
    return batch.rewards

def by_token(batch, config):
    return Estimate(batch.spread(batch.rewards) * 2)

def wrong(batch, config):
    return batch.mask * 1.0

def broken(batch, config):
    return batch.rewards * float("nan")

def other(batch):
    return batch.rewards
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.setattr(ESTIMATORS, "_functions", dict(ESTIMATORS._functions))
    (tmp_path / "mine.py").write_text(MINE)
    return lambda name: find_estimator(f"{tmp_path}/mine.py:{name}")


def test_a_users_estimators(mine):
    batch = batch_of([1, 0], counts=[1, 2])
    half = mine("half")
    assert (half.name, half.group, half.needs, half.source) == ("half_of_user", True, ("values",), "made up")
    assert half.summary == "Half of what the sample is better than its group"
    assert find_estimator("half_of_user") is half
    assert half.estimate(batch, AlgorithmConfig()).advantages.tolist() == [0.25, -0.25, -0.25]
    alone = batch_of([1, 3], ["a", "b"], counts=[1, 2])
    assert mine("plain").usable(alone).all()
    assert mine("plain").estimate(alone, AlgorithmConfig()).advantages.tolist() == [1, 3, 3]
    assert mine("by_token").estimate(alone, AlgorithmConfig()).advantages.tolist() == [2, 6, 6]


def test_what_a_users_estimator_returns_is_checked(mine):
    batch = batch_of([1, 0], counts=[1, 2])
    with pytest.raises(BadEstimate, match=r"shape \(3,\) for 2 samples; for one number a token return Estimate"):
        mine("wrong").estimate(batch, AlgorithmConfig())
    with pytest.raises(BadEstimate, match="gave 3 of 3 tokens a number that is not finite"):
        mine("broken").estimate(batch, AlgorithmConfig())
    with pytest.raises(UnknownFunction, match=r"callable as \(batch, config\)"):
        mine("other")


def test_what_an_estimator_needs_must_be_there():
    with pytest.raises(BadEstimate, match="the batch has no values: it needs a critic"):
        ESTIMATORS.find("gae").estimate(Batch.of([1, 0], ["g", "g"]), AlgorithmConfig())
    with pytest.raises(ValueError, match="needs nonsense; there is only rollout_logprobs"):
        estimator("x", needs=("nonsense",))
