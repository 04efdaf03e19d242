"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups that teach nothing are replaced by further prompts.

Every rollout batch has stages of its own, `candidate-prompt-0`, `candidate-rollout-0`, `candidate-reward-0`, then -1 and so on,
each done once. What is trained on is then copied from them into the step's `prompt`, `rollout` and `reward`, so that everything
after this, and everybody who reads the run, finds a step as it always is; what was not used stays readable in the candidates.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.datasets import PROMPT, REWARD, ROLLOUT, join, read, write_part
from storage.filesystem import Store
from storage.manifest import Manifest
from tasks.advantage import number
from tasks.advantages import BadEstimate, Batch
from tasks.context import StageContext
from tasks.prompt import draw_prompts, sampling_settings
from tasks.reward import response_metrics, reward_metrics, reward_settings, score
from tasks.rewards import Scored
from tasks.rewards.shaping import unshaped
from tasks.rollout import generate, generation_settings
from tasks.stage import StageOutput, StageTask, Work, stage

BATCHES, NEXT_BATCH = "rollout_batches", "next_batch"
"""Metrics of a step's prompts: its rollout batches, and the batch of the source at which the next step goes on."""


class TooFewGroups(RuntimeError):
    """The rollouts that a step may have did not give as many groups with different rewards as it needs."""


@dataclass(frozen=True)
class Candidates:
    """The stages of one rollout batch."""

    prompt: StageTask
    rollout: StageTask
    reward: StageTask


@lru_cache(maxsize=1024)
def candidates(index: int) -> Candidates:
    """The stages of a step's rollout batch `index`, from 0."""

    def prompt_settings(ctx: StageContext, step: int) -> dict[str, Any]:
        return {**sampling_settings(ctx, ctx.training), "batch": first_batch(ctx, step) + index}

    @stage(f"candidate-prompt-{index}", settings=prompt_settings)
    def prompt(work: Work) -> StageOutput:
        """Draw and tokenize further prompts."""
        sampling = work.ctx.training
        return draw_prompts(work, sampling, first_batch(work.ctx, work.step) + index, index * sampling.prompts)

    @stage(f"candidate-rollout-{index}", settings=lambda ctx, step: generation_settings(ctx, ctx.training, step))
    def rollout(work: Work, prompts: Manifest) -> StageOutput:
        """Answer them."""
        return generate(work, work.ctx.training, prompts)

    @stage(f"candidate-reward-{index}", settings=reward_settings)
    def reward(work: Work, prompts: Manifest, rollouts: Manifest) -> StageOutput:
        """Score the answers."""
        return score(work, prompts, rollouts, penalised=True)

    return Candidates(prompt, rollout, reward)


def first_batch(ctx: StageContext, step: int) -> int:
    """Where in the source a step begins: after everything that earlier steps drew, so that no prompt is passed over or repeated.

    Raises:
        LookupError: the step before has no prompts.
    """
    if step == 0:
        return 0
    before = ctx.ledger.get("prompt", step - 1)
    if before is None:
        raise LookupError(f"step {step} cannot begin: step {step - 1} has no committed prompts")
    return int(before.metrics[NEXT_BATCH])


def informative_groups(rewards: pa.Table, filter_on: str) -> list[str]:
    """Ids of the groups whose scored samples are not all worth the same, in the order in which they were drawn.

    Args:
        rewards: rows of the REWARD schema.
        filter_on: "reward", as the reward function gave it, or a component. A penalty for length would make a group of
            nothing but wrong answers look as if there were something to learn.

    Raises:
        BadEstimate: no sample has that component.
    """
    parts = [json.loads(text) for text in rewards["components"].to_pylist()]
    given = rewards["reward"].to_pylist()
    if filter_on == "reward":
        worth = [unshaped(reward, part) for reward, part in zip(given, parts, strict=True)]
    else:
        worth = [number(part.get(filter_on)) for part in parts]
        if all(value is None for value in worth):
            has = ", ".join(sorted({name for part in parts for name in part})) or "none"
            raise BadEstimate(
                f"no sample has the component {filter_on!r} of algorithm.filter_on; the rewards have: {has}"
            )
    ids = rewards["group_id"].to_pylist()
    batch = Batch.of(worth, ids)
    useful = (batch.group_sizes() > 1) & ~batch.constant_groups()
    return [name for name, use in zip(np.unique(ids).tolist(), useful, strict=True) if use]


