"""vLLM in the rank's own process, on the actor's weights in the generation layout."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.config import GenerationConfig
from engine.generation.loader import LOAD_FORMAT, SharedWeights, offer
from engine.generation.ranks import rank_order
from engine.layout import Layout
from engine.reshard.account import Transition
from engine.reshard.hybrid import HybridWeights

CANCEL_EVERY = 16
"""Decode steps between two looks at the cancel flag, which the ranks of one replica must agree on."""


class Cancelled(RuntimeError):
    """The operation was cancelled; nothing was written."""


@dataclass(frozen=True)
class Sampling:
    """How one batch is sampled. temperature 0 is greedy."""

    temperature: float
    top_p: float
    max_response_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Completion:
    """One response: token ids (the stop token included), their log-probabilities, and "stop" or "length"."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str


class GenerationEngine:
    """One replica's share of vLLM. The ranks of a replica make the same calls in the same order.

    Args:
        weights: this rank's weights; the engine is built on their generation layout, which it leaves in memory.
        folder: the model's folder, for its configuration.
        config: sampling and limits.

    Attributes:
        replica, replicas: which of how many replicas of the model this rank belongs to.
        leads: this rank writes the replica's answers.
    """

    def __init__(self, weights: HybridWeights, folder: str | Path, config: GenerationConfig) -> None:
        from vllm import LLM

        if weights.actor.device == "cpu":
            _without_named_shared_memory()

        self.weights, self.device, self.config = weights, weights.actor.device, config
        assignment = weights.plan.target
        at = assignment.coordinates(weights.rank)
        self.replica, self.replicas, self.leads = at.dp, assignment.layout.dp, at.tp == at.pp == 0
        self._group = _replica_group(assignment.order.tolist(), assignment.layout, weights.rank)
        self.max_model_len = config.context(weights.actor.arch.max_positions)
        weights.to_generation()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            self._make_room(int(torch.cuda.get_device_properties(0).total_memory * config.memory_fraction))
        self.shared = SharedWeights(weights.actor.arch, weights.generation, weights.shards)
        with offer(self.shared), rank_order(assignment.order.tolist()):
            self.llm = LLM(str(folder), **_arguments(weights, config, self.max_model_len))
        if self.device == "cpu" and at.pp > 0:
            self.llm.collective_rpc(_make_pipeline_buffers)
        self.awake = True
        self._calls = 0

    def generate(
        self,
        prompts: list[list[int]],
        sampling: Sampling,
        on_finished: Callable[[int, int], None] = lambda finished, tokens: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> list[Completion]:
        """One completion a prompt, in the prompts' order. The same seed and weights give the same completions.

        Args:
            prompts: token ids; repeat a prompt to get several samples (they share the prefix in the cache).
            on_finished: called with the finished samples and their tokens so far.
            cancelled: looked at now and then; when true on any rank of the replica, Cancelled is raised on all.
        """
        self.wake()
        _seed_everything(sampling.seed)
        self._calls += 1  # in the ids, so that nothing of another call can be taken for an answer of this one
        ids = [f"{self._calls}-{index}" for index in range(len(prompts))]
        done: dict[str, Completion] = {}
        try:
            for name, prompt in zip(ids, prompts, strict=True):
                parameters = self._parameters(sampling, len(prompt))
                self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
            self._run(done, len(ids), on_finished, cancelled)
        finally:
            if left := [name for name in ids if name not in done]:
                self.llm.llm_engine.abort_request(left)
        return [done[name] for name in ids]

    def _run(
        self,
        done: dict[str, Completion],
        wanted: int,
        on_finished: Callable[[int, int], None],
        cancelled: Callable[[], bool],
    ) -> None:
        """Step the engine until nothing is left; finished samples go to `done` by request id."""
        engine, tokens, steps = self.llm.llm_engine, 0, 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = _completion(output.outputs[0])
                    tokens += len(done[output.request_id].tokens)
            on_finished(len(done), tokens)
            steps += 1
            if steps % CANCEL_EVERY == 0 and self._agreed(cancelled()):
                raise Cancelled(f"generation stopped after {len(done)} of {wanted} samples")

    def sleep(self, needed: int | None = None) -> Transition:
        """Give the weights to the actor for training, and the KV cache's memory back (on a GPU) if training needs it.

        Args:
            needed: bytes that training will take beside weights, gradients and optimizer state. Where they are free, the KV
                cache keeps its memory: taking it again costs 3 ms a GiB. None: not known, so it is given back.
        """
        began = time.perf_counter()
        if self.awake and self.device == "cuda":
            torch.cuda.synchronize()
            if needed is None or _free_bytes() < needed + self.weights.bytes_to_train():
                self.llm.sleep(level=1)
                self.awake = False
        slept = time.perf_counter() - began
        report = self.weights.to_training()
        report.seconds["sleep"] = slept
        return report

    def wake(self) -> Transition:
        """Bring the weights to the generation layout and take the KV cache's memory again.

        Cached prefixes are forgotten: they belong to the weights before the update.
        """
        report = self.weights.to_generation()
        with report.phase("wake"):
            if not self.awake:
                torch.cuda.empty_cache()
                self._make_room(_asleep_bytes())
                self.llm.wake_up()
                self.awake = True
            if not self.llm.reset_prefix_cache():
                raise RuntimeError(
                    "the prefix cache could not be emptied: it would answer with the weights before the update"
                )
        return report

    def memory(self) -> dict[str, int]:
        """Bytes by owner: the weights', the KV cache, and what else the process has on the device."""
        owners = self.weights.owners()
        if self.device == "cpu":
            return owners
        free, total = torch.cuda.mem_get_info()
        owners["kv_cache"] = _awake_bytes()
        on_device = sum(size for owner, size in owners.items() if owner != "optimizer_on_host")
        owners["allocator_unused"] = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        owners["other"] = total - free - on_device - owners["allocator_unused"]
        return owners

    def _make_room(self, needed: int) -> None:
        """Send the optimizer state to host memory if it must go, or if `needed` bytes are not free beside it."""
        free = _free_bytes()
        wish = self.config.offload_optimizer
        if wish == "always" or (wish == "auto" and free < needed):
            self.weights.optimizer_to_host()

    def _parameters(self, sampling: Sampling, prompt_tokens: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=min(sampling.max_response_tokens, self.max_model_len - prompt_tokens),
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # the stop tokens above are the whole list, of tokenizer and generation_config alike
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _agreed(self, wish: bool) -> bool:
        """Whether any rank of the replica wishes it."""
        if self._group is None:
            return wish
        flag = torch.tensor([float(wish)])
        torch.distributed.all_reduce(flag, group=self._group)
        return bool(flag.item())


def _replica_group(order: list[int], layout: Layout, rank: int) -> torch.distributed.ProcessGroup | None:
    """A gloo group of the ranks of this rank's replica; None when it is alone in it."""
    size, mine = layout.tp * layout.pp, None
    if size == 1:
        return None
    for start in range(0, len(order), size):
        ranks = order[start : start + size]
        group = torch.distributed.new_group(ranks, backend="gloo")
        mine = group if rank in ranks else mine
    return mine


def _free_bytes() -> int:
    """Device memory that is free, or that torch's allocator holds unused."""
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def _cumem() -> dict[int, Any]:
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance().pointer_to_data


def _asleep_bytes() -> int:
    """Bytes that waking the engine takes."""
    return sum(data.handle[1] for data in _cumem().values() if getattr(data, "is_asleep", True))


def _awake_bytes() -> int:
    return sum(data.handle[1] for data in _cumem().values() if not getattr(data, "is_asleep", False))


def _completion(output: Any) -> Completion:
    tokens = list(output.token_ids)
    logprobs = [entry[token].logprob for token, entry in zip(tokens, output.logprobs, strict=True)]
    return Completion(tokens, logprobs, output.finish_reason)


def _seed_everything(seed: int) -> None:
    """Samplers draw from torch's generators or take their seeds from NumPy's, by vLLM version; all start from `seed`."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _make_pipeline_buffers(worker: Any) -> None:
    """What a later pipeline stage receives into; vLLM makes it while warming up, which it does not do on CPU."""
    runner = worker.model_runner
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )


def _without_named_shared_memory() -> None:
    """Tensor parallel ranks on CPU talk over gloo.

    vLLM's shared-memory segment has the same name for every `external_launcher` engine of a machine: a second pool, or what a
    killed one left in /dev/shm, would be joined or refused.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def _arguments(weights: HybridWeights, config: GenerationConfig, max_model_len: int) -> dict[str, Any]:
    actor, layout = weights.actor, weights.plan.target.layout
    common: dict[str, Any] = dict(
        load_format=LOAD_FORMAT,
        dtype=str(actor.dtype).removeprefix("torch."),
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
        max_num_seqs=config.max_concurrent_samples,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",  # of the tempered distribution, as the actor computes them
        seed=0,
        disable_log_stats=True,
        additional_config={"lora": repr(actor.arch.lora)},  # part of the key of vLLM's compiled graphs
    )
    if torch.distributed.get_world_size() > 1:
        common |= dict(
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=layout.tp,
            pipeline_parallel_size=layout.pp,
            enable_expert_parallel=layout.ep > 1,
        )
    if actor.device == "cpu":
        return common | dict(enforce_eager=True, kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30))
    return common | dict(
        enforce_eager=not config.cuda_graphs,
        gpu_memory_utilization=config.memory_fraction,
        enable_sleep_mode=True,
        # measured on an H200: the faster one on a single GPU, the slower one under external_launcher
        async_scheduling=torch.distributed.get_world_size() == 1,
    )
