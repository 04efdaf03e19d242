"""full_gather: every rank rebuilds every whole Hugging Face tensor and hands it to vLLM, as verl, NeMo-RL and slime do.

One `load_weights` over a generator, as they call it: a call a weight would look up all of vLLM's parameters each time. A weight is
gathered when vLLM asks for it and gone when it asks for the next, so the largest one is all the memory that it takes. Shards travel
over Megatron's own groups: tensor (and expert) parallel ranks gather, then a stage broadcasts to the others. Data parallel replicas
hold the same and send each other nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from engine.weights.huggingface import huggingface_tensors
from engine.weights.map import Weight, weight_map
from infra.benchmarks.reshard.laps import Laps
from infra.benchmarks.reshard.resident import Filled, ResidentWeights


class FullGather:
    """Fills the generation tensors.

    Args:
        weights: what is read and filled; vLLM's parameters are its generation tensors.
        vllm_model: the model that reads it.
    """

    def __init__(self, weights: ResidentWeights, vllm_model: torch.nn.Module) -> None:
        self._weights, self._model = weights, vllm_model
        self._layout = weights.actor.layout
        self._stages = self._layout.stage_of_layer(weights.actor.arch.layers)
        self._received, self._copied = 0, 0

    def __call__(self) -> Filled:
        """Copied are whole tensors and vLLM's slices of them. Steps: gather, convert, load."""
        self._received, self._copied = 0, sum(tensor.nbytes for tensor in self._weights.generation.values())
        laps = Laps(self._weights.actor.device)
        with torch.no_grad():
            tensors = self._whole(laps)
            self._model.load_weights(tensors)  # type: ignore[operator]
            for _ in tensors:  # what vLLM did not ask for: other ranks wait for this one's part in it
                pass
        return Filled(self._received, self._copied, laps.seconds())

    def _whole(self, laps: Laps) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of everything in the model; every rank must go through all of it."""
        for weight in weight_map(self._weights.actor.arch):
            group = _group_of_shards(weight)
            layout = self._layout
            shards = [weight.shard(layout, layout.coordinates(r)) for r in dist.get_process_group_ranks(group)]
            gathered = self._gather(weight, group, len(shards))
            laps.mark("gather")
            whole = huggingface_tensors(weight, dict(zip(shards, gathered, strict=True)))
            self._copied += sum(tensor.nbytes for tensor in whole.values())
            del gathered
            laps.mark("convert")
            yield from whole.items()
            laps.mark("load")

    def _gather(self, weight: Weight, group: dist.ProcessGroup, members: int) -> list[Tensor]:
        """The shards of the ranks of `group`, in their order, on every rank of every stage."""
        actor = self._weights.actor
        mine = self._weights.training.get(weight.megatron)
        divided = weight.axis is not None and members > 1
        shape = weight.shard_shape(weight.shard(self._layout, actor.coordinates))
        if mine is not None and not divided:
            stack = mine[None]
        else:
            stack = torch.empty((members if divided else 1, *shape), dtype=actor.dtype, device=actor.device)
            if mine is not None:
                dist.all_gather_into_tensor(stack.flatten(0, 1), mine, group=group)
                self._received += stack.nbytes - mine.nbytes
        holders = weight.stages(self._layout, self._stages)
        if len(holders) < self._layout.pp:
            stages = parallel_state.get_pipeline_model_parallel_group()
            root = dist.get_process_group_ranks(stages)[holders[0]]
            if dist.get_rank() != root:
                stack = stack.clone() if mine is not None else stack  # never into the actor's own memory
                self._received += stack.nbytes
            dist.broadcast(stack, root, group=stages)
        return list(stack) if divided else [stack[0]] * members


def _group_of_shards(weight: Weight) -> dist.ProcessGroup:
    """Ranks of one stage that together have the whole weight once."""
    if weight.stacked:
        return parallel_state.get_expert_tensor_and_model_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()
