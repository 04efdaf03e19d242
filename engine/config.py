"""Configuration of the engine: model, layout, optimizer, generation. Importable without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Part(BaseModel):
    """Base of every configuration part: unknown keys are errors, never ignored."""

    model_config = ConfigDict(extra="forbid", validate_default=True)


class ModelConfig(Part):
    """Which model is post-trained."""

    path: str = Field(
        title="Model",
        description="Hugging Face folder (safetensors), hub id, GGUF file, or `package:NAME/FILE.gguf` of an installed package.",
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", title="Precision", description="Weights' number format. auto: bfloat16 on GPU, float32 on CPU."
    )


class ParallelConfig(Part):
    """How the model is divided over the pool's devices, for training and for generation alike."""

    tensor_parallel_size: int = Field(
        1, ge=1, title="Tensor parallel size", description="Devices that share one layer."
    )
    data_parallel_size: int = Field(1, ge=1, title="Data parallel size", description="Replicas of the model.")
    sequence_parallel: bool = Field(
        False, title="Sequence parallel", description="Divide norms and residuals over the tensor parallel devices too."
    )

    @property
    def world_size(self) -> int:
        """Devices in all."""
        return self.tensor_parallel_size * self.data_parallel_size


class OptimizerConfig(Part):
    """AdamW and its learning-rate schedule (counted in optimizer steps, not in rollouts)."""

    lr: float = Field(1e-6, gt=0, title="Learning rate")
    beta1: float = Field(0.9, ge=0, lt=1, title="Adam beta 1")
    beta2: float = Field(0.999, ge=0, lt=1, title="Adam beta 2")
    eps: float = Field(1e-8, gt=0, title="Adam epsilon")
    weight_decay: float = Field(
        0.0, ge=0, title="Weight decay", description="Decoupled; on matrices, not on norms and biases."
    )
    clip_grad: float = Field(1.0, ge=0, title="Gradient clip", description="Global L2 norm; 0 is off.")
    warmup_steps: int = Field(0, ge=0, title="Warm-up steps", description="Optimizer steps from 0 to the full rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", title="Schedule after the warm-up")
    decay_steps: int | None = Field(
        None, ge=1, title="Decay steps", description="Optimizer steps in all, needed by linear and cosine."
    )


class GenerationConfig(Part):
    """Sampling and the generation engine's limits."""

    temperature: float = Field(
        1.0, ge=0, title="Temperature", description="Of training rollouts; evaluation has its own."
    )
    top_p: float = Field(1.0, gt=0, le=1, title="Top-p")
    max_response_tokens: int = Field(
        256, ge=1, title="Longest response", description="In tokens, the stop token included."
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        title="Context",
        description="Prompt + response tokens. Default: what the model's file says, at most 8192.",
    )
    samples_per_prompt: int = Field(8, ge=1, title="Samples a prompt")
    max_concurrent_samples: int = Field(256, ge=1, title="Samples generated at once", description="A rank.")
    memory_fraction: float = Field(
        0.5, gt=0, lt=1, title="GPU memory share", description="Of a GPU for weights and KV cache together (CUDA only)."
    )
    kv_cache_gib: float = Field(1.0, gt=0, title="KV cache on CPU", description="GiB a rank (CPU only).")
    cuda_graphs: bool = Field(
        True, title="CUDA graphs", description="Off saves start time and costs speed (CUDA only)."
    )
