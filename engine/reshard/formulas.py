"""What a transition costs by the HybridFlow paper's Table 2 (arXiv 2409.19256), beside which a plan is shown.

All three are for a dense model that its layouts divide evenly, in bytes a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.layout import Layout


@dataclass(frozen=True)
class Cost:
    """Bytes a GPU: received in the transition, parameters at the peak, and parameters held twice."""

    received: float
    peak: float
    redundant: float


def ds_chat(model_bytes: int, train: Layout, generate: Layout) -> Cost:
    """DeepSpeed-Chat: ZeRO shards over all GPUs, the whole model gathered."""
    share = model_bytes / train.world_size
    return Cost(model_bytes - share, model_bytes, share)


def hybridflow_v(model_bytes: int, train: Layout, generate: Layout) -> Cost:
    """HybridFlow with consecutive generation groups: the whole model gathered inside a model replica."""
    share = model_bytes / (train.tp * train.pp)
    return Cost(model_bytes - share, model_bytes, share)


def hybridflow(model_bytes: int, train: Layout, generate: Layout) -> Cost | None:
    """HybridFlow's interval groups; None where its premise fails (generation sizes must divide the training sizes)."""
    if train.tp % generate.tp or train.pp % generate.pp:
        return None
    before, after = model_bytes / (train.tp * train.pp), model_bytes / (generate.tp * generate.pp)
    return Cost(after - before, after, 0.0)


FORMULAS = {"DS-Chat": ds_chat, "HybridFlow-V": hybridflow_v, "HybridFlow": hybridflow}
