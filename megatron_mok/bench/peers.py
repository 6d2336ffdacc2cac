"""Peers that take part in `mok bench --layer` where they are installed: only their public Python API is used.

sonicmoe: SonicMoE (sonic-moe, quack-kernels). deepgemm: DeepGEMM's grouped GEMMs (sgl-deep-gemm) with the
pieces of torch-compiled in between. liger-triton: Liger-Kernel's fused MoE.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_mok.bench.cases import Inputs
from megatron_mok.bench.implementations import Explicit, Implementation, Pieces, Routes


class SonicMoe(Implementation):
    """SonicMoE by moe_general_routing_inputs; its weights hold gate and up rows in turns."""

    name = "sonicmoe"

    def __init__(self, inputs: Inputs):
        self.sonicmoe = importlib.import_module("sonicmoe")
        self.swiglu = importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU
        super().__init__(inputs)
        tokens = torch.arange(inputs.shape.T, device=inputs.x.device, dtype=torch.int32)
        self.tokens = tokens.repeat_interleave(inputs.shape.K)
        self.experts = inputs.ids.reshape(-1).contiguous()

    def weights(self) -> tuple[Tensor, Tensor]:
        E, I2, H = self.inputs.w1.shape
        in_turns = self.inputs.w1.view(E, 2, I2 // 2, H).transpose(1, 2).reshape(E, I2, H)
        return in_turns, self.inputs.w2

    def restore(self, dw1: Tensor) -> Tensor:
        E, I2, H = dw1.shape
        return dw1.view(E, I2 // 2, 2, H).transpose(1, 2).reshape(E, I2, H)

    def layer(self, x, p, w1, w2):
        inference = not torch.is_grad_enabled()
        return self.sonicmoe.moe_general_routing_inputs(
            x, p.reshape(-1), self.tokens, self.experts, w1.permute(1, 2, 0), None, w2.permute(1, 2, 0), None,
            len(w1), 0, self.swiglu, inference,
        )[0]  # fmt: skip


@dataclass(frozen=True)
class PaddedRoutes(Routes):
    """Routes with every expert's rows padded to a multiple of 128; token is T in padding rows.

    layout [M']: expert of each row, -1 in padding. rows: padded rows per expert, on host and device.
    """

    layout: Tensor = field(default_factory=lambda: torch.empty(0))
    rows: list[int] = field(default_factory=list)
    rows_on_device: Tensor = field(default_factory=lambda: torch.empty(0))


class DeepGemms:
    """The six grouped GEMMs by DeepGEMM. Its weight gradients need the padded counts on the host."""

    def __init__(self, inputs: Inputs):
        self.deep_gemm = importlib.import_module("deep_gemm")
        self.made = self._routes(inputs.ids, inputs.shape.E)

    def routes(self, ids: Tensor, num_experts: int) -> PaddedRoutes:
        Routes.of(ids, num_experts)  # the sort is part of every step; the padding is taken ready made
        return self.made

    def _routes(self, ids: Tensor, num_experts: int) -> PaddedRoutes:
        plain = Routes.of(ids, num_experts)
        device, M, T = ids.device, len(plain.order), len(ids)
        counts = torch.bincount(ids.reshape(-1).long(), minlength=num_experts)
        padded = (counts + 127) // 128 * 128
        expert = ids.reshape(-1).long()[plain.order]
        shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
        at = torch.arange(M, device=device) + shift[expert]
        total = int(padded.sum())
        order, token = (
            torch.zeros(total, dtype=torch.long, device=device),
            torch.full((total,), T, device=device),
        )
        layout = torch.full((total,), -1, dtype=torch.int32, device=device)
        order[at], token[at], layout[at] = plain.order, plain.token, expert.int()
        slot = at[plain.slot.reshape(-1)].view(plain.slot.shape)
        valid = None if total == M else token < T
        return PaddedRoutes(order, token, slot, plain.ends, valid, layout, padded.tolist(), padded.int())

    def nt(self, a: Tensor, w: Tensor, routes: PaddedRoutes) -> Tensor:
        out = a.new_empty(len(a), w.shape[1])
        self.deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, w, out, routes.layout)
        return out

    def nn(self, a: Tensor, w: Tensor, routes: PaddedRoutes) -> Tensor:
        out = a.new_empty(len(a), w.shape[2])
        self.deep_gemm.m_grouped_bf16_gemm_nn_contiguous(a, w, out, routes.layout)
        return out

    def weight_gradient(
        self, a: Tensor, b: Tensor, routes: PaddedRoutes, main: Tensor | None
    ) -> Tensor | None:
        # the GEMM only accumulates
        out = a.new_zeros(len(routes.rows), a.shape[1], b.shape[1]) if main is None else main
        self.deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, out, routes.rows, routes.rows_on_device, out)
        return None if main is not None else out


def gather_padded(x: Tensor, token: Tensor) -> Tensor:
    """Rows of x, zeros where token is T."""
    rows = x.index_select(0, token.clamp(max=len(x) - 1))
    return torch.where((token < len(x)).unsqueeze(1), rows, 0)


class DeepGemm(Explicit):
    name = "deepgemm"
    notes = "sort in the time, padded layout ready made; pieces as in torch-compiled"

    def __init__(self, inputs: Inputs):
        torch._dynamo.reset()
        pieces = replace(Pieces(), gather=gather_padded).compiled()
        super().__init__(inputs, DeepGemms(inputs), pieces)


class LigerTriton(Implementation):
    name = "liger-triton"

    def __init__(self, inputs: Inputs):
        self.function = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
        super().__init__(inputs)

    def layer(self, x, p, w1, w2):
        return self.function.apply(x, w1, w2, self.inputs.ids, p)


PEERS = {peer.name: peer for peer in (SonicMoe, DeepGemm, LigerTriton)}
# What each is imported as, and where that comes from.
NEEDS = {
    "sonicmoe": ("sonicmoe", "sonic-moe with quack-kernels"),
    "deepgemm": ("deep_gemm", "sgl-deep-gemm"),
    "liger-triton": ("liger_kernel.ops.fused_moe", "liger-kernel"),
}


def missing(name: str) -> str | None:
    """What a peer lacks here, in a line; None where it imports."""
    module, package = NEEDS[name]
    try:
        importlib.import_module(module)
    except Exception as error:  # a peer that breaks while importing must not break the rest
        reason = (str(error).strip().splitlines() or [""])[0]
        return f"{name}: needs {package}; found: {type(error).__name__}: {reason}"
    return None
