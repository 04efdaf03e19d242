"""Model shapes that benchmarks use, by name, as config.json contents (weights are random)."""

from __future__ import annotations

from typing import Any


def _qwen2(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int = 151936
) -> dict[str, Any]:
    return dict(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocabulary,
        max_position_embeddings=4096, rms_norm_eps=1e-6, rope_theta=1000000.0, tie_word_embeddings=False, hidden_act="silu",
        eos_token_id=vocabulary - 1, dtype="bfloat16",
    )  # fmt: skip


SHAPES = {
    "tiny": _qwen2(128, 192, 2, 4, 2, 512),
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2),
    "qwen2.5-3b": _qwen2(2048, 11008, 36, 16, 2),
}
"""All untied: an untied head is the harder case for sharing and costs more memory."""
