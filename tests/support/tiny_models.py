"""Small random models of every supported family, written by transformers: the independent reference of the engine tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 264  # padded to 320: with two tensor parallel ranks, the second holds 104 real rows and 56 padded ones

SHARED: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, eos_token_id=0, pad_token_id=None, bos_token_id=None,
    initializer_range=0.08,
)  # fmt: skip

LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", dict(tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE)),
    "llama-tied-linear-rope": (
        "LlamaConfig",
        dict(tie_word_embeddings=True, rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0)),
    ),
    "qwen2": ("Qwen2Config", dict(tie_word_embeddings=False)),
    "qwen2-tied": ("Qwen2Config", dict(tie_word_embeddings=True, rms_norm_eps=1e-2)),
    "qwen3": ("Qwen3Config", dict(tie_word_embeddings=True, head_dim=48)),
    "qwen3-untied": ("Qwen3Config", dict(tie_word_embeddings=False, head_dim=48)),
    "qwen3moe": (
        "Qwen3MoeConfig",
        dict(
            tie_word_embeddings=False, head_dim=48, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96,
            norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        ),
    ),
    "mixtral": (
        "MixtralConfig", dict(tie_word_embeddings=False, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    ),
}  # fmt: skip
"""Name to (transformers config class, what differs from SHARED)."""


def make_model(case: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """A random fp32 model of `case` in `folder`, with norms and biases away from 1 and 0 so that a wrong mapping shows."""
    return _make("AutoModelForCausalLM", case, folder, seed, overrides)


def make_classifier(case: str, folder: Path, seed: int = 0) -> Path:
    """A random reward model: the same backbone with one score a token."""
    return _make("AutoModelForSequenceClassification", case, folder, seed, {"num_labels": 1})


def _make(kind: str, case: str, folder: Path, seed: int, overrides: dict[str, Any]) -> Path:
    import torch
    import transformers

    config_class, different = CASES[case]
    config = getattr(transformers, config_class)(**{**SHARED, **different, **overrides})
    torch.manual_seed(seed)
    model = getattr(transformers, kind).from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


def write_byte_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with an end token (0) and a padding token (1), and a small chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<end>", "<pad>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    fast.save_pretrained(folder)
