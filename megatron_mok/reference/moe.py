"""Forward and backward of the experts on rows in schedule order. Every rounding point is in docs/numerics.md.

The dtype of x decides: bf16 follows the kernels (products of bf16 values added up in fp32, each result
that leaves a GEMM or the activation rounded once), fp32 and fp64 do the same without rounding.

Symbols: M rows, H hidden, I intermediate size, L experts here, N = 2I (I without a gate); w1 [N, H],
w2 [H, I] of one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from . import activation as act
from .activation import Activation

# operand(t, axis): the values that a GEMM with reduction axis `axis` multiplies for t, in the accumulation
# dtype
Operand = Callable[[Tensor, int], Tensor]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def exact_operand(t: Tensor, axis: int) -> Tensor:
    """Operands as they are: a product of two bf16 values is exact in fp32."""
    return t.to(accumulation_dtype(t.dtype))


def per_expert(weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """One tensor per expert, from such a list or from a list with one stacked tensor [L, ., .]."""
    return weights[0].unbind(0) if len(weights) == 1 and weights[0].dim() == 3 else weights


def _spans(rows: Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) for each expert that has any."""
    start = 0
    for expert, count in enumerate(rows.tolist()):
        if count:
            yield expert, slice(start, start + count)
        start += count


def _first_gemm(x: Tensor, w1: Tensor, operand: Operand) -> Tensor:
    return (operand(x, 1) @ operand(w1, 1).T).to(x.dtype)


def forward(
    x: Tensor,
    p: Tensor,
    rows: Tensor,
    w1: Sequence[Tensor],
    w2: Sequence[Tensor],
    kind: Activation,
    limit: float,
    operand: Operand = exact_operand,
) -> tuple[Tensor, Tensor]:
    """(y [M, H], h [M, N]) of rows x [M, H] with probabilities p [M], `rows` [L] of them per expert."""
    w1, w2 = per_expert(w1), per_expert(w2)
    p = p.to(accumulation_dtype(x.dtype)).unsqueeze(1)
    h, y = x.new_empty(len(x), w1[0].shape[0]), torch.empty_like(x)
    for e, span in _spans(rows):
        h[span] = _first_gemm(x[span], w1[e], operand)
        a = (act.forward(kind, limit, h[span].to(p.dtype)) * p[span]).to(x.dtype)
        y[span] = (operand(a, 1) @ operand(w2[e], 1).T).to(x.dtype)
    return y, h


def backward(
    dy: Tensor,
    x: Tensor,
    p: Tensor,
    rows: Tensor,
    w1: Sequence[Tensor],
    w2: Sequence[Tensor],
    h: Tensor,
    saved: Tensor,
    dw1: Sequence[Tensor],
    dw2: Sequence[Tensor],
    accumulate: bool,
    kind: Activation,
    limit: float,
    operand: Operand = exact_operand,
) -> tuple[Tensor, Tensor]:
    """(dx [M, H], dp [M] in the accumulation dtype) of the same rows, for output gradients dy [M, H].

    h [M, N] holds forward's h where `saved` [M] bool is True. An expert with a row that is not saved is
    recomputed whole: the same GEMM as in forward, so the same bits, which a GEMM of another height need not
    give. dw1 and dw2 (empty: not wanted) get the weight gradients, written or, with `accumulate`, added.
    """
    w1, w2, dw1, dw2 = map(per_expert, (w1, w2, dw1 or [], dw2 or []))
    wide = accumulation_dtype(x.dtype)
    p = p.to(wide).unsqueeze(1)
    dx, dp = torch.empty_like(x), p.new_empty(len(x))
    if not accumulate:
        for grad in (*dw1, *dw2):
            grad.zero_()
    for e, span in _spans(rows):
        h_e = h[span] if bool(saved[span].all()) else _first_gemm(x[span], w1[e], operand)
        h_e = h_e.to(wide)
        a = act.forward(kind, limit, h_e)
        d_a = operand(dy[span], 1) @ operand(w2[e], 0)
        dp[span] = (a * d_a).sum(1)
        dh = act.backward(kind, limit, h_e, d_a * p[span]).to(x.dtype)
        dx[span] = (operand(dh, 1) @ operand(w1[e], 0)).to(x.dtype)
        if dw1:
            _put(dw1[e], operand(dh, 0).T @ operand(x[span], 0), accumulate)
        if dw2:
            _put(dw2[e], operand(dy[span], 0).T @ operand((a * p[span]).to(x.dtype), 0), accumulate)
    return dx, dp


def _put(buffer: Tensor, grad: Tensor, accumulate: bool) -> None:
    """One rounding into the buffer's dtype, after the addition."""
    buffer.copy_(buffer.to(grad.dtype) + grad if accumulate else grad)


def combine(slots: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, K, ...] -> [T, ...]: the sum over k in ascending order, rounded once to `dtype`.

    Starts from +0, so that an absent route, whose slot is 0, adds nothing, not even a sign.
    """
    total = slots.new_zeros(slots.shape[:1] + slots.shape[2:], dtype=accumulation_dtype(slots.dtype))
    for k in range(slots.shape[1]):
        total += slots[:, k]
    return total.to(dtype)
