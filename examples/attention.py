"""A core attention for MLA without Transformer Engine: torch's scaled_dot_product_attention, causal.

Megatron's local DotProductAttention knows one head size; MLA's values have another than its keys. What this
class does not do it refuses by name: nothing is left out in silence.

Legend: S sequence, B batch, N heads here, D size of a head of queries and keys, V of values.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule

from megatron_mok.errors import ConfigError, Problem

WHERE = "MLA on scaled_dot_product_attention"
TE = "use Transformer Engine (--transformer-impl transformer_engine)"


class SdpaCoreAttention(MegatronModule):
    """q [S, B, N, D], k [S, B, N, D], v [S, B, N, V] -> [S, B, N*V]; causal, with Megatron's dropout.

    ConfigError, listing every offender, for settings (here) or arguments (forward) that it does not honour.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,  # head sizes, which the tensors tell, and groups, which it does not need
    ) -> None:
        super().__init__(config=config)
        settings = (  # what it is, what it must be, what to do
            ("attn_mask_type", attn_mask_type, AttnMaskType.causal, TE),
            ("attention_type", attention_type, "self", TE),
            ("context_parallel_size", config.context_parallel_size, 1, TE),
            ("window_size", config.window_size, None, f"leave --window-size out, or {TE}"),
            ("softmax_type", getattr(config, "softmax_type", "vanilla"), "vanilla", TE),
            ("qk_clip", getattr(config, "qk_clip", False), False, TE),
            ("log_max_attention_logit", getattr(config, "log_max_attention_logit", False), False, TE),
        )
        _refuse(*(Problem(name, got, str(need), do) for name, got, need, do in settings if got != need))
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        no_mask = "drop --reset-attention-mask and pass --no-create-attention-mask-in-dataloader"
        arguments = (
            ("attention_mask", attention_mask, f"{no_mask}, or {TE}"),
            ("attention_bias", attention_bias, TE),
            ("packed_seq_params", packed_seq_params, TE),
        )
        given = ((name, type(got).__name__, do) for name, got, do in arguments if got is not None)
        found = [Problem(name, got, "None", do) for name, got, do in given]
        if attn_mask_type not in (None, AttnMaskType.causal):
            found.append(Problem("attn_mask_type", attn_mask_type, str(AttnMaskType.causal), TE))
        if len(query) != len(key):
            found.append(Problem("keys", len(key), f"as many as queries ({len(query)})", TE))
        _refuse(*found)

        dropout = self.dropout if self.training else 0.0
        # As in DotProductAttention: heads are split over tensor-parallel ranks, each draws its own numbers.
        own = dropout > 0 and not self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if own else nullcontext():
            out = torch.nn.functional.scaled_dot_product_attention(
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                dropout_p=dropout,
                is_causal=True,
                scale=self.scale,
            )
        return out.permute(2, 0, 1, 3).flatten(2)


def _refuse(*problems: Problem) -> None:
    if problems:
        raise ConfigError(problems, where=WHERE)


def serve_mla(config: Any, block_spec: Any, mtp_spec: Any = None, always: bool = False) -> bool:
    """Put SdpaCoreAttention into the specs' layers where Megatron's own cannot serve MLA; whether it did.

    always: in place of any other core attention too, Transformer Engine's for instance.
    """
    able = "k_channels" in inspect.signature(DotProductAttention).parameters
    if not config.multi_latent_attention or (able and not always):
        return False
    layers = list(block_spec.layer_specs)
    if mtp_spec is not None:
        layers += [layer.submodules.mtp_model_layer for layer in mtp_spec.layer_specs]
    attentions = [layer.submodules.self_attention.submodules for layer in layers]
    ours = (DotProductAttention, SdpaCoreAttention)
    served = [a for a in attentions if always or a.core_attention in ours]
    for attention in served:  # layers may share these
        attention.core_attention = SdpaCoreAttention
    return bool(served)
