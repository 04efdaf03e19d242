"""Greedy answers to the step's prompts and their rewards: the baseline of estimators that need `greedy_rewards` (ReMax)."""

from __future__ import annotations

from dataclasses import replace

from storage.manifest import Manifest
from tasks.advantage import GREEDY
from tasks.context import Sampling, StageContext
from tasks.reward import reward_settings, score
from tasks.rollout import generate, generation_settings
from tasks.stage import StageOutput, Work, stage


def greedy(ctx: StageContext) -> Sampling:
    """One greedy answer a training prompt."""
    return replace(ctx.training, temperature=0.0, samples_per_prompt=1)


@stage("greedy-rollout", settings=lambda ctx, step: generation_settings(ctx, greedy(ctx), step))
def greedy_rollout(work: Work, prompts: Manifest) -> StageOutput:
    """Answer every training prompt once, greedily, with the weights of version `step`."""
    return generate(work, greedy(work.ctx), prompts)


@stage(GREEDY, settings=reward_settings)
def greedy_reward(work: Work, prompts: Manifest, rollouts: Manifest) -> StageOutput:
    """Score the greedy answers as the sampled ones are."""
    return score(work, prompts, rollouts, penalised=True)
