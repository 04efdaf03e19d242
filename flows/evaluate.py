"""Accuracy on held-out prompts, measured through the same stages as training."""

from __future__ import annotations

from flows.run import RunContext
from tasks.evaluate import evaluation_prompt, evaluation_reward, evaluation_rollout


def evaluate_when_due(run: RunContext, version: int) -> None:
    """Evaluate `version` every `evaluate_every` steps, before the first one and after the last."""
    if run.config.evaluation_due(version):
        accuracy = evaluate(run, version)
        run.progress.note(f"version {version}: held-out accuracy {accuracy:.3f}")


def evaluate(run: RunContext, version: int) -> float:
    """Share of held-out answers whose reward is at least `reward.success_threshold`.

    Answers that could not be scored are left out, as in training. The datasets are `evaluation-prompt`, `evaluation-rollout` and
    `evaluation-reward` of step `version`, and the pool must hold that version.
    """
    run.begin(min(version, run.config.total_steps - 1), "evaluation")
    prompts = evaluation_prompt(run, version)
    rollouts = evaluation_rollout(run, version, prompts)
    scored = evaluation_reward(run, version, prompts, rollouts)
    return scored.metrics.get("success", float("nan"))
