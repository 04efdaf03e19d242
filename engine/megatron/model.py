"""The Megatron-core model of an architecture, laid out so that vLLM can use the same memory."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from engine.layout import Layout, padded_vocabulary
from engine.megatron.attention import ConcatenatedQKV, PackedAttention
from engine.megatron.experts import StackedExperts, dispatcher_without_cuda, router_without_transformer_engine
from engine.megatron.logprobs import token_logprobs
from engine.megatron.norm import RMSNorm
from engine.megatron.packing import PackedRow
from engine.weights.architecture import Architecture


class SharedModel(GPTModel):
    """One chunk of a decoder; rope by explicit positions, vocabulary padded as vLLM pads it.

    It returns hidden states: the next chunk takes them, or on the last stage `outputs`. With `arch.labels` it has a score head
    (critic, reward model) in place of the language model's.
    """

    def __init__(self, config: TransformerConfig, arch: Architecture, layout: Layout, pp: int, chunk: int) -> None:
        """Build chunk number `chunk` of pipeline stage `pp`, whose weights stay to be loaded."""
        start, stop = layout.chunks(arch.layers)[chunk * layout.pp + pp]
        super().__init__(
            config,
            layer_spec(config, stop - start),
            vocab_size=padded_vocabulary(arch.vocabulary),
            max_sequence_length=arch.max_positions,
            position_embedding_type="none",  # Megatron's rope hard-codes llama3's constants; ours come from the model
            share_embeddings_and_output_weights=arch.tied_embeddings,
            pre_process=start == 0,
            post_process=stop == arch.layers,
            vp_stage=chunk if layout.vpp > 1 else None,
        )
        if arch.labels and self.post_process:
            del self.output_layer
            self.score_head = _score_head(arch, config)
        self.vocabulary, self.labels = arch.vocabulary, arch.labels
        self.inverse_frequencies = torch.tensor(arch.rope.inverse_frequencies(arch.head_dim), dtype=torch.float32)

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, **kwargs: Any) -> tuple[Any, ...]:
        out = super()._preprocess(input_ids=input_ids, position_ids=position_ids, **kwargs)
        frequencies = self.inverse_frequencies.to(position_ids.device)
        angles = (
            position_ids.t().float()[..., None] * frequencies
        )  # [tokens, 1, head_dim / 2], whole with sequence parallel
        return (out[0], torch.cat((angles, angles), -1)[:, :, None], *out[2:])

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states  # the output layer is applied in chunks, see logprobs.py

    @property
    def output_weight(self) -> Tensor:
        """[padded vocabulary / tp, hidden]."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def outputs(self, hidden: Tensor, row: PackedRow, temperature: float) -> tuple[Tensor, Tensor]:
        """What the role is for, fp32, from the decoder's output.

        Returns:
            log-probabilities and entropies [response tokens] of a row's responses; with a score head the scores at their
            predictions [response tokens(, labels)] and at the sequences' ends [sequences(, labels)].
        """
        if self.labels:
            scores = self._scores(hidden)
            return scores.index_select(0, row.response), scores.index_select(0, row.ends)
        return token_logprobs(
            hidden,
            self.output_weight,
            row.targets,
            row.response,
            vocabulary=self.vocabulary,
            temperature=temperature,
            group=parallel_state.get_tensor_model_parallel_group(),
            sequence_parallel=self.config.sequence_parallel,
        )

    def _scores(self, hidden: Tensor) -> Tensor:
        """[tokens(, labels)] fp32; every tensor parallel rank computes them all."""
        if self.config.sequence_parallel:
            # each rank has the whole gradient of what it gathers: its own part is split off, not summed
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        scores = F.linear(hidden[:, 0], self.score_head.weight).float()
        return scores[:, 0] if self.labels == 1 else scores


def _score_head(arch: Architecture, config: TransformerConfig) -> torch.nn.Linear:
    return torch.nn.Linear(arch.hidden, arch.labels, bias=False, dtype=config.params_dtype)


def layer_spec(config: TransformerConfig, layers: int) -> TransformerBlockSubmodules:
    """Megatron's local spec (no Transformer Engine) with our attention, norms and experts, for a chunk of `layers`."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, normalization="RMSNorm", qk_layernorm=config.qk_layernorm
    )
    layer = spec.submodules
    attention = layer.self_attention
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention.module, attention.submodules.core_attention = ConcatenatedQKV, PackedAttention
    if config.qk_layernorm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = RMSNorm
    if config.num_moe_experts:
        layer.mlp.submodules.experts = StackedExperts
    # The final norm is not part of the layer: without this it would be Megatron's, which refuses sequence parallel.
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=RMSNorm)


def transformer_config(
    arch: Architecture, layout: Layout, sequence_parallel: bool, dtype: torch.dtype
) -> TransformerConfig:
    """Megatron's configuration of an architecture; gradients are sums over ranks, the loss carries its own divisor."""
    return TransformerConfig(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.intermediate,
        qk_layernorm=arch.family.qk_norm,
        add_qkv_bias=arch.family.qkv_bias,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
        **_pipeline_settings(arch, layout, dtype),
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **_expert_settings(arch, layout),
    )


def _pipeline_settings(arch: Architecture, layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
    if layout.pp == 1:
        return {}
    chunks = [["decoder"] * (stop - start) for start, stop in layout.chunks(arch.layers)]
    interleaved = layout.vpp > 1
    return dict(
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if interleaved else None,
        pipeline_model_parallel_layout=[["embedding", *chunks[0]], *chunks[1:-1], [*chunks[-1], "loss"]],
        pipeline_dtype=dtype,
        variable_seq_lengths=True,
        deallocate_pipeline_outputs=True,  # what was sent on is kept for its place in the graph, not for its numbers
        # With two stages, both neighbours of a stage are the same rank: activations and gradients that go to it in one
        # batch could not be told apart. Sent each by itself they can, and that is what overlapping does.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
    )


def _expert_settings(arch: Architecture, layout: Layout) -> dict[str, Any]:
    if not arch.experts:
        return dict(moe_token_dispatcher_type="alltoall")  # a pipeline is refused with the default, experts or not
    router_without_transformer_engine()
    # "allgather" needs equally many tokens on all ranks that share experts: only tensor parallel ranks have that, and
    # Megatron refuses it where rows differ in length over a pipeline.
    gathered = layout.ep == 1 and layout.expert_tp <= layout.tp and layout.pp == 1
    return dict(
        num_moe_experts=arch.experts,
        moe_router_topk=arch.experts_per_token,
        moe_ffn_hidden_size=arch.expert_intermediate,
        moe_token_dispatcher_type="allgather" if gathered else "alltoall",
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        # softmax over the chosen k is the renormalised softmax over all
        moe_router_pre_softmax=not arch.normalise_top_k,
    )


_initialised: Layout | None = None
"""The layout of Megatron's process groups, which are global."""


def initialise_parallel_state(layout: Layout, device: str) -> None:
    """Megatron's process groups for `layout`, over an initialised `torch.distributed`; models of one layout share them."""
    global _initialised
    if parallel_state.model_parallel_is_initialized():
        if _initialised == layout:
            return
        parallel_state.destroy_model_parallel()
    _initialised = layout
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
    )
    if device == "cpu":
        dispatcher_without_cuda()
        # The embedding forks a CUDA random state under sequence parallel. There is no dropout here: nothing to fork.
        get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    else:
        model_parallel_cuda_manual_seed(1)
