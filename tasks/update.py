"""The optimizer steps made from one step's data, on the pool. Raises the weight version by one, exactly once."""

from __future__ import annotations

from typing import Any

from engine.losses.config import LossConfig
from storage.manifest import Manifest
from tasks.context import StageContext
from tasks.figures import largest_of_ranks
from tasks.stage import StageOutput, Work, flat, stage


def update_settings(ctx: StageContext, step: int) -> dict[str, Any]:
    """What decides the next weights. The micro-batch size changes memory and speed only, and is left out."""
    return {
        "weights": ctx.weights(step),
        **flat(
            loss=ctx.fit.loss,
            optimizer=ctx.optimizer,
            mini_batch_size=ctx.fit.mini_batch_size,
            epochs=ctx.fit.epochs,
            horizon=ctx.generation.max_response_tokens,
            temperature=ctx.training.temperature,
            seed=ctx.seed,
        ),
        **({} if ctx.critic is None else flat(critic=ctx.critic)),
    }


@stage("update", settings=update_settings)
def update(work: Work, *datasets: Manifest) -> StageOutput:
    """Train on the step's datasets: rollout and advantage (and reference, values), or demonstration.

    Raises:
        RuntimeError: the pool holds another version afterwards than the next one.
    """
    arguments = update_arguments(work.ctx, work.step, datasets)
    result = work.ctx.call_trained("update", work.op_id, arguments, expect_version=work.step)
    metrics: dict[str, float] = {}
    for rank in reversed(result["ranks"]):  # the ranks of a group say the same; of the groups the actor's comes first
        metrics |= rank["metrics"]
    version = checked_version(result, work.step + 1)
    return StageOutput(weight_version=version, metrics=metrics | largest_of_ranks(result))


def update_arguments(ctx: StageContext, step: int, datasets: tuple[Manifest, ...]) -> dict[str, Any]:
    """Arguments of the pool's `update`; the same for the first time and for a replay."""
    return {
        "store": ctx.store_uri,
        "datasets": {manifest.stage: manifest.model_dump(mode="json") for manifest in datasets},
        "loss": loss_of_step(ctx, step).model_dump(mode="json"),
        "optimizer": ctx.optimizer.model_dump(mode="json"),
        "mini_batch_size": ctx.fit.mini_batch_size,
        "epochs": ctx.fit.epochs,
        "max_tokens_per_micro_batch": ctx.fit.max_tokens_per_micro_batch,
        "horizon": ctx.generation.max_response_tokens,
        "temperature": ctx.training.temperature,
        "seed": ctx.seed,
        "version": step,
        "critic": None if ctx.critic is None else ctx.critic.model_dump(mode="json"),
    }


def loss_of_step(ctx: StageContext, step: int) -> LossConfig:
    """The loss with the coefficient that an adaptive KL term has come to; the committed update before decides."""
    loss = ctx.fit.loss
    before = ctx.ledger.get("update", step - 1) if loss.kl.target is not None and step > 0 else None
    if before is None or "reference_kl" not in before.metrics:
        return loss
    samples = ctx.training.prompts * ctx.training.samples_per_prompt
    coef = loss.kl.next_coef(before.metrics["kl_coef"], before.metrics["reference_kl"], samples)
    return loss.model_copy(update={"kl": loss.kl.model_copy(update={"coef": coef})})


def checked_version(result: dict[str, Any], wanted: int) -> int:
    """The weight version that the pool reports; an update or restore that ended elsewhere must not be committed."""
    if result["weight_version"] != wanted:
        raise RuntimeError(f"the pool reports weight version {result['weight_version']}, {wanted} was expected")
    return wanted
