"""Activations between the two expert GEMMs, with Megatron-Core's formulas, and their derivatives.

h is the output of the first GEMM: [M, 2I] with the gate columns first, then the up columns, or [M, I] for
`squared_relu`, which has no gate. A limit clamps gate to <= limit and up to [-limit, limit] before anything
else.
"""

from __future__ import annotations

import math
from enum import IntEnum

import torch
from torch import Tensor


class Activation(IntEnum):
    """Numbers that the operator and the kernels use; names in lower case are those that users write."""

    SWIGLU = 0  # silu(gate) * up
    GEGLU = 1  # gelu(gate) * up, gelu with the error function
    QUICK_GEGLU = 2  # gate * sigmoid(1.702 * gate) * up
    SQUARED_RELU = 3  # relu(h) ** 2

    @property
    def gated(self) -> bool:
        return self is not Activation.SQUARED_RELU

    def fc1_rows(self, ffn: int) -> int:
        """Rows of W1 (columns of h) for an intermediate size `ffn`."""
        return 2 * ffn if self.gated else ffn


NAMES = tuple(a.name.lower() for a in Activation)
NO_LIMIT = 0.0  # the operator's act_limit where nothing is clamped


def from_name(name: str) -> Activation:
    """ValueError, with the names there are, for another name."""
    if name not in NAMES:
        raise ValueError(f"activation: got {name!r}, need one of {NAMES}")
    return Activation[name.upper()]


def _value_and_slope(kind: Activation, g: Tensor) -> tuple[Tensor, Tensor]:
    """The scalar function at g and its derivative there."""
    if kind is Activation.SWIGLU:
        s = torch.sigmoid(g)
        return torch.nn.functional.silu(g), s * (1 + g * (1 - s))
    if kind is Activation.GEGLU:
        phi = 0.5 * (1 + torch.erf(g * math.sqrt(0.5)))
        return torch.nn.functional.gelu(g), phi + g * torch.exp(-0.5 * g * g) / math.sqrt(2 * math.pi)
    if kind is Activation.QUICK_GEGLU:
        s = torch.sigmoid(1.702 * g)
        return g * s, s * (1 + 1.702 * g * (1 - s))
    r = torch.relu(g)
    return r * r, 2 * r


def _halves(kind: Activation, limit: float, h: Tensor) -> tuple[Tensor, Tensor | None]:
    """Clamped (gate, up), or (h, None) without a gate."""
    if not kind.gated:
        return h, None
    gate, up = h.chunk(2, -1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate, up


def forward(kind: Activation, limit: float, h: Tensor) -> Tensor:
    """[M, I] from h, without the probability, in h's dtype."""
    gate, up = _halves(kind, limit, h)
    value, _ = _value_and_slope(kind, gate)
    return value if up is None else value * up


def backward(kind: Activation, limit: float, h: Tensor, grad: Tensor) -> Tensor:
    """Gradient of h for the gradient `grad` [M, I] of `forward`'s result. Clamped elements get none."""
    gate, up = _halves(kind, limit, h)
    value, slope = _value_and_slope(kind, gate)
    if up is None:
        return grad * slope
    d_gate, d_up = grad * slope * up, grad * value
    if limit > 0:
        raw_gate, raw_up = h.chunk(2, -1)
        d_gate = d_gate.masked_fill(raw_gate > limit, 0)
        d_up = d_up.masked_fill(raw_up.abs() > limit, 0)
    return torch.cat([d_gate, d_up], -1)
