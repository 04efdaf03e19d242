"""Reward functions. Register your own with `@reward("name")`, or name it `module:function` or `file.py:function`."""

from tasks.rewards import reasoning_gym, text
from tasks.rewards.config import OnError, RewardConfig
from tasks.rewards.registry import REWARDS, Sample, Score, as_score, bind, reward
from tasks.rewards.scoring import Scored, ScoringFailed, score_samples

__all__ = [
    "REWARDS",
    "OnError",
    "RewardConfig",
    "Sample",
    "Score",
    "Scored",
    "ScoringFailed",
    "as_score",
    "bind",
    "reasoning_gym",
    "reward",
    "score_samples",
    "text",
]
