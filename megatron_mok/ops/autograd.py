"""Autograd of moe_forward, and where the weight gradients go.

Megatron's contract for fused accumulation: a weight that has `main_grad` and the attribute
`grad_added_to_main_grad` gets its gradient added into main_grad, in main_grad's dtype; the attribute is
then True and autograd gets a placeholder of the weight's shape, so that gradient hooks fire. Any other
weight gets an ordinary gradient. Under torch.compile the traced weights do not have these attributes, so it
is always ordinary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .definitions import NEEDS_DP, NEEDS_DX, aborting_backward, moe_backward, ranks_of


def main_grad_of(weight: Tensor) -> Tensor | None:
    """The buffer that the gradient of `weight` is to be added into, or None for an ordinary gradient.

    TypeError where its dtype is neither fp32 nor the weight's, ValueError where its shape is another.
    """
    main = getattr(weight, "main_grad", None)
    if main is None or not hasattr(weight, "grad_added_to_main_grad"):
        return None
    if main.dtype not in (torch.float32, weight.dtype):
        raise TypeError(f"main_grad: got {main.dtype}, need torch.float32 or the weight's {weight.dtype}")
    if main.shape != weight.shape:
        raise ValueError(f"main_grad: got {tuple(main.shape)}, need the weight's {tuple(weight.shape)}")
    return main


def weight_gradient_buffers(
    weights: Sequence[Sequence[Tensor]], needed: Sequence[Sequence[bool]]
) -> tuple[list[list[Tensor]], bool]:
    """(buffers for each list of weights, accumulate), as moe_backward takes them.

    A list of which no weight needs a gradient gets no buffers. As soon as one weight has a main_grad all are
    accumulated, into zeros where there is none.
    """
    wanted = [any(flags) for flags in needed]
    mains = [
        [main_grad_of(w) if need else None for w, need in zip(ws, flags, strict=True)]
        for ws, flags in zip(weights, needed, strict=True)
    ]
    first = next((main for main in chain(*mains) if main is not None), None)

    def buffer(weight: Tensor, main: Tensor | None) -> Tensor:
        if main is not None:
            return main
        if first is not None:
            return torch.zeros_like(weight, dtype=first.dtype, memory_format=torch.contiguous_format)
        return torch.empty_like(weight, memory_format=torch.contiguous_format)

    buffers = [
        [buffer(w, main) for w, main in zip(ws, ms, strict=True)] if want else []
        for ws, ms, want in zip(weights, mains, wanted, strict=True)
    ]
    return buffers, first is not None


def _returned(weight: Tensor, need: bool, buffer: Tensor) -> Tensor | None:
    """What autograd gets for one weight after its buffer was filled."""
    if not need:
        return None
    if main_grad_of(weight) is None:
        return buffer.to(weight.dtype)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, ids, _, w1, w2, *integers = inputs
    _, h, schedule = output
    ctx.mark_non_differentiable(h, schedule)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, ids, h, schedule, *w1, *w2)
    # The same weights once more: their attributes (main_grad) do not survive hooks on saved tensors.
    ctx.weights = (list(w1), list(w2))
    ctx.integers = integers
    ctx.layer = ranks_of(integers[0]).last_layer


def _backward(ctx: Any, dy: Tensor | None, *_: Tensor | None) -> tuple:
    comm, num_experts, max_tokens, num_ranks, save_rows, activation, act_limit = ctx.integers
    need_x, _, need_p, *needed = ctx.needs_input_grad[:5]
    with aborting_backward(comm):
        if save_rows < 0:
            raise RuntimeError(
                "moe_forward ran with save_rows = -1 (no gradient wanted): there is none to give"
            )
        # Without grad mode dy may require grad all the same: pipelines hand over leaves.
        if dy is not None and dy.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                "moe_backward has no gradient of its own: create_graph=True is not supported"
            )
        x, ids, h, schedule, *saved = ctx.saved_tensors
        w1, w2 = saved[: len(ctx.weights[0])], saved[len(ctx.weights[0]) :]
        dy = torch.zeros_like(x) if dy is None else dy.contiguous()
        (dw1, dw2), accumulate = weight_gradient_buffers(ctx.weights, needed)
    ranks_of(comm).layer = ctx.layer
    dx, dp = moe_backward(
        dy, x, ids, w1, w2, h, schedule, dw1, dw2, comm, num_experts, ids.shape[1],
        max_tokens, num_ranks, int(accumulate), NEEDS_DX * need_x | NEEDS_DP * need_p, activation, act_limit,
    )  # fmt: skip
    grads = [
        [_returned(w, need, buffer) for w, need, buffer in zip(ws, flags, buffers, strict=True)]
        if buffers
        else [None] * len(ws)
        for ws, flags, buffers in zip(ctx.weights, needed, (dw1, dw2), strict=True)
    ]
    return (dx if need_x else None, None, dp if need_p else None, *grads, *[None] * len(ctx.integers))


torch.library.register_autograd("megatron_mok::moe_forward", _backward, setup_context=_setup_context)
