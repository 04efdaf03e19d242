"""Floating-point operations of a model, for MFU: what its mathematics needs, not what is recomputed. Importable without torch.

Counted as PaLM's appendix B counts (arXiv 2204.02311), with attention over the tokens before only: two operations a multiply-add,
a backward pass is two forward ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.weights.architecture import Architecture

PEAK_TFLOPS = {
    "A100": 312.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H200": 989.0,
    "GH200": 989.0,
    "B200": 2250.0,
    "GB200": 2500.0,
}
"""Dense bf16 rates of the data sheets, by a part of the device's name."""


def forward_flops(arch: Architecture, lengths: Iterable[int]) -> float:
    """Operations of one forward pass over sequences of these lengths."""
    width = arch.heads * arch.head_dim
    attention = 2 * arch.hidden * width + 2 * arch.hidden * arch.kv_heads * arch.head_dim  # q, o; k, v
    if arch.experts:
        feed_forward = 3 * arch.hidden * arch.expert_intermediate * arch.experts_per_token + arch.hidden * arch.experts
    else:
        feed_forward = 3 * arch.hidden * arch.intermediate
    weights = arch.layers * (attention + feed_forward) + arch.hidden * (arch.labels or arch.vocabulary)
    pairs = arch.layers * 2 * width  # multiply-adds of one query with one key, and with its value
    return float(sum(2 * weights * n + 2 * pairs * (n * (n + 1) // 2) for n in lengths))


def peak_flops(device_name: str) -> float | None:
    """Operations a second that a device can do in bf16 at best; None for one that is not known."""
    known = [name for name in PEAK_TFLOPS if name.lower() in device_name.lower()]
    return PEAK_TFLOPS[max(known, key=len)] * 1e12 if known else None
