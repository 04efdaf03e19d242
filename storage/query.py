"""Reading runs afterwards: what there is, how it went, and what the model wrote. Needs no Prefect, pool or GPU."""

from typing import Any

import pyarrow as pa

from storage.checkpoints import STAGE as CHECKPOINT
from storage.datasets import join, read
from storage.ledger import Ledger, LedgerError, list_runs

_FINAL_STAGE = "update"


def runs_table(root_uri: str) -> list[dict[str, Any]]:
    """One row a run: name, flow, created_at, seed, updates done, metrics of the last update ({} before the first).

    Raises LedgerError naming the file if a run's record is broken.
    """
    rows = []
    for record in list_runs(root_uri):
        ledger = Ledger(root_uri, record.name)
        done = ledger.next_step(_FINAL_STAGE)
        last = ledger.get(_FINAL_STAGE, done - 1) if done else None
        rows.append(
            {
                "name": record.name,
                "flow": record.flow,
                "created_at": record.created_at,
                "seed": record.seed,
                "updates": done,
                "metrics": last.metrics if last else {},
            }
        )
    return rows


def run_summary(ledger: Ledger) -> dict[str, Any]:
    """A run in one dict: `record`, `updates` done, `checkpoints` (steps), and `steps`, one row a step and stage.

    A row of `steps` has step, stage, rows, weight_version, seconds and metrics. Raises LedgerError for no such run.
    """
    record = ledger.record()
    if record is None:
        known = ", ".join(run.name for run in list_runs(ledger.root_uri)) or "none"
        raise LedgerError(f"there is no run {ledger.run!r} below {ledger.root_uri}; runs there: {known}")
    steps = []
    for stage in (name for name in ledger.store.list(ledger.run) if ledger.store.list(f"{ledger.run}/{name}")):
        for step in ledger.committed(stage):
            manifest = ledger.get(stage, step)
            if manifest is not None:
                kept = ("step", "stage", "rows", "weight_version", "seconds", "metrics", "started_at")
                steps.append({name: getattr(manifest, name) for name in kept})
    steps.sort(key=lambda row: (row["step"], row.pop("started_at")))
    return {
        "record": record.model_dump(),
        "updates": ledger.next_step(_FINAL_STAGE),
        "checkpoints": ledger.committed(CHECKPOINT),
        "steps": steps,
    }


def samples(ledger: Ledger, step: int, best: int, worst: int) -> list[dict[str, Any]]:
    """The `best` highest-rewarded samples of a step, then the `worst` lowest (the lowest last), none twice.

    Samples whose scorer failed have no reward and count as lower than all. Each is a dict: sample_id, group_id, prompt,
    response, reward, error, finish_reason, length (response tokens), and logprob_min, logprob_mean, logprob_sum in nats
    over the tokens the model generated itself (None if there are none). Raises LedgerError if the step has no rewards.
    """
    scored = join(_stage(ledger, "rollout", step), _stage(ledger, "reward", step))
    prompts = _stage(ledger, "prompt", step)
    texts = dict(zip(prompts["group_id"].to_pylist(), prompts["prompt_text"].to_pylist(), strict=True))
    rewards = zip(scored["reward"].to_pylist(), scored["sample_id"].to_pylist(), range(scored.num_rows), strict=True)
    ranked = [index for _, _, index in sorted(rewards, key=_by_reward)]
    first = ranked[:best]
    last = ranked[max(len(ranked) - worst, len(first)) :]
    return [_describe(scored.slice(index, 1), texts) for index in first + last]


def _stage(ledger: Ledger, stage: str, step: int) -> pa.Table:
    manifest = ledger.get(stage, step)
    if manifest is None:
        raise LedgerError(f"stage {stage!r} of step {step} is not finished in {ledger.uri}; finished: {_span(ledger)}")
    return read(ledger.store, manifest)


def _span(ledger: Ledger) -> str:
    steps = ledger.committed("reward")
    return f"steps {steps[0]} to {steps[-1]}" if steps else "none"


def _by_reward(item: tuple[float | None, str, int]) -> tuple[bool, float, str]:
    reward, sample_id, _ = item
    return (reward is None, -(reward or 0.0), sample_id)


def _describe(row: pa.Table, texts: dict[str, str]) -> dict[str, Any]:
    values = row.to_pylist()[0]
    pairs = zip(values["rollout_logprobs"], values["response_mask"], strict=True)
    logprobs = [logprob for logprob, generated in pairs if generated]
    return {
        "sample_id": values["sample_id"],
        "group_id": values["group_id"],
        "prompt": texts[values["group_id"]],
        "response": values["text"],
        "reward": values["reward"],
        "error": values["error"],
        "finish_reason": values["finish_reason"],
        "length": len(values["response_tokens"]),
        "logprob_min": min(logprobs) if logprobs else None,
        "logprob_mean": sum(logprobs) / len(logprobs) if logprobs else None,
        "logprob_sum": sum(logprobs) if logprobs else None,
    }
