"""Reinforcement learning: rollout, reward, advantage, update, on one screen.

Every line of the loop is a stage that is done once: after a crash, a cancellation or Retry, what is committed is found in the
run's folder, and the loop goes on at the first stage that is not.
"""

from __future__ import annotations

from prefect import flow

from flows.config import PostTrainConfig
from flows.evaluate import evaluate_when_due
from flows.run import RunSummary, open_run
from flows.sampling import greedy_baseline, sample_until_informative
from flows.weights import checkpoint_when_due, restore
from tasks.advantage import advantage
from tasks.annotate import reference, values
from tasks.prompt import prompt
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.update import update


@flow(name="post-train")
def post_train(config: PostTrainConfig) -> RunSummary:
    """Post-train a model with rewards.

    Args:
        config: what to train, on what, and how. The same `experiment` goes on where it stopped.
    """
    with open_run(config, flow="post-train") as run:
        restore(run)
        for step in run.remaining_steps():
            checkpoint_when_due(run, step)
            evaluate_when_due(run, step)

            if run.algorithm.dynamic_sampling:
                prompts, rollouts, rewards = sample_until_informative(run, step)
            else:
                run.begin(step, "rollout")
                prompts = prompt(run, step)
                rollouts = rollout(run, step, prompts)  # vLLM, on the workers
                run.begin(step, "reward")
                rewards = reward(run, step, prompts, rollouts)  # here, on the CPU
            references = [reference(run, step, rollouts)] if config.needs_reference else []
            predicted = [values(run, step, rollouts)] if config.needs_critic else []
            baselines = greedy_baseline(run, step, prompts)
            advantages = advantage(run, step, rollouts, rewards, *references, *predicted, *baselines)
            run.begin(step, "update")
            learned_from = [*(references if config.loss.needs_reference else []), *predicted]
            updated = update(run, step, rollouts, advantages, *learned_from)  # Megatron, on the workers
            run.progress.finished(step, [rollouts, rewards, updated])

        checkpoint_when_due(run, run.next_step())
        evaluate_when_due(run, run.next_step())
        return run.summary()
