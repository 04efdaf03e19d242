"""One table a model family: every parameter's names in Megatron, vLLM and Hugging Face, its shape, and how it is divided.

Adding a family means adding a table to `FAMILIES`. Importable without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

Dimensions = tuple[str, ...]
"""Names of sizes, see `Architecture.sizes`."""


@dataclass(frozen=True)
class Row:
    """One parameter of a layer (names inside the layer) or of the ends (whole names).

    Attributes:
        megatron: its name in Megatron's layer.
        vllm: every name under which vLLM's layer may list it, by version.
        huggingface: the tensors that make it up, in fusion order along `axis`, each with its dimensions; `{expert}` stands for
            the number of the expert in a stacked parameter.
        axis: the tensors' axis that tensor parallel ranks divide, each tensor by itself; None: every rank has it whole.
        stacked: one row of tensors an expert, stacked in front.
    """

    megatron: str
    vllm: tuple[str, ...]
    huggingface: tuple[tuple[str, Dimensions], ...]
    axis: int | None = None
    stacked: bool = False


def _vector(megatron: str, name: str, size: str) -> Row:
    """A norm: whole on every rank, named alike in vLLM and Hugging Face."""
    return Row(megatron, (name,), ((name, (size,)),))


ATTENTION = (
    _vector("input_layernorm.weight", "input_layernorm.weight", "hidden"),
    Row(
        "self_attention.linear_qkv.weight",
        ("self_attn.qkv_proj.weight",),
        (
            ("self_attn.q_proj.weight", ("query", "hidden")),
            ("self_attn.k_proj.weight", ("key_value", "hidden")),
            ("self_attn.v_proj.weight", ("key_value", "hidden")),
        ),
        axis=0,
    ),
    Row(
        "self_attention.linear_proj.weight",
        ("self_attn.o_proj.weight",),
        (("self_attn.o_proj.weight", ("hidden", "query")),),
        axis=1,
    ),
    _vector("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "hidden"),
)

QKV_BIAS = (
    Row(
        "self_attention.linear_qkv.bias",
        ("self_attn.qkv_proj.bias",),
        (
            ("self_attn.q_proj.bias", ("query",)),
            ("self_attn.k_proj.bias", ("key_value",)),
            ("self_attn.v_proj.bias", ("key_value",)),
        ),
        axis=0,
    ),
)

QK_NORM = (
    _vector("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "head"),
    _vector("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "head"),
)

MLP = (
    Row(
        "mlp.linear_fc1.weight",
        ("mlp.gate_up_proj.weight",),
        (
            ("mlp.gate_proj.weight", ("intermediate", "hidden")),
            ("mlp.up_proj.weight", ("intermediate", "hidden")),
        ),
        axis=0,
    ),
    Row(
        "mlp.linear_fc2.weight",
        ("mlp.down_proj.weight",),
        (("mlp.down_proj.weight", ("hidden", "intermediate")),),
        axis=1,
    ),
)


def _experts(block: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """Router, and the experts stacked: w13 [experts, 2 x intermediate, hidden] and w2 [experts, hidden, intermediate]."""
    wide, narrow = ("expert_intermediate", "hidden"), ("hidden", "expert_intermediate")
    expert = f"{block}.experts.{{expert}}."

    def stacked(name: str) -> tuple[str, ...]:  # vLLM moved them one module down in 0.3x
        return (f"{block}.experts.routed_experts.{name}", f"{block}.experts.{name}")

    router = f"{block}.gate.weight"
    return (
        Row("mlp.router.weight", (router, f"{block}.experts.gate.weight"), ((router, ("experts", "hidden")),)),
        Row(
            "mlp.experts.w13",
            stacked("w13_weight"),
            ((f"{expert}{gate}.weight", wide), (f"{expert}{up}.weight", wide)),
            axis=0,
            stacked=True,
        ),
        Row("mlp.experts.w2", stacked("w2_weight"), ((f"{expert}{down}.weight", narrow),), axis=1, stacked=True),
    )


EMBEDDING = Row(
    "embedding.word_embeddings.weight",
    ("model.embed_tokens.weight",),
    (("model.embed_tokens.weight", ("vocabulary", "hidden")),),
    axis=0,
)
FINAL_NORM = _vector("decoder.final_layernorm.weight", "model.norm.weight", "hidden")
HEAD = Row("output_layer.weight", ("lm_head.weight",), (("lm_head.weight", ("vocabulary", "hidden")),), axis=0)
SCORE = Row("score_head.weight", (), (("score.weight", ("labels", "hidden")),))
"""Of a critic or reward model, in place of the head; small, so whole on every rank."""


@dataclass(frozen=True)
class Family:
    """What distinguishes one supported `model_type`.

    Attributes:
        rows: the parameters of one layer.
        always_normalises_top_k: the router's chosen weights sum to one, whatever the model's file says.
    """

    rows: tuple[Row, ...]
    always_normalises_top_k: bool = False

    @property
    def qkv_bias(self) -> bool:
        return self._has("self_attention.linear_qkv.bias")

    @property
    def qk_norm(self) -> bool:
        return self._has("self_attention.q_layernorm.weight")

    @property
    def experts(self) -> bool:
        return any(row.stacked for row in self.rows)

    def _has(self, name: str) -> bool:
        return any(row.megatron == name for row in self.rows)


FAMILIES: dict[str, Family] = {
    "llama": Family(ATTENTION + MLP),
    "qwen2": Family(ATTENTION + QKV_BIAS + MLP),
    "qwen3": Family(ATTENTION + QK_NORM + MLP),
    "qwen3_moe": Family(ATTENTION + QK_NORM + _experts("mlp", "gate_proj", "up_proj", "down_proj")),
    "mixtral": Family(ATTENTION + _experts("block_sparse_moe", "w1", "w3", "w2"), always_normalises_top_k=True),
}
