"""The learning rate of each optimizer step, by a hand table."""

import pytest

from engine.config import OptimizerConfig
from engine.megatron.optimizer import learning_rate
from engine.megatron.update import mini_batches


def rates(steps, **settings):
    return [learning_rate(OptimizerConfig(lr=1.0, **settings), step) for step in range(1, steps + 1)]


def test_without_warm_up_the_first_step_has_the_full_rate():
    assert rates(3) == [1.0, 1.0, 1.0]


def test_warm_up_reaches_the_full_rate_at_its_last_step():
    assert rates(4, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]


def test_linear_decay_after_warm_up():
    assert rates(6, warmup_steps=2, schedule="linear", decay_steps=5) == pytest.approx([0.5, 1, 1, 2 / 3, 1 / 3, 0])


def test_cosine_decay():
    assert rates(5, schedule="cosine", decay_steps=4) == pytest.approx([1, 0.8535534, 0.5, 0.1464466, 0])


def test_mini_batches_use_every_sample_once_and_shuffle_by_seed():
    first = mini_batches(10, 4, seed=1)
    assert [len(batch) for batch in first] == [4, 4, 2]
    assert sorted(i for batch in first for i in batch) == list(range(10))
    assert first == mini_batches(10, 4, seed=1) != mini_batches(10, 4, seed=2)
    assert mini_batches(10, None, seed=1) == [list(range(10))]
