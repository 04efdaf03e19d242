"""Sizes of well-known models by name, as the content of their config.json. Sizes are facts of the published models."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def _config(
    model_type: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocabulary: int,
    **more: Any,
) -> Config:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
        **more,
    }


def _qwen3_moe(
    layers: int, hidden: int, heads: int, kv_heads: int, experts: int, width: int, vocabulary: int
) -> Config:
    return _config(
        "qwen3_moe", layers, hidden, heads, kv_heads, width, vocabulary, head_dim=128, num_experts=experts,
        num_experts_per_tok=8, moe_intermediate_size=width, norm_topk_prob=True,
    )  # fmt: skip


TIED = {"tie_word_embeddings": True}

SHAPES: dict[str, Config] = {
    "qwen2.5-0.5b": _config("qwen2", 24, 896, 14, 2, 4864, 151936, **TIED),
    "qwen2.5-1.5b": _config("qwen2", 28, 1536, 12, 2, 8960, 151936, **TIED),
    "qwen2.5-3b": _config("qwen2", 36, 2048, 16, 2, 11008, 151936, **TIED),
    "qwen2.5-7b": _config("qwen2", 28, 3584, 28, 4, 18944, 152064),
    "qwen2.5-14b": _config("qwen2", 48, 5120, 40, 8, 13824, 152064),
    "qwen2.5-32b": _config("qwen2", 64, 5120, 40, 8, 27648, 152064),
    "qwen2.5-72b": _config("qwen2", 80, 8192, 64, 8, 29568, 152064),
    "qwen3-0.6b": _config("qwen3", 28, 1024, 16, 8, 3072, 151936, head_dim=128, **TIED),
    "qwen3-8b": _config("qwen3", 36, 4096, 32, 8, 12288, 151936, head_dim=128),
    "qwen3-32b": _config("qwen3", 64, 5120, 64, 8, 25600, 151936, head_dim=128),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 4, 128, 768, 151936),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, 4, 128, 1536, 151936),
    "llama3.2-1b": _config("llama", 16, 2048, 32, 8, 8192, 128256, **TIED),
    "llama3.2-3b": _config("llama", 28, 3072, 24, 8, 8192, 128256, **TIED),
    "llama3-8b": _config("llama", 32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": _config("llama", 80, 8192, 64, 8, 28672, 128256),
    "llama3-405b": _config("llama", 126, 16384, 128, 8, 53248, 128256),
    "mixtral-8x7b": _config("mixtral", 32, 4096, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2),
    "deepseek-v3-like": _qwen3_moe(58, 7168, 128, 8, 256, 2048, 129280),
}
"""The last one has the size and the experts of DeepSeek-V3's sparse layers with plain attention: 670 billion parameters."""
