"""A whole worker on each rank, driven as the pool drives it, on a run folder on disk."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist

from engine.config import CriticConfig, GenerationConfig, OptimizerConfig, ParallelConfig
from engine.worker import Worker
from storage.datasets import ADVANTAGE, PROMPT, read, write_part
from storage.ledger import Ledger
from storage.manifest import FileEntry, Manifest, fingerprint, utc_now

PPO = dict(name="ppo", aggregation="token-mean", correction=dict(weights="token-truncate"))


def spec(folder: str, parallel: dict[str, Any] | None = None, generate: dict[str, Any] | None = None) -> dict[str, Any]:
    generation = GenerationConfig(
        max_response_tokens=12, max_model_len=128, kv_cache_gib=0.2, max_concurrent_samples=16, samples_per_prompt=4,
        **(generate or {}),
    )  # fmt: skip
    return {
        "model": {"path": folder, "precision": "auto"},
        "parallel": ParallelConfig(**(parallel or {})).model_dump(mode="json"),
        "optimizer": OptimizerConfig(lr=1e-3, weight_decay=0.1).model_dump(mode="json"),
        "generation": generation.model_dump(mode="json"),
        "seed": 3,
    }


class Driver:
    """Plays the flow: stages are published by rank 0, which tells the others the manifests."""

    def __init__(self, root: str, folder: str, *layouts: dict[str, Any]) -> None:
        self.root, self.ledger = root, Ledger(root, "run")
        self.worker = Worker(dist.get_rank(), dist.get_world_size(), "cpu")
        self.spec = spec(folder, *layouts)
        self.worker.execute("load", {"run": "r", "spec": self.spec})

    def publish(self, stage: str, step: int, files: list[dict[str, Any]], version: int) -> dict[str, Any]:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, files)
        box: list[Any] = [None]
        if dist.get_rank() == 0:
            entries = [FileEntry(**entry) for part in everyone for entry in part]
            manifest = Manifest(
                run="run", step=step, stage=stage, fingerprint=fingerprint(stage, step), files=entries,
                rows=sum(e.rows for e in entries), weight_version=version, started_at=utc_now(), finished_at=utc_now(),
            )  # fmt: skip
            box[0] = self.ledger.publish(manifest).model_dump(mode="json")
        dist.broadcast_object_list(box)
        return box[0]

    def prompts(self, step: int) -> dict[str, Any]:
        files = []
        if dist.get_rank() == 0:
            rows = [
                {
                    "prompt_id": f"p{i}", "group_id": f"{step:06d}-{i:05d}", "source": "test", "prompt_text": "",
                    "prompt_tokens": [40 + i, 41, 42 + step], "answer": "", "extra": "{}",
                }
                for i in range(5)
            ]  # fmt: skip
            table = pa.Table.from_pylist(rows, schema=PROMPT)
            path = self.ledger.stage_path("prompt", step)
            files = [write_part(self.ledger.store, path, 0, table, PROMPT).model_dump()]
        return self.publish("prompt", step, files, step)

    def rollout(self, step: int) -> dict[str, Any]:
        out = self.ledger.stage_path("rollout", step)
        sampling = {"temperature": 1.0, "top_p": 1.0, "max_response_tokens": 12, "samples_per_prompt": 4}
        result = self.worker.execute(
            "generate",
            dict(
                store=self.root,
                prompts=self.prompts(step),
                out=out,
                sampling=sampling,
                seed=3,
                step=step,
                weight_version=step,
            ),
        )
        return self.publish("rollout", step, result.get("files", []), step)

    def values(self, step: int, rollout: dict[str, Any]) -> dict[str, Any]:
        out = self.ledger.stage_path("values", step)
        args = dict(
            role="critic", store=self.root, rollout=rollout, out=out, temperature=1.0, max_tokens_per_micro_batch=64
        )
        return self.publish("values", step, self.worker.execute("annotate", args).get("files", []), step)

    def advantage(self, step: int, rollout: dict[str, Any]) -> dict[str, Any]:
        files = []
        if dist.get_rank() == 0:
            table = read(self.ledger.store, Manifest(**rollout)).to_pylist()
            rows = [
                {
                    "sample_id": row["sample_id"], "group_id": row["group_id"], "reward": 0.0,
                    "advantages": [1.0 if row["response_tokens"][0] % 2 else -1.0] * len(row["response_tokens"]),
                    "returns": [0.5] * len(row["response_tokens"]),
                    "length": len(row["prompt_tokens"]) + len(row["response_tokens"]),
                }
                for row in table
            ]  # fmt: skip
            path = self.ledger.stage_path("advantage", step)
            part = write_part(self.ledger.store, path, 0, pa.Table.from_pylist(rows, schema=ADVANTAGE), ADVANTAGE)
            files = [part.model_dump()]
        return self.publish("advantage", step, files, step)

    def update(self, step: int, rollout: dict[str, Any], advantage: dict[str, Any], **changes: Any) -> dict[str, float]:
        args: dict[str, Any] = dict(
            store=self.root, datasets={"rollout": rollout, "advantage": advantage}, loss=PPO, optimizer=self.spec["optimizer"],
            mini_batch_size=None, epochs=1, max_tokens_per_micro_batch=64, horizon=12, temperature=1.0, seed=3, version=step,
        )  # fmt: skip
        return self.worker.execute("update", args | changes)["metrics"]

    def begin_save(self, version: int) -> None:
        self.worker.execute("save", {"store": self.root, "out": self.ledger.stage_path("checkpoint", version)})

    def saved(self, version: int) -> dict[str, Any]:
        """The manifest, once all ranks have written their part."""
        found = self.worker.execute("saved", {"out": self.ledger.stage_path("checkpoint", version), "wait": True})
        return self.publish("checkpoint", version, found["files"], version)

    def state(self) -> list[float]:
        """Numbers that change with any weight, in the training layout."""
        self.worker.model.engine.sleep()
        with torch.no_grad():
            actor = self.worker.model.actor
            return [p.double().abs().sum().item() for p in actor.parameters.values()]


def life(root: str, folder: str, parallel: dict[str, Any], generate: dict[str, Any]) -> dict[str, Any]:
    """Rollout, update, checkpoint, another update while it is written; then back to the checkpoint and the same update again."""
    run = Driver(root, folder, parallel, generate)
    first = run.rollout(0)
    metrics = run.update(0, first, run.advantage(0, first))
    several = run.rollout(1)
    batch = several, run.advantage(1, several)
    at_checkpoint = run.state()
    run.begin_save(1)
    later = run.update(1, *batch, mini_batch_size=8, epochs=2)
    after, saved = run.state(), run.saved(1)
    run.worker.execute("restore", {"run": "r", "spec": run.spec, "store": root, "manifest": saved})
    restored, described = run.state(), run.worker.execute("describe", {})
    again = run.update(1, *batch, mini_batch_size=8, epochs=2)
    return {
        "metrics": metrics, "later": later, "again": again, "checkpoint": at_checkpoint, "restored": restored,
        "described": described, "after": after, "after_again": run.state(), "rows": first["rows"],
    }  # fmt: skip


def critic_life(root: str, folder: str, parallel: dict[str, Any]) -> dict[str, Any]:
    """Values, an update of actor and critic, checkpoint, another; then back to the checkpoint and the same again."""
    run = Driver(root, folder, parallel)
    critic = CriticConfig(optimizer=OptimizerConfig(lr=1e-3)).model_dump(mode="json")
    run.spec["critic"] = {**critic, "model": run.spec["model"]}
    run.worker.execute("load", {"run": "r", "spec": run.spec})

    def step(number: int) -> dict[str, float]:
        rollout = run.rollout(number)
        datasets = {
            "rollout": rollout,
            "advantage": run.advantage(number, rollout),
            "values": run.values(number, rollout),
        }
        return run.update(number, rollout, datasets["advantage"], datasets=datasets, critic=critic, mini_batch_size=8)

    def predictions() -> list[float]:
        table = read(run.ledger.store, Manifest(**run.values(next(unused), first))).to_pylist()
        return [round(x, 6) for row in sorted(table, key=lambda row: row["sample_id"]) for x in row["values"]]

    first, unused = run.rollout(0), itertools.count(100)
    untrained = predictions()
    metrics = [step(0)]
    at_checkpoint = predictions()
    run.begin_save(1)
    metrics.append(step(1))
    after, state, saved = predictions(), run.state(), run.saved(1)
    run.worker.execute("restore", {"run": "r", "spec": run.spec, "store": root, "manifest": saved})
    restored = predictions()
    metrics.append(step(1))
    return {
        "untrained": untrained, "checkpoint": at_checkpoint, "after": after, "restored": restored, "again": predictions(),
        "metrics": metrics, "same_actor": run.state() == state, "files": [file["path"] for file in saved["files"]],
    }  # fmt: skip


def fail_in_update(root: str, folder: str) -> dict[str, Any]:
    """A batch whose gradient is not finite: the update fails and the rank refuses everything but a restore."""
    run = Driver(root, folder)
    before = run.state()
    rollout = run.rollout(0)
    advantage = run.advantage(0, rollout)
    messages = []
    for attempt in (
        lambda: run.update(0, rollout, advantage, loss={**PPO, "entropy_coef": float("inf")}),
        lambda: run.update(0, rollout, advantage),
        lambda: run.worker.execute("save", {"store": root, "out": "run/checkpoint/step=000000"}),
    ):
        try:
            attempt()
            messages.append("no error")
        except (FloatingPointError, RuntimeError) as error:
            messages.append(str(error))
    unchanged = run.state() == before
    run.worker.execute("load", {"run": "r", "spec": run.spec})
    return {"messages": messages, "unchanged": unchanged, "metrics": run.update(0, rollout, advantage)}


def greedy_with_plain_vllm(folder: str, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens of vLLM alone, loading the folder with its own loader."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_OMP_THREADS_BIND="nobind"
    )
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder, dtype="float32", skip_tokenizer_init=True, max_model_len=128, enforce_eager=True, max_num_seqs=8,
        kv_cache_memory_bytes=1 << 27,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def greedy_with_the_worker(folder: str, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens of the pool's own engine for the same folder."""
    from engine.generation.engine import Sampling

    worker = Worker(0, 1, "cpu")
    worker.execute("load", {"run": "r", "spec": spec(folder)})
    return [c.tokens for c in worker.model.engine.generate(prompts, Sampling(0.0, 1.0, count, (), 0))]
