"""vLLM in the rank's own process, on the actor's weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.config import GenerationConfig
from engine.generation.loader import LOAD_FORMAT, SharedWeights, offer
from engine.roles.actor import Actor
from engine.weights.map import weight_map

DEFAULT_CONTEXT = 8192
"""Longest context when the configuration names none and the model would allow more (the KV cache must hold one)."""

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
    """One replica's share of vLLM. With tensor parallelism every rank of the replica makes the same calls in the same order."""

    def __init__(self, actor: Actor, folder: str | Path, config: GenerationConfig) -> None:
        from vllm import LLM

        if actor.device == "cpu":
            _without_named_shared_memory()

        self.actor = actor
        self.max_model_len = config.max_model_len or min(actor.arch.max_positions, DEFAULT_CONTEXT)
        self.shared = SharedWeights(weight_map(actor.arch), actor.parameters)
        with offer(self.shared):
            self.llm = LLM(str(folder), **_arguments(actor, config, self.max_model_len))
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

    def sleep(self) -> None:
        """Give the KV cache's memory back for training (a GPU only); weights are the actor's and stay."""
        if self.awake and self.actor.device == "cuda":
            torch.cuda.synchronize()
            self.llm.sleep(level=1)
            self.awake = False

    def wake(self) -> None:
        """Take the KV cache's memory again, and forget cached prefixes: they belong to the weights before the update."""
        if not self.awake:
            torch.cuda.empty_cache()
            self.llm.wake_up()
            self.awake = True
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "the prefix cache could not be emptied: it would answer with the weights before the update"
            )

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
        if self.actor.layout.tp == 1:
            return wish
        from megatron.core import parallel_state

        flag = torch.tensor([float(wish)], device=self.actor.device)
        torch.distributed.all_reduce(flag, group=parallel_state.get_tensor_model_parallel_group())
        return bool(flag.item())


def _completion(output: Any) -> Completion:
    tokens = list(output.token_ids)
    logprobs = [entry[token].logprob for token, entry in zip(tokens, output.logprobs, strict=True)]
    return Completion(tokens, logprobs, output.finish_reason)


def _seed_everything(seed: int) -> None:
    """Samplers draw from torch's generators or take their seeds from NumPy's, by vLLM version; all start from `seed`."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _without_named_shared_memory() -> None:
    """Tensor parallel ranks on CPU talk over gloo.

    vLLM's shared-memory segment has the same name for every `external_launcher` engine of a machine: a second pool, or what a
    killed one left in /dev/shm, would be joined or refused.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def _arguments(actor: Actor, config: GenerationConfig, max_model_len: int) -> dict[str, Any]:
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
    )
    if torch.distributed.get_world_size() > 1:
        common |= dict(distributed_executor_backend="external_launcher", tensor_parallel_size=actor.layout.tp)
    if actor.device == "cpu":
        return common | dict(enforce_eager=True, kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30))
    return common | dict(
        enforce_eager=not config.cuda_graphs,
        gpu_memory_utilization=config.memory_fraction,
        enable_sleep_mode=True,
        # measured on an H200: the faster one on a single GPU, the slower one under external_launcher
        async_scheduling=torch.distributed.get_world_size() == 1,
    )
