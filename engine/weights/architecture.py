"""What a model is, read from the `config.json` of a Hugging Face folder. Importable without torch.

Everything that changes a logit is either carried over or refused here: a field that we would silently ignore is a wrong model.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.layout import Layout, padded_vocabulary
from engine.weights.families import FAMILIES, Family
from engine.weights.lora import LoRA, target_problems, targets_of


class UnsupportedModel(ValueError):
    """The model's file asks for something that the engine cannot reproduce exactly."""


_MUST_BE = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False, None),
    "attention_bias": (False, None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, 1.0, None),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "attention_dropout": (0, 0.0, None),
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
}
"""Fields whose other values the engine does not implement."""


_NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
"""Sizes without which nothing can be built."""

_NEEDED_BY_EXPERTS = {
    "qwen3_moe": ("num_experts_per_tok", "num_experts", "moe_intermediate_size"),
    "mixtral": ("num_experts_per_tok", "num_local_experts"),
}

_SECOND_NAMES = {"num_experts": "num_local_experts"}
"""Names under which transformers 5 saves a field that older files have under the first."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: the base and, where the model says so, linear or llama3 scaling."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """Angles per position of the head_dim / 2 pairs, scaling applied (Llama 3.1 model card for `llama3`)."""
        plain = [self.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        if self.kind == "linear":
            return [frequency / self.factor for frequency in plain]
        if self.kind == "llama3":
            return [self._llama3(frequency) for frequency in plain]
        return plain

    def _llama3(self, frequency: float) -> float:
        wavelength = 2 * math.pi / frequency
        if wavelength < self.original_max_position / self.high_freq_factor:
            return frequency
        if wavelength > self.original_max_position / self.low_freq_factor:
            return frequency / self.factor
        span = self.high_freq_factor - self.low_freq_factor
        smooth = (self.original_max_position / wavelength - self.low_freq_factor) / span
        return (1 - smooth) * frequency / self.factor + smooth * frequency


@dataclass(frozen=True)
class Architecture:
    """Sizes and switches of one decoder-only model.

    Attributes:
        labels: numbers a token that a score head gives instead of the vocabulary's logits (critic, reward model); 0: none.
        lora: adapters on its linear layers, which are then all that is trained; None: there are none.
    """

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied_embeddings: bool
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    normalise_top_k: bool = True
    labels: int = 0
    lora: LoRA | None = None

    def with_adapters(self, rank: int, alpha: float, targets: Sequence[str] | None = None) -> Architecture:
        """The same model with adapters on the layers named (None: all that can have them).

        Raises:
            UnsupportedModel: a layer that is not there, or cannot have adapters.
        """
        wanted = targets_of(self.family) if targets is None else targets
        if problems := target_problems(self.family, wanted):
            raise UnsupportedModel("; ".join(problems))
        in_order = tuple(name for name in targets_of(self.family) if name in wanted)
        return dataclasses.replace(self, lora=LoRA(rank, alpha, in_order))

    @property
    def base(self) -> Architecture:
        """The same model without adapters."""
        return dataclasses.replace(self, lora=None)

    def with_score_head(self, labels: int = 1) -> Architecture:
        """The same backbone with a score head in place of the language model's head."""
        return dataclasses.replace(self, labels=labels, tied_embeddings=False)

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def sizes(self) -> dict[str, int]:
        """The dimensions that the families' tables name."""
        return {
            "hidden": self.hidden,
            "query": self.heads * self.head_dim,
            "key_value": self.kv_heads * self.head_dim,
            "head": self.head_dim,
            "intermediate": self.intermediate,
            "vocabulary": self.vocabulary,
            "experts": self.experts,
            "expert_intermediate": self.expert_intermediate,
            "labels": self.labels,
            "rank": self.lora.rank if self.lora else 0,
        }

    def training_problems(self, layout: Layout, sequence_parallel: bool = False) -> list[str]:
        """Why this model cannot be trained in that layout; empty when it can."""
        problems = self.layout_problems(layout, copies_of_heads=False)
        if sequence_parallel and layout.tp == 1:
            problems.append("sequence_parallel needs tensor_parallel_size > 1")
        if self.experts and layout.tp > 1 and not sequence_parallel:
            problems.append("a mixture of experts with tensor_parallel_size > 1 needs sequence_parallel")
        return problems

    def layout_problems(self, layout: Layout, copies_of_heads: bool = True) -> list[str]:
        """Why this model cannot be divided so; empty when it can.

        Args:
            copies_of_heads: a multiple of the key and value heads will do, as in generation; training does not replicate them.
        """
        problems = layout.problems(self.layers)
        dense = {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "the padded vocabulary": padded_vocabulary(self.vocabulary),
        } | ({} if self.experts else {"intermediate_size": self.intermediate})
        if copies_of_heads and layout.tp % self.kv_heads == 0:
            del dense["num_key_value_heads"]
        problems += self._undivided("tensor_parallel_size", layout.tp, dense)
        if self.experts:
            sizes = {"the experts' intermediate size": self.expert_intermediate}
            problems += self._undivided("expert_tensor_parallel_size", layout.expert_tp, sizes)
            problems += self._undivided("expert_parallel_size", layout.ep, {"experts": self.experts})
        elif layout.ep > 1:
            problems.append(
                f"expert_parallel_size {layout.ep} needs a mixture of experts, which {self.model_type} is not"
            )
        return problems

    def _undivided(self, setting: str, parts: int, sizes: dict[str, int]) -> list[str]:
        left = [f"{name} {size}" for name, size in sizes.items() if size % parts]
        return [f"{setting} {parts} does not divide {', '.join(left)} of {self.model_type}"] if left else []


