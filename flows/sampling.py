"""Rollouts of a step beyond the plain one: more batches until there is enough to learn from, and greedy baselines."""

from __future__ import annotations

from flows.run import RunContext
from storage.manifest import Manifest
from tasks.advantages import find_estimator
from tasks.dynamic_sampling import (
    BATCHES,
    TooFewGroups,
    candidates,
    chosen_prompts,
    chosen_rewards,
    chosen_rollouts,
    informative_groups,
    rewards_of,
)
from tasks.greedy import greedy_reward, greedy_rollout


def sample_until_informative(run: RunContext, step: int) -> tuple[Manifest, Manifest, Manifest]:
    """Prompts, rollouts and rewards of exactly `prompts_per_step` groups whose samples are not all worth the same.

    Raises:
        TooFewGroups: `max_rollout_batches` did not give as many, and `when_too_few` is "fail" or there is none at all. What was
            generated is committed: with a higher bound the same command goes on from there.
    """
    prompts: list[Manifest] = []
    rollouts: list[Manifest] = []
    rewards: list[Manifest] = []
    settled = run.ledger.get("prompt", step)  # an earlier attempt chose: from these batches, whatever the bound is now
    bound = int(settled.metrics[BATCHES]) if settled else run.algorithm.max_rollout_batches
    for index in range(bound):
        stages = candidates(index)
        run.begin(step, "rollout")
        prompts.append(stages.prompt(run, step))
        rollouts.append(stages.rollout(run, step, prompts[-1]))
        run.begin(step, "reward")
        rewards.append(stages.reward(run, step, prompts[-1], rollouts[-1]))
        if settled is None and _found(run, rewards) >= run.training.prompts:
            break
    if settled is None:
        _check(run, step, prompts, rewards)
    chosen = chosen_prompts(run, step, *prompts, *rewards)
    answers = chosen_rollouts(run, step, chosen, *rollouts)
    return chosen, answers, chosen_rewards(run, step, chosen, answers, *rewards)


def greedy_baseline(run: RunContext, step: int, prompts: Manifest) -> list[Manifest]:
    """The greedy answers' rewards, if the estimator needs them: what `advantage` takes beside rollouts and rewards."""
    if "greedy_rewards" not in find_estimator(run.algorithm.estimator).needs:
        return []
    return [greedy_reward(run, step, prompts, greedy_rollout(run, step, prompts))]


def _found(run: RunContext, rewards: list[Manifest]) -> int:
    return len(informative_groups(rewards_of(run.ledger.store, rewards), run.algorithm.filter_on))


def _check(run: RunContext, step: int, prompts: list[Manifest], rewards: list[Manifest]) -> None:
    found, wanted, algorithm = _found(run, rewards), run.training.prompts, run.algorithm
    if found >= wanted or (found and algorithm.when_too_few == "continue"):
        return
    groups = sum(manifest.rows for manifest in prompts)
    means = [manifest.metrics["reward"] for manifest in rewards if "reward" in manifest.metrics]
    mean = f"mean reward {sum(means) / len(means):.3g}" if means else "no rewards"
    raise TooFewGroups(
        f"step {step}: after {len(prompts)} rollout batches (algorithm.max_rollout_batches) {found} of {groups} groups have"
        f" samples of different {algorithm.filter_on}, {wanted} are needed ({mean}); the prompts may be too easy or too hard for"
        " the model. Raise max_rollout_batches or samples_per_prompt, set algorithm.when_too_few: continue, or change the data"
    )
