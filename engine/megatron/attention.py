"""Self-attention whose weights lie in memory as vLLM's do, over packed rows of several sequences."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


class ConcatenatedQKV(SelfAttention):
    """`linear_qkv` holds [Q | K | V] of this tensor parallel rank, exactly vLLM's `qkv_proj`.

    Megatron-core's own order interleaves q, k and v by query group, which would make a copy of the weights necessary.
    """

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[tokens, 1, hidden] to q [tokens, 1, heads, head_dim] and k, v [tokens, 1, kv_heads, head_dim] of this rank."""
        mixed, _bias = self.linear_qkv(hidden_states)
        dim = self.hidden_size_per_attention_head
        heads = [self.num_attention_heads_per_partition] + [self.num_query_groups_per_partition] * 2
        parts = mixed.split([n * dim for n in heads], -1)
        q, k, v = (part.unflatten(-1, (n, dim)) for part, n in zip(parts, heads, strict=True))
        return self.q_layernorm(q), self.k_layernorm(k), v


class PackedAttention(MegatronModule):
    """Causal attention inside each sequence of a packed row: [tokens, 1, heads, head_dim] to [tokens, 1, heads * head_dim].

    The cost is the sum of the sequences' squared lengths, not the square of the sum. On CUDA in half precision one
    variable-length flash kernel does the row; elsewhere one scaled-dot-product call a sequence.
    """

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any = None, packed_seq_params: Any = None, **_: Any
    ) -> Tensor:
        edges = packed_seq_params.cu_seqlens_q
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
            return self._flash(q, k, v, edges, packed_seq_params.max_seqlen_q)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [1, heads, tokens, head_dim]
        places = edges.tolist()
        rows = [
            F.scaled_dot_product_attention(
                q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=True, scale=self.scale, enable_gqa=True
            )
            for a, b in zip(places[:-1], places[1:], strict=True)
        ]
        return torch.cat(rows, 2).permute(2, 0, 1, 3).flatten(2)

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, edges: Tensor, longest: int) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        groups = q.shape[2] // k.shape[2]
        # The kernel of torch 2.11 has no grouped-query argument; repeating k and v is cheap beside the scores.
        k, v = (x.repeat_interleave(groups, 2) for x in (k, v)) if groups > 1 else (k, v)
        out = varlen_attn(
            q[:, 0].contiguous(),
            k[:, 0].contiguous(),
            v[:, 0].contiguous(),
            edges,
            edges,
            longest,
            longest,
            **_causal(varlen_attn),
        )
        return out.flatten(1)[:, None]


def _causal(kernel: Any) -> dict[str, Any]:
    """The keyword that means causal: `window_size` since torch 2.12, `is_causal` before."""
    import inspect

    named = inspect.signature(kernel).parameters
    return {"window_size": (-1, 0)} if "window_size" in named else {"is_causal": True}