def rewards_of(store: Store, manifests: Sequence[Manifest]) -> pa.Table:
    """All rows of several batches' rewards."""
    return pa.concat_tables([read(store, manifest) for manifest in manifests])


@stage(
    "prompt",
    settings=lambda ctx, step: {**sampling_settings(ctx, ctx.training), "filter_on": ctx.algorithm.filter_on},
)
def chosen_prompts(work: Work, *batches: Manifest) -> StageOutput:
    """Keep the prompts of the first informative groups, as many as a step has.

    Args:
        batches: the candidates' prompts and rewards.
    """
    prompts = [manifest for manifest in batches if manifest.stage.startswith("candidate-prompt-")]
    rewards = [manifest for manifest in batches if manifest.stage.startswith("candidate-reward-")]
    wanted = work.ctx.training.prompts
    useful = informative_groups(rewards_of(work.store, rewards), work.ctx.algorithm.filter_on)
    table = _of_groups(work, prompts, pa.array(useful[:wanted], pa.string()))
    entry = write_part(work.store, work.path, 0, table, PROMPT)
    metrics = {
        "prompts": table.num_rows,
        "dropped": sum(manifest.metrics["dropped"] for manifest in prompts),
        BATCHES: len(prompts),
        NEXT_BATCH: first_batch(work.ctx, work.step) + len(prompts),
        "groups": sum(manifest.rows for manifest in prompts),
        "informative_groups": len(useful),
        "surplus_groups": max(len(useful) - wanted, 0),
    }
    return StageOutput(weight_version=work.step, files=[entry], metrics=metrics)


@stage("rollout", settings=lambda ctx, step: {})
def chosen_rollouts(work: Work, prompts: Manifest, *rollouts: Manifest) -> StageOutput:
    """Copy the answers to the chosen prompts. The figures are those of all the candidates, which had to be generated."""
    entry = write_part(work.store, work.path, 0, _of_groups(work, rollouts, _ids(work, prompts)), ROLLOUT)
    names = {name for manifest in rollouts for name in manifest.metrics}
    metrics = {name: max(manifest.metrics.get(name, 0.0) for manifest in rollouts) for name in names}
    tokens, seconds = (sum(manifest.metrics[name] for manifest in rollouts) for name in ("tokens", "seconds"))
    metrics |= {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds if seconds else 0.0}
    return StageOutput(weight_version=work.step, files=[entry], metrics=metrics)


@stage("reward", settings=reward_settings)
def chosen_rewards(work: Work, prompts: Manifest, rollouts: Manifest, *rewards: Manifest) -> StageOutput:
    """Copy the rewards of the chosen samples. `candidate_reward` is the mean of all that were drawn."""
    table = _of_groups(work, rewards, _ids(work, prompts))
    entry = write_part(work.store, work.path, 0, table, REWARD)
    lengths = read(work.store, rollouts, columns=["sample_id", "response_tokens", "finish_reason"])
    lengths = join(table.select(["sample_id"]), lengths)
    everything = reward_metrics(_scored(rewards_of(work.store, rewards)), work.ctx.reward)
    metrics = {
        **reward_metrics(_scored(table), work.ctx.reward),
        **response_metrics(
            pc.list_value_length(lengths["response_tokens"]).to_pylist(),
            [reason == "length" for reason in lengths["finish_reason"].to_pylist()],
        ),
        **{f"candidate_{name}": everything[name] for name in ("reward", "success") if name in everything},
    }
    return StageOutput(weight_version=rollouts.weight_version, files=[entry], metrics=metrics)


def _of_groups(work: Work, manifests: Sequence[Manifest], group_ids: pa.Array) -> pa.Table:
    tables = []
    for manifest in manifests:  # filtered one by one: all candidates at once may be many times a step
        table = read(work.store, manifest)
        tables.append(table.filter(pc.is_in(table["group_id"], value_set=group_ids)))
    return pa.concat_tables(tables)


def _ids(work: Work, prompts: Manifest) -> pa.Array:
    return read(work.store, prompts, columns=["group_id"])["group_id"].combine_chunks()


def _scored(table: pa.Table) -> list[Scored]:
    columns = ["sample_id", "reward", "components", "error"]
    return [Scored(**row) for row in table.select(columns).to_pylist()]
