"""Experts of a mixture, stacked in two parameters as vLLM stacks them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor


def router_without_transformer_engine() -> None:
    """Megatron-core 0.16.1 reads a name in its router that only Transformer Engine defines."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def dispatcher_without_cuda() -> None:
    """Let Megatron-core's all-to-all dispatcher run on a machine without a GPU, for the rest of the process.

    It copies the token counts to the host on a CUDA stream. Here they are there already, but gloo wants lists.
    """

    def counts_to_lists(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if point == dispatcher.cuda_dtoh_point:
            for name in ("input_splits", "output_splits"):
                splits = getattr(dispatcher, name)
                setattr(dispatcher, name, splits.tolist() if isinstance(splits, Tensor) else splits)
        return tokens_per_expert

    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none: without a GPU"  # not None, or it would make one
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = counts_to_lists


class StackedExperts(MegatronModule):
    """w13 [experts, 2 * intermediate / tp, hidden] = [gate | up] of each expert; w2 [experts, hidden, intermediate / tp].

    Megatron-core's own expert modules keep one parameter an expert, or transposed ones; vLLM could not share those.
    """

    def __init__(
        self, num_local_experts: int, config: Any, submodules: Any = None, pg_collection: Any = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        narrow, hidden = config.moe_ffn_hidden_size // pg_collection.expt_tp.size(), config.hidden_size
        self.w13 = torch.nn.Parameter(torch.empty(num_local_experts, 2 * narrow, hidden, dtype=config.params_dtype))
        self.w2 = torch.nn.Parameter(torch.empty(num_local_experts, hidden, narrow, dtype=config.params_dtype))
        apart = pg_collection.ep.size() > 1 or pg_collection.expt_tp.size() != pg_collection.tp.size()
        for parameter, axis in ((self.w13, 1), (self.w2, 2)):
            # Not divided as the dense layers are: other ranks hold copies, and Megatron keeps a buffer of its own for them.
            parameter.allreduce = not apart  # type: ignore[attr-defined]
            # without this the gradient norm would count the parameter on tensor parallel rank 0 only
            set_tensor_model_parallel_attributes(parameter, True, axis, 1)

    def forward(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Tokens sorted by expert [n, hidden], their counts [experts] and router weights [n], to [n, hidden]."""
        counts = tokens_per_expert.tolist()
        outputs = []
        # unbind gives one backward for the stack; indexing would give one a expert, each as large as the whole
        for tokens, weight, w13, w2 in zip(
            x.split(counts), probs.split(counts), self.w13.unbind(0), self.w2.unbind(0), strict=True
        ):
            gate, up = F.linear(tokens, w13).chunk(2, -1)
            outputs.append(F.linear(F.silu(gate) * up * weight[:, None], w2))
        return torch.cat(outputs), None
