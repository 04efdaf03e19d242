"""Model shapes that benchmarks use, by name, as config.json contents (weights are random)."""

from __future__ import annotations

from engine.weights import shapes

SHAPES: dict[str, shapes.Config] = {
    name: {
        **config, "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "hidden_act": "silu", "eos_token_id": config["vocab_size"] - 1, "dtype": "bfloat16", "tie_word_embeddings": False,
    }
    for name, config in {
        "tiny": {
            "model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 192, "vocab_size": 512,
        },
        **{name: config for name, config in shapes.SHAPES.items() if config["model_type"] == "qwen2"},
    }.items()
}  # fmt: skip
"""All untied: an untied head is the harder case for sharing and costs more memory."""
