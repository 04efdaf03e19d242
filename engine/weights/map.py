"""The weight map: for every parameter, its names in Hugging Face, Megatron and vLLM, and how it is divided.

The single source for loading, export, binding vLLM to Megatron's memory, and checkpoints. Importable without torch.
Adding a family means adding rows here (and its switches to `architecture.FAMILIES`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.layout import padded_vocabulary
from engine.weights.architecture import Architecture

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """One Hugging Face tensor (its whole, undivided shape)."""

    name: str
    shape: Shape


@dataclass(frozen=True)
class Weight:
    """One Megatron parameter, which is one vLLM parameter, made of one or more Hugging Face tensors.

    Attributes:
        megatron: the parameter's name in the Megatron model.
        vllm: every name under which vLLM's model lists it (tied heads have two).
        pieces: Hugging Face tensors in fusion order along `axis`; with `stacked`, one row of pieces an expert.
        axis: the pieces' axis that is divided over tensor parallel ranks, each piece by itself; None: every rank has it whole.
        vocabulary: rows are token ids, padded with zeros to a multiple of 64 before they are divided.
    """

    megatron: str
    vllm: tuple[str, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    axis: int | None = None
    stacked: bool = False
    vocabulary: bool = False

    def all_pieces(self) -> Iterator[Piece]:
        for row in self.pieces:
            yield from row

    def shard_shape(self, tp: int) -> Shape:
        """Shape of the parameter on one of `tp` tensor parallel ranks."""
        row = self.pieces[0]
        shape = list(row[0].shape)
        if self.vocabulary:
            shape[0] = padded_vocabulary(shape[0])
        if self.axis is not None:
            whole = shape[self.axis] if self.vocabulary else sum(piece.shape[self.axis] for piece in row)
            shape[self.axis] = whole // tp
        return (len(self.pieces), *shape) if self.stacked else tuple(shape)

    def piece_range(self, piece: Piece, tp: int, tp_rank: int) -> tuple[int, int]:
        """Start and stop of a piece's slice along `axis` that the rank holds (stop is cut at the real vocabulary)."""
        assert self.axis is not None
        size = piece.shape[self.axis]
        share = (padded_vocabulary(size) if self.vocabulary else size) // tp
        return min(size, tp_rank * share), min(size, (tp_rank + 1) * share)


def weight_map(arch: Architecture) -> tuple[Weight, ...]:
    """All parameters of a model, in the order of its layers."""
    embedding = Piece("model.embed_tokens.weight", (arch.vocabulary, arch.hidden))
    head = Piece("lm_head.weight", (arch.vocabulary, arch.hidden))
    names = ("model.embed_tokens.weight", "lm_head.weight") if arch.tied_embeddings else ("model.embed_tokens.weight",)
    weights = [Weight("embedding.word_embeddings.weight", names, ((embedding,),), axis=0, vocabulary=True)]
    for layer in range(arch.layers):
        weights += _attention(arch, layer)
        weights += _experts(arch, layer) if arch.family.experts else _mlp(arch, layer)
    weights.append(_whole("decoder.final_layernorm.weight", "model.norm.weight", arch.hidden))
    if not arch.tied_embeddings:
        weights.append(Weight("output_layer.weight", ("lm_head.weight",), ((head,),), axis=0, vocabulary=True))
    return tuple(weights)


def _whole(megatron: str, name: str, size: int) -> Weight:
    """A vector that every tensor parallel rank holds whole (norms), named alike in Hugging Face and vLLM."""
    return Weight(megatron, (name,), ((Piece(name, (size,)),),))


def _attention(arch: Architecture, layer: int) -> list[Weight]:
    ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    rows = {"q_proj": q, "k_proj": kv, "v_proj": kv}

    def qkv(kind: str, tail: Shape) -> Weight:
        pieces = tuple(Piece(f"{theirs}self_attn.{name}.{kind}", (size, *tail)) for name, size in rows.items())
        return Weight(
            f"{ours}self_attention.linear_qkv.{kind}", (f"{theirs}self_attn.qkv_proj.{kind}",), (pieces,), axis=0
        )

    output = f"{theirs}self_attn.o_proj.weight"
    weights = [
        _whole(f"{ours}input_layernorm.weight", f"{theirs}input_layernorm.weight", arch.hidden),
        qkv("weight", (arch.hidden,)),
        Weight(f"{ours}self_attention.linear_proj.weight", (output,), ((Piece(output, (arch.hidden, q)),),), axis=1),
    ]
    if arch.family.qkv_bias:
        weights.append(qkv("bias", ()))
    if arch.family.qk_norm:
        weights += [
            _whole(f"{ours}self_attention.{x}_layernorm.weight", f"{theirs}self_attn.{x}_norm.weight", arch.head_dim)
            for x in "qk"
        ]
    return weights


def _mlp(arch: Architecture, layer: int) -> list[Weight]:
    ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    gate_up = tuple(Piece(f"{theirs}mlp.{x}_proj.weight", (arch.intermediate, arch.hidden)) for x in ("gate", "up"))
    down = f"{theirs}mlp.down_proj.weight"
    return [
        _whole(f"{ours}pre_mlp_layernorm.weight", f"{theirs}post_attention_layernorm.weight", arch.hidden),
        Weight(f"{ours}mlp.linear_fc1.weight", (f"{theirs}mlp.gate_up_proj.weight",), (gate_up,), axis=0),
        Weight(f"{ours}mlp.linear_fc2.weight", (down,), ((Piece(down, (arch.hidden, arch.intermediate)),),), axis=1),
    ]


def _experts(arch: Architecture, layer: int) -> list[Weight]:
    """Router and stacked expert matrices: w13 [experts, 2 * intermediate / tp, hidden], w2 [experts, hidden, intermediate / tp]."""
    ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}.mlp."
    wide, narrow = (arch.expert_intermediate, arch.hidden), (arch.hidden, arch.expert_intermediate)
    experts = [f"{theirs}experts.{expert}." for expert in range(arch.experts)]
    w13 = tuple(tuple(Piece(f"{e}{x}_proj.weight", wide) for x in ("gate", "up")) for e in experts)
    w2 = tuple((Piece(f"{e}down_proj.weight", narrow),) for e in experts)
    router = Piece(f"{theirs}gate.weight", (arch.experts, arch.hidden))

    def stacked(name: str) -> tuple[str, ...]:  # vLLM moved them one module down in 0.3x
        return (f"{theirs}experts.routed_experts.{name}", f"{theirs}experts.{name}")

    return [
        _whole(f"{ours}pre_mlp_layernorm.weight", f"model.layers.{layer}.post_attention_layernorm.weight", arch.hidden),
        Weight(f"{ours}mlp.router.weight", (f"{theirs}gate.weight", f"{theirs}experts.gate.weight"), ((router,),)),
        Weight(f"{ours}mlp.experts.w13", stacked("w13_weight"), w13, axis=0, stacked=True),
        Weight(f"{ours}mlp.experts.w2", stacked("w2_weight"), w2, axis=1, stacked=True),
    ]
