"""What one rank holds of a run: the actor with its generation engine, or either or none of them, and the models beside it."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pyarrow as pa
import torch

from engine.checkpointing import Checkpointing, TrainedModel
from engine.companions import Companions
from engine.config import CriticConfig, GenerationConfig, ModelConfig, OptimizerConfig, ParallelConfig
from engine.flops import forward_flops, peak_flops
from engine.generation.engine import Completion, GenerationEngine, Sampling
from engine.layout import contiguous_ranges
from engine.losses.config import LossConfig
from engine.megatron.update import Update, UpdateSettings
from engine.megatron.value_update import ValueSettings
from engine.megatron.working_memory import WorkingMemory
from engine.reshard.account import Transition
from engine.reshard.hybrid import HybridWeights
from engine.reshard.plan import plan_generation
from engine.roles.actor import Actor
from engine.samples import Samples
from engine.tokenizer import Tokenizer
from engine.weights.architecture import read_architecture
from storage.datasets import ROLLOUT, join, read, write_part
from storage.filesystem import Store
from storage.manifest import Manifest

ENGINE_FIELDS = (
    "max_model_len",
    "max_concurrent_samples",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "expert_parallel",
    "memory_fraction",
    "kv_cache_gib",
    "cuda_graphs",
)
"""Generation settings that are built into a running engine; the others come with each request."""


class EnginesDoNotFit(RuntimeError):
    """The running engines were built for another architecture, layout or memory: the pool must be started anew."""


class ModelSession:
    """Built once a pool, by its first `load`; later loads reuse the engines.

    Args:
        spec: {"model", "reference", "critic", "parallel", "optimizer", "generation", "seed"} as the configuration models dump
            them. Without a model there is no actor here: the group holds models that are placed apart from it. Without
            generation there is no vLLM.

    Attributes:
        weight_version: updates that the weights have seen; None while an update is under way or after one failed, when the
            weights belong to no version.
    """

    def __init__(self, spec: dict[str, Any], device: str) -> None:
        self.device, self.spec = device, spec
        self.run: str | None = None
        self.weight_version: int | None = None
        self.actor, self.engine = self._build_actor(spec), None
        if self.actor is not None and spec["generation"] is not None:
            self.engine = _generation_engine(self.actor, spec)
            self.tokenizer = Tokenizer(spec["model"]["path"])
        self.working_memory = WorkingMemory(device)
        self.checkpoints = Checkpointing()
        self.companions = self._companions(spec)

    def _build_actor(self, spec: dict[str, Any]) -> Actor | None:
        if spec["model"] is None:
            return None
        parallel, folder = ParallelConfig(**spec["parallel"]), spec["model"]["path"]
        return Actor(
            read_architecture(folder),
            folder,
            parallel.layout,
            sequence_parallel=parallel.sequence_parallel,
            dtype=_dtype(ModelConfig(**spec["model"]), self.device),
            device=self.device,
            optimizer=OptimizerConfig(**spec["optimizer"]),
        )

    def differences(self, spec: dict[str, Any]) -> list[str]:
        """What of `spec` the running engines cannot take on, because it is built into them."""
        different = []
        for part in ("model", "generation"):
            if (spec[part] is None) != (self.spec[part] is None):
                different.append("set of models" if part == "model" else "use of generation")
        if self.actor is not None and spec["model"] is not None:
            if read_architecture(spec["model"]["path"]) != self.actor.arch:
                different.append("architecture")
            if _dtype(ModelConfig(**spec["model"]), self.device) != self.actor.dtype:
                different.append("precision")
        if spec["parallel"] != self.spec["parallel"]:
            different.append("parallel sizes")
        if self.engine is not None and spec["generation"] is not None:
            before, now = self.spec["generation"], spec["generation"]
            different += [name for name in ENGINE_FIELDS if now[name] != before[name]]
        return different

    def load(self, spec: dict[str, Any]) -> None:
        """Another model's weights into the running engines, with a fresh optimizer.

        Raises:
            EnginesDoNotFit: names what differs.
        """
        if different := self.differences(spec):
            raise EnginesDoNotFit(
                f"the pool's engines were built with another {', '.join(different)}: "
                "stop the pool (`onecopy pool down`) or name another one (pool.name)"
            )
        self.weight_version = None
        self.checkpoints.abandon()
        self._to_training()
        self.spec = spec
        if self.actor is not None:
            self.actor.load(spec["model"]["path"], OptimizerConfig(**spec["optimizer"]))
        if self.engine is not None:
            self.tokenizer, self.engine.config = (
                Tokenizer(spec["model"]["path"]),
                GenerationConfig(**spec["generation"]),
            )
        self.companions = self._companions(spec)

    def _companions(self, spec: dict[str, Any]) -> Companions:
        """The models beside the actor that the run needs."""
        if spec.get("reference") or spec.get("critic"):
            self._to_training()  # room to build them
        return Companions(spec, self.device, lambda model: _dtype(model, self.device))

    def own(self, run: str, version: int) -> None:
        """The weights are `version` of `run` from now on."""
        self.run, self.weight_version = run, version

    def describe(self) -> dict[str, Any]:
        """Run, version, and the bytes that training and generation share."""
        described: dict[str, Any] = {"run": self.run, "weight_version": self.weight_version}
        if self.engine is not None:
            shared = self.engine.shared
            described["metrics"] = {"shared_bytes": float(shared.check()), "private_bytes": float(shared.private_bytes)}
        return described

    def generate(
        self,
        tell: Callable[..., None],
        cancelled: Callable[[], bool],
        *,
        store: str,
        prompts: dict[str, Any],
        out: str,
        sampling: dict[str, Any],
        seed: int,
        step: int,
        weight_version: int,
    ) -> dict[str, Any]:
        """Answer this replica's share of the prompts and write them as one part of the stage (one rank a replica writes).

        Args:
            store, prompts: root of the runs and manifest of the PROMPT dataset.
            out: the stage's folder, relative to the store.
            sampling: {"temperature", "top_p", "max_response_tokens", "samples_per_prompt"}.
            seed, step: with the stage's name and the replica they seed the sampler.
            weight_version: recorded in each row; must be what the rank holds.
        """
        if weight_version != self.weight_version:
            raise RuntimeError(
                f"asked to generate with version {weight_version}, this rank holds {self.weight_version}"
            )
        engine = self.engine
        if engine is None:
            raise RuntimeError("this group was loaded without a generation engine")
        files, replica = Store.open(store), engine.replica
        rows = read(files, Manifest(**prompts), ["prompt_id", "group_id", "prompt_tokens"]).to_pylist()
        start, stop = contiguous_ranges(len(rows), engine.replicas)[replica]
        count = sampling["samples_per_prompt"]
        wanted = [row for row in rows[start:stop] for _ in range(count)]
        transition = engine.wake()
        began = time.monotonic()

        def report(finished: int, tokens: int) -> None:
            tell(done=finished, total=len(wanted), tokens_per_second=tokens / max(time.monotonic() - began, 1e-3))

        completions = engine.generate(
            [row["prompt_tokens"] for row in wanted],
            Sampling(
                temperature=sampling["temperature"],
                top_p=sampling["top_p"],
                max_response_tokens=sampling["max_response_tokens"],
                stop_token_ids=tuple(self.tokenizer.stop_token_ids),
                seed=_derived_seed(seed, step, out.split("/")[-2], replica),
            ),
            report,
            cancelled,
        )
        seconds = time.monotonic() - began
        metrics = _transition_metrics(engine, transition)
        if not engine.leads or not wanted:
            return {"metrics": metrics}
        table = self._rollout_table(wanted, completions, count)
        entry = write_part(files, out, replica, table, ROLLOUT)
        tokens = sum(len(completion.tokens) for completion in completions)
        metrics |= {"tokens": float(tokens), "seconds": seconds}
        return {"files": [entry.model_dump()], "metrics": metrics}

    def _rollout_table(self, wanted: list[dict[str, Any]], completions: list[Completion], count: int) -> pa.Table:
        """Rows of the ROLLOUT schema; `count` consecutive ones answer the same prompt."""
        rows = [
            {
                "sample_id": f"{row['group_id']}-{index % count:03d}",
                "group_id": row["group_id"],
                "prompt_id": row["prompt_id"],
                "weight_version": self.weight_version,
                "prompt_tokens": row["prompt_tokens"],
                "response_tokens": completion.tokens,
                "response_mask": [1] * len(completion.tokens),
                "rollout_logprobs": completion.logprobs,
                "finish_reason": completion.finish_reason,
                "text": self.tokenizer.decode(completion.tokens),
            }
            for index, (row, completion) in enumerate(zip(wanted, completions, strict=True))
        ]
        return pa.Table.from_pylist(rows, schema=ROLLOUT)

    def annotate(
        self,
        *,
        role: str,
        store: str,
        rollout: dict[str, Any],
        out: str,
        temperature: float,
        max_tokens_per_micro_batch: int,
    ) -> dict[str, Any]:
        """What the reference ("reference") or the critic ("critic") says of staged samples, as a dataset.

        Args:
            store, rollout: root of the runs and manifest of the ROLLOUT dataset.
            out: the stage's folder, relative to the store.
            temperature: divides the logits, as it did the sampler's.
        """
        self._to_training()
        return self.companions.annotate(role, store, rollout, out, temperature, max_tokens_per_micro_batch)

    def update(
        self,
        tell: Callable[..., None],
        *,
        store: str,
        datasets: dict[str, dict[str, Any]],
        loss: dict[str, Any],
        optimizer: dict[str, Any],
        mini_batch_size: int | None,
        epochs: int,
        max_tokens_per_micro_batch: int,
        horizon: int,
        temperature: float,
        seed: int,
        version: int,
        critic: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Train on staged datasets ({"rollout", "advantage"} or {"demonstration"}); `version` becomes `version` + 1.

        With a critic's settings the critic learns too, first, from the same samples ({"values"} beside the others); of the two,
        a group trains what it holds.

        The weights belong to no version from the first optimizer step to the last: if anything fails in between, the rank
        refuses to generate or train until a checkpoint is restored.
        """
        if version != self.weight_version:
            raise RuntimeError(f"asked to update version {version}, this rank holds {self.weight_version}")
        samples = _read_samples(Store.open(store), datasets)
        began = time.monotonic()
        settings = UpdateSettings(
            loss=LossConfig(**loss),
            temperature=temperature,
            mini_batch_size=mini_batch_size,
            epochs=epochs,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            horizon=horizon,
            seed=_derived_seed(seed, version, "update", 0),
        )
        policy = None if self.actor is None else Update(self.actor, samples, settings)
        transition = self._to_training(
            None if policy is None else self.working_memory.needed(policy.largest_micro_batch)
        )
        self.weight_version, metrics = None, dict[str, float]()
        if critic is not None and self.companions.has_critic:
            clip = CriticConfig(**critic).value_clip
            value_settings = ValueSettings(clip, mini_batch_size, epochs, max_tokens_per_micro_batch, settings.seed)
            metrics |= self.companions.update_critic(critic, samples, value_settings)
        if policy is not None and self.actor is not None:
            self.actor.optimizer_config = OptimizerConfig(**optimizer)
            metrics |= self._update_policy(self.actor, policy, tell)
        self.weight_version = version + 1
        if self.engine is not None and transition is not None:
            metrics |= _transition_metrics(self.engine, transition)
        metrics["seconds"] = time.monotonic() - began
        if "trained_tokens" in metrics:
            metrics["trained_tokens_per_second"] = metrics["trained_tokens"] / max(metrics["seconds"], 1e-9)
        return {"weight_version": version + 1, "metrics": metrics}

    def _update_policy(self, actor: Actor, policy: Update, tell: Callable[..., None]) -> dict[str, float]:
        began = time.monotonic()
        with self.working_memory.measured(policy.largest_micro_batch):
            metrics = policy.run(lambda done, total: tell(done=done, total=total))
        if (activations := self.working_memory.seen_bytes) is not None:
            metrics["memory/activations_bytes"] = float(activations)
        flops = policy.passes * forward_flops(actor.arch, policy.samples.lengths)
        rate = flops / max(time.monotonic() - began, 1e-9) / actor.layout.world_size
        metrics["tflops_per_device"] = rate / 1e12
        peak = peak_flops(torch.cuda.get_device_name()) if self.device == "cuda" else None
        return metrics if peak is None else {**metrics, "mfu": rate / peak}

    def _to_training(self, needed: int | None = None) -> Transition | None:
        """Put the generation engine to sleep, if there is one.

        Args:
            needed: bytes that the work to come takes on the device.
        """
        return None if self.engine is None else self.engine.sleep(needed)

    def save(self, store: str, out: str) -> dict[str, Any]:
        """Begin a checkpoint in the folder `out` of the store; see Checkpointing.save."""
        began = time.monotonic()
        self._to_training()
        return self.checkpoints.save(store, out, self._trained(), began)

    def restore(self, store: str, manifest: dict[str, Any]) -> int:
        """Bring the trained models to a checkpoint and return its version; see Checkpointing.restore."""
        self.weight_version = None
        self._to_training()
        record = Manifest(**manifest)
        self.checkpoints.restore(store, record, self._trained())
        return record.weight_version

    def _trained(self) -> dict[str, TrainedModel]:
        """The models that checkpoints hold, by role."""
        models: dict[str, TrainedModel] = {}
        if (actor := self.actor) is not None:
            models["actor"] = TrainedModel(lambda: nullcontext(actor), self.spec["model"]["path"])
        if self.companions.has_critic:
            models["critic"] = TrainedModel(self.companions.critic_awake, self.spec["critic"]["model"]["path"])
        return models