def read_architecture(folder: str | Path) -> Architecture:
    """Read and check `folder/config.json`.

    Raises:
        FileNotFoundError: no such folder or no config.json in it.
        UnsupportedModel: another family, or a feature that the engine does not reproduce; all reasons in one message.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"no model at {folder}: {path.name} is missing; give a Hugging Face folder with safetensors"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not JSON: {error}") from error
    return architecture_of(config, str(folder))


def architecture_of(config: dict[str, Any], where: str = "the model") -> Architecture:
    """Architecture of an already parsed config.json; raises UnsupportedModel."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise UnsupportedModel(
            f"{where}: model_type {model_type!r} is not supported (supported: {', '.join(FAMILIES)})"
        )
    problems = [
        f"{field}={config[field]!r}"
        for field, allowed in _MUST_BE.items()
        if field in config and config[field] not in allowed
    ]
    if any(kind != "full_attention" for kind in config.get("layer_types") or []):
        problems.append("layer_types other than full_attention")
    if model_type == "mixtral" and config.get("sliding_window") is not None:  # qwen has the field beside its own switch
        problems.append(f"sliding_window={config['sliding_window']!r}")
    needed = _NEEDED + _NEEDED_BY_EXPERTS.get(model_type, ())
    missing = [
        field
        for field in needed
        if not isinstance(config.get(field), int) and not isinstance(config.get(_SECOND_NAMES.get(field, field)), int)
    ]
    if missing:
        raise UnsupportedModel(f"{where}: config.json does not give {', '.join(missing)}")
    rope, rope_problem = _read_rope(config)
    if rope_problem:
        problems.append(rope_problem)
    if problems:
        raise UnsupportedModel(f"{where}: not supported for {model_type}: {'; '.join(problems)}")
    return _build(model_type, config, rope)


def _build(model_type: str, config: dict[str, Any], rope: Rope) -> Architecture:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    labels = _labels(config)
    family = FAMILIES[model_type]
    experts = (config.get("num_experts") or config.get("num_local_experts") or 0) if family.experts else 0
    return Architecture(
        model_type=model_type,
        layers=config["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or (128 if model_type == "qwen3" else hidden // heads),
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        max_positions=config.get("max_position_embeddings", 2048),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=rope,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)) and not labels,
        labels=labels,
        experts=experts,
        experts_per_token=config["num_experts_per_tok"] if experts else 0,
        expert_intermediate=config.get("moe_intermediate_size") or config["intermediate_size"] if experts else 0,
        normalise_top_k=family.always_normalises_top_k or bool(config.get("norm_topk_prob", False)),
    )


def _labels(config: dict[str, Any]) -> int:
    """Labels of a sequence classifier; 0 for a language model."""
    if not any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or []):
        return 0
    return len(config.get("id2label") or {}) or config.get("num_labels") or 2  # transformers' default is two


def _read_rope(config: dict[str, Any]) -> tuple[Rope, str | None]:
    """Rope of old (`rope_theta`, `rope_scaling`) and new (`rope_parameters`) files, or why it is not supported."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if kind not in ("default", "linear", "llama3"):
        return Rope(theta), f"rope scaling {kind!r} (supported: default, linear, llama3)"
    return Rope(
        theta=theta,
        kind=kind,
        factor=float(parameters.get("factor", 1.0)),
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
        original_max_position=int(parameters.get("original_max_position_embeddings", 8192)),
    ), None
