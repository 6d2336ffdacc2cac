"""MXFP8: E4M3 data with one E8M0 scale (a power of two) for every 32 elements along the reduction axis.

Rounding follows the OCP Microscaling Formats (MX) specification 1.0, section 6.3: scale = 2^(floor(log2
amax) - 8), elements divided by it, rounded to nearest even and saturated at 448. rule="ceil" is Transformer
Engine's choice instead: the smallest power of two for which nothing saturates. docs/numerics.md says when
decoding to bf16 is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
E4M3_MAX = 448.0  # 1.75 * 2^8
_E4M3_EMAX = 8
_BIAS = 127  # of E8M0; code 255 is NaN
EXACT_IN_BF16 = (-117, 119)  # exponents of scales for which every decoded value is 0 or a normal bf16 number


@dataclass(frozen=True)
class Mxfp8:
    """A quantised tensor.

    data   float8_e4m3fn, the shape of the tensor
    scale  uint8, the same shape but ceil(n / 32) along `axis`: code c is the factor 2^(c - 127)
    axis   the reduction axis, along which blocks run; the last block may be short
    """

    data: Tensor
    scale: Tensor
    axis: int

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values: exact in fp64, in fp32 for scales up to 2^119, in bf16 within EXACT_IN_BF16."""
        code = self.scale.repeat_interleave(BLOCK, self.axis).narrow(self.axis, 0, self.data.shape[self.axis])
        value = self.data.to(torch.float64) * torch.exp2(code.to(torch.float64) - _BIAS)
        return value.masked_fill(code == 255, float("nan")).to(dtype)


def quantise(t: Tensor, axis: int, rule: str = "floor") -> Mxfp8:
    """Blocks of 32 along `axis` of t (bf16 or fp32).

    A block of zeros gets scale code 0. NaN and infinities become NaN (E4M3 has no infinity) and leave the
    scale of their block to its finite elements.
    """
    if rule not in ("floor", "ceil"):
        raise ValueError(f"rule: got {rule!r}, need 'floor' or 'ceil'")
    axis %= t.dim()
    last = t.float().movedim(axis, -1)
    size = last.shape[-1]
    blocks = torch.nn.functional.pad(last, (0, -size % BLOCK)).unflatten(-1, (-1, BLOCK))
    finite = blocks.isfinite()
    amax = blocks.masked_fill(~finite, 0).abs().amax(-1)
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa * 2^exponent, mantissa in [0.5, 1)
    shift = exponent - 1 - _E4M3_EMAX
    if rule == "ceil":
        shift = shift + (mantissa > E4M3_MAX / 2**9).int()
    shift = shift.clamp(-_BIAS, _BIAS).masked_fill(amax == 0, -_BIAS)
    # in fp64, so that the division is exact, and the conversion to E4M3 is the only rounding
    scaled = blocks.double() * torch.exp2(-shift.double()).unsqueeze(-1)
    scaled = scaled.clamp(-E4M3_MAX, E4M3_MAX).masked_fill(~finite, float("nan"))
    data = scaled.float().to(torch.float8_e4m3fn).flatten(-2)[..., :size].movedim(-1, axis)
    return Mxfp8(data, (shift + _BIAS).to(torch.uint8).movedim(-1, axis), axis)


def operand(t: Tensor, axis: int) -> Tensor:
    """What an MXFP8 GEMM with reduction axis `axis` multiplies for t: the values after quantisation, in
    fp32.
    """
    return quantise(t, axis).dequantise()
