"""A core attention for MLA without Transformer Engine: torch's scaled_dot_product_attention, causal.

Megatron's local DotProductAttention knows one head size; MLA's values have another than its keys. What this
class does not do it refuses by name: nothing is left out in silence.

Legend: S sequence, B batch, N heads here, D size of a head of queries and keys, V of values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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

    attend: Callable[..., torch.Tensor] = staticmethod(torch.nn.functional.scaled_dot_product_attention)

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
            out = self.attend(
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                dropout_p=dropout,
                is_causal=True,
                scale=self.scale,
            )
        return out.permute(2, 0, 1, 3).flatten(2)


@contextmanager
def _deterministic() -> Iterator[None]:
    """torch's deterministic algorithms meanwhile, not warn_only; then as before."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


class _Deterministic(torch.autograd.Function):
    """scaled_dot_product_attention whose gradients repeat bit for bit.

    On a GPU its fused kernels add up gradients in no fixed order. Under torch's deterministic algorithms
    flash and memory-efficient attention add in a fixed one and cuDNN's is not chosen, but none of that with
    warn_only. So they are set strictly in forward, which chooses the kernel, and in backward, and only there:
    a whole training would end at the first operator that has no such algorithm. The math back end needs no
    setting but S*S scores a head in fp32: 2 GiB a tensor at S = 4096 and 32 heads in the batch.
    """

    @staticmethod
    def forward(ctx: Any, settings: dict[str, Any], *tensors: torch.Tensor) -> torch.Tensor:
        query, key, value = inputs = [t.detach().requires_grad_() for t in tensors]
        with torch.enable_grad(), _deterministic():
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value, **settings)
        ctx.graph = out, inputs
        return out.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.graph is None:
            raise RuntimeError("deterministic attention: second backward, and the first has freed its graph")
        out, inputs = ctx.graph
        ctx.graph = None  # as saved tensors: gone once they are used
        with _deterministic():
            return None, *torch.autograd.grad(out, inputs, grads)


class DeterministicSdpaCoreAttention(SdpaCoreAttention):
    """The same bits in every run, forward and backward."""

    @staticmethod
    def attend(*tensors: torch.Tensor, **settings: Any) -> torch.Tensor:
        return _Deterministic.apply(settings, *tensors)


def _refuse(*problems: Problem) -> None:
    if problems:
        raise ConfigError(problems, where=WHERE)


def serve_mla(
    config: Any, block_spec: Any, mtp_spec: Any = None, always: bool = False, deterministic: bool = False
) -> bool:
    """Put SdpaCoreAttention into the specs' layers where Megatron's own cannot serve MLA; whether it did.

    always: in place of any other core attention too, Transformer Engine's for instance. deterministic: the
    one whose gradients repeat bit for bit.
    """
    able = "k_channels" in inspect.signature(DotProductAttention).parameters
    if not config.multi_latent_attention or (able and not always):
        return False
    layers = list(block_spec.layer_specs)
    if mtp_spec is not None:
        layers += [layer.submodules.mtp_model_layer for layer in mtp_spec.layer_specs]
    attentions = [layer.submodules.self_attention.submodules for layer in layers]
    ours = DeterministicSdpaCoreAttention if deterministic else SdpaCoreAttention
    replaced = (DotProductAttention, SdpaCoreAttention, DeterministicSdpaCoreAttention)
    served = [a for a in attentions if always or a.core_attention in replaced]
    for attention in served:  # layers may share these
        attention.core_attention = ours
    return bool(served)