def _generation_engine(actor: Actor, spec: dict[str, Any]) -> GenerationEngine:
    parallel, generation = ParallelConfig(**spec["parallel"]), GenerationConfig(**spec["generation"])
    plan = plan_generation(
        actor.arch,
        parallel.layout,
        generation.layout(parallel),
        bytes_per_number=actor.dtype.itemsize,
        ranks_per_node=_ranks_per_node(),
    )
    return GenerationEngine(HybridWeights(actor, plan), spec["model"]["path"], generation)


def _transition_metrics(engine: GenerationEngine, transition: Transition) -> dict[str, float]:
    """What the change of layout cost on this rank, and who has how much of its memory."""
    memory = {f"memory/{owner}_bytes": float(size) for owner, size in engine.memory().items()}
    return transition.metrics() | memory


def _dtype(model: ModelConfig, device: str) -> torch.dtype:
    if model.precision == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    return getattr(torch, model.precision)


def _ranks_per_node() -> int:
    """Consecutive ranks that share a host (all of them if the hosts have different numbers)."""
    world = torch.distributed.get_world_size()
    hosts: list[Any] = [None] * world
    torch.distributed.all_gather_object(hosts, socket.gethostname())
    here = hosts.count(hosts[0])
    blocks = [hosts[start : start + here] for start in range(0, world, here)]
    return (
        here if all(len(set(block)) == 1 for block in blocks) and len({b[0] for b in blocks}) == len(blocks) else world
    )


