"""Held-out prompts through the same code as the training ones, into datasets of their own."""

from __future__ import annotations

from storage.manifest import Manifest
from tasks.context import Sampling, StageContext
from tasks.prompt import draw_prompts, sampling_settings
from tasks.reward import reward_settings, score
from tasks.rollout import generate, generation_settings
from tasks.stage import StageOutput, Work, stage


def held_out(ctx: StageContext) -> Sampling:
    """The evaluation's prompts. Raises LookupError if the run has none."""
    if ctx.held_out is None:
        raise LookupError("the run has no held-out prompts; configure `validation`")
    return ctx.held_out


@stage("evaluation-prompt", settings=lambda ctx, step: sampling_settings(ctx, held_out(ctx)))
def evaluation_prompt(work: Work) -> StageOutput:
    """Draw and tokenize the held-out prompts, the same at every version."""
    return draw_prompts(work, held_out(work.ctx))


@stage("evaluation-rollout", settings=lambda ctx, step: generation_settings(ctx, held_out(ctx), step))
def evaluation_rollout(work: Work, prompts: Manifest) -> StageOutput:
    """Answer the held-out prompts with weight version `step`."""
    return generate(work, held_out(work.ctx), prompts)


@stage("evaluation-reward", settings=reward_settings)
def evaluation_reward(work: Work, prompts: Manifest, rollouts: Manifest) -> StageOutput:
    """Score the held-out answers; the metric `success` is the accuracy."""
    return score(work, prompts, rollouts)
