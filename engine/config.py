"""Configuration of the engine: model, layout, optimizer, generation. Importable without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.layout import Layout

DEFAULT_CONTEXT = 8192
"""Longest context when the configuration names none and the model would allow more (the KV cache must hold one)."""


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


class ReferenceConfig(Part):
    """The frozen policy that a KL penalty compares with; loaded only if there is such a penalty."""

    model: ModelConfig | None = Field(
        None, title="Model", description="Same vocabulary as the actor's. Default: the model that the run starts from."
    )


class ParallelConfig(Part):
    """How the model is divided over the pool's devices for training; generation has its own sizes."""

    tensor_parallel_size: int = Field(
        1, ge=1, title="Tensor parallel size", description="Devices that share one layer."
    )
    pipeline_parallel_size: int = Field(
        1, ge=1, title="Pipeline parallel size", description="Stages that share the layers."
    )
    data_parallel_size: int = Field(1, ge=1, title="Data parallel size", description="Replicas of the model.")
    expert_parallel_size: int = Field(
        1, ge=1, title="Expert parallel size", description="Devices of a stage that share the experts of a layer."
    )
    expert_tensor_parallel_size: int | None = Field(
        None,
        ge=1,
        title="Expert tensor parallel size",
        description="Devices that share one expert. Default: 1 with expert parallelism, else the tensor parallel size.",
    )
    virtual_pipeline_size: int = Field(
        1, ge=1, title="Virtual pipeline size", description="Chunks of layers a stage: smaller bubbles, more messages."
    )
    pipeline_layers: list[int] | None = Field(
        None,
        title="Layers of each pipeline chunk",
        description="In model order, pipeline x virtual pipeline numbers. Default: as even as possible.",
    )
    sequence_parallel: bool = Field(
        False, title="Sequence parallel", description="Divide norms and residuals over the tensor parallel devices too."
    )

    @property
    def world_size(self) -> int:
        """Devices in all."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def layout(self) -> Layout:
        """The sizes as the engine takes them."""
        return Layout(
            tp=self.tensor_parallel_size,
            pp=self.pipeline_parallel_size,
            dp=self.data_parallel_size,
            ep=self.expert_parallel_size,
            etp=self.expert_tensor_parallel_size,
            vpp=self.virtual_pipeline_size,
            stage_layers=None if self.pipeline_layers is None else tuple(self.pipeline_layers),
        )


class GroupConfig(Part):
    """Devices of their own for some of the models beside the actor, in a layout of their own."""

    roles: list[Literal["reference", "critic"]] = Field(min_length=1, title="Models")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)


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


class CriticConfig(Part):
    """The model that predicts returns; loaded only if the advantage estimator needs one."""

    model: ModelConfig | None = Field(
        None,
        title="Model",
        description="A language model or a classifier with one label, same vocabulary. Default: the model of the run.",
    )
    optimizer: OptimizerConfig = Field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    value_clip: float | None = Field(
        0.2,
        gt=0,
        title="Clip of values",
        description="Predictions are held this near to those before the update; unset is off.",
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
    tensor_parallel_size: int | None = Field(
        None, ge=1, title="Tensor parallel size", description="Devices that share one layer. Default: as in training."
    )
    pipeline_parallel_size: int = Field(
        1, ge=1, title="Pipeline parallel size", description="Stages that share the layers."
    )
    expert_parallel: bool = Field(
        False, title="Expert parallel", description="Whole experts on each device instead of a slice of every expert."
    )
    memory_fraction: float = Field(
        0.5, gt=0, lt=1, title="GPU memory share", description="Of a GPU for weights and KV cache together (CUDA only)."
    )
    offload_optimizer: Literal["auto", "always", "never"] = Field(
        "auto",
        title="Optimizer in host memory",
        description="While generating. auto: when the KV cache would not fit beside the optimizer state (CUDA only).",
    )
    kv_cache_gib: float = Field(1.0, gt=0, title="KV cache on CPU", description="GiB a rank (CPU only).")
    cuda_graphs: bool = Field(
        True, title="CUDA graphs", description="Off saves start time and costs speed (CUDA only)."
    )

    def context(self, max_positions: int) -> int:
        """Longest prompt + response in tokens, for a model that was made for `max_positions`."""
        return self.max_model_len or min(max_positions, DEFAULT_CONTEXT)

    def layout(self, parallel: ParallelConfig) -> Layout:
        """The generation sizes on the same devices; raises ValueError if these cannot be divided so."""
        tp = self.tensor_parallel_size or parallel.tensor_parallel_size
        replicas, left = divmod(parallel.world_size, tp * self.pipeline_parallel_size)
        if left:
            raise ValueError(
                f"generation.tensor_parallel_size {tp} x generation.pipeline_parallel_size {self.pipeline_parallel_size}"
                f" does not divide the {parallel.world_size} devices of training"
            )
        return Layout(tp=tp, pp=self.pipeline_parallel_size, dp=replicas, ep=tp if self.expert_parallel else 1)