def _derived_seed(*parts: Any) -> int:
    """A seed that depends on all parts and on nothing else (63 bits)."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def _read_samples(store: Store, datasets: dict[str, dict[str, Any]]) -> Samples:
    """The training samples of an update, joined by sample_id. Every rank reads them all: counts must be of the whole batch."""
    if "demonstration" in datasets:
        table = read(store, Manifest(**datasets["demonstration"]))
        responses = table["response_tokens"].to_pylist()
        ones = [[1] * len(response) for response in responses]
        return Samples(table["prompt_tokens"].to_pylist(), responses, ones, [[0.0] * len(r) for r in responses])
    advantages = read(store, Manifest(**datasets["advantage"]), ["sample_id", "advantages", "returns", "reward"])
    columns = ["sample_id", "prompt_tokens", "response_tokens", "response_mask", "rollout_logprobs"]
    table = _with_columns(advantages, read(store, Manifest(**datasets["rollout"]), columns))
    if "reference" in datasets:
        columns = ["sample_id", "reference_logprobs"]
        table = _with_columns(table, read(store, Manifest(**datasets["reference"]), columns))
    if "values" in datasets:
        table = _with_columns(table, read(store, Manifest(**datasets["values"]), ["sample_id", "values"]))
    return Samples(
        table["prompt_tokens"].to_pylist(),
        table["response_tokens"].to_pylist(),
        table["response_mask"].to_pylist(),
        table["advantages"].to_pylist(),
        table["rollout_logprobs"].to_pylist(),
        table["reference_logprobs"].to_pylist() if "reference" in datasets else None,
        table["reward"].to_pylist(),
        table["values"].to_pylist() if "values" in datasets else None,
        table["returns"].to_pylist() if "values" in datasets else None,
    )


def _with_columns(table: pa.Table, more: pa.Table) -> pa.Table:
    """`table` with the columns of `more`, which may have further samples: those that were not kept for training."""
    return join(table, more.filter(pa.compute.is_in(more["sample_id"], value_set=table["sample_id"].combine_chunks())))
