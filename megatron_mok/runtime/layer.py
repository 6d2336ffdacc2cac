"""The MoE layer after the router as one differentiable call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..config import MAIN_GRAD
from ..errors import ConfigError, Problem
from ..ops import moe_forward
from ..reference.activation import NO_LIMIT, from_name
from ..reference.schedule import saved_rows
from .check import compare
from .comm import Comm

ID_DTYPES = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
PROB_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def moe(
    x: Tensor,
    ids: Tensor,
    probs: Tensor,
    w1: Sequence[Tensor] | Tensor,
    w2: Sequence[Tensor] | Tensor,
    *,
    comm: Comm,
    num_experts: int,
    activation: str = "swiglu",
    act_limit: float | None = None,
    save_capacity: float | None = None,
    main_grad: str | None = None,
    layer: int = 0,
    observe: Callable[[Tensor, int], None] | None = None,
) -> Tensor:
    """Dispatch, experts and combine: out [T, H] = sum over k of probs[t, k] * expert ids[t, k] at x[t].

    x      [T, H] bf16, fp32 or fp64, any strides; T may differ from rank to rank and may be 0
    ids    [T, K] integers; -1, like any other value outside [0, num_experts), is no route. A token may name
           an expert several times
    probs  [T, K] fp32; other float dtypes are widened once, and their gradient comes back in their dtype
    w1     the local experts' [2I, H] weights (gate rows before up rows; [I, H] for squared_relu), a sequence
           or one stacked tensor
    w2     their [H, I] weights, likewise
    activation     swiglu, geglu, quick_geglu or squared_relu; act_limit clamps the gate from above and up on
                   both sides
    save_capacity  rows of h kept for backward, in units of T * K; None: the configuration's
    main_grad      auto, on or off (see MokConfig); None: the configuration's
    layer          number for error texts and profiles
    observe        called after a forward call that has a backward, with the schedule (docs/schedule.md) and
                   the rows of h saved; not under torch.compile

    Collective over comm's ranks. TypeError or ValueError naming the argument; ConfigError for main_grad="on"
    without one; WorkspaceTooSmall, PeerAbort, PeerTimeout, ProtocolMismatch.
    """

    def prepare() -> tuple:
        return _arguments(
            x, ids, probs, w1, w2, comm, num_experts, activation, act_limit, save_capacity, main_grad
        )

    if torch.compiler.is_compiling():
        return moe_forward(*prepare())[0]
    comm.open()
    comm.set_layer(layer)
    with comm.aborting():
        arguments = prepare()
    traced = _is_traced(x)
    with torch.cuda.nvtx.range(f"mok forward layer {layer}") if traced else contextlib.nullcontext():
        out, h, schedule = moe_forward(*arguments)
    if traced and out.grad_fn is not None:
        _trace_backward(out.grad_fn, layer)
    if observe is not None and schedule.numel():
        observe(schedule, len(h))
    if comm.check.due(layer):
        compare(comm, arguments, out)
    return out


def _is_traced(x: Tensor) -> bool:
    """NVTX ranges, which cost next to nothing without a profiler, mark the calls on a GPU."""
    return x.is_cuda


def _trace_backward(node: Any, layer: int) -> None:
    def enter(_: Any) -> None:
        torch.cuda.nvtx.range_push(f"mok backward layer {layer}")

    def leave(*_: Any) -> None:
        torch.cuda.nvtx.range_pop()

    node.register_prehook(enter)
    node.register_hook(leave)


def _arguments(
    x, ids, probs, w1, w2, comm: Comm, num_experts, activation, act_limit, save_capacity, main_grad
) -> tuple:
    """moe_forward's arguments from moe's."""
    if ids.dtype not in ID_DTYPES:
        raise TypeError(f"moe: ids: got {ids.dtype}, need one of {ID_DTYPES}")
    if probs.dtype not in PROB_DTYPES:
        raise TypeError(f"moe: probs: got {probs.dtype}, need one of {PROB_DTYPES}")
    if (x.dim() == 2 and x.shape[1] != comm.hidden) or x.dtype != comm.dtype or x.device != comm.device:
        raise ValueError(
            f"moe: x: got {tuple(x.shape)} {x.dtype} on {x.device}, need [T, {comm.hidden}] {comm.dtype} on "
            f"{comm.device}, for which the communicator was made"
        )
    if ids.dim() == 2 and ids.shape[1] != comm.top_k:
        raise ValueError(f"moe: ids: got {tuple(ids.shape)}, need [T, {comm.top_k}]")
    if act_limit is not None and not act_limit > 0:
        raise ValueError(f"moe: act_limit: got {act_limit}, need a positive number or None")
    if comm.config.check_every and bool(((ids < -1) | (ids >= num_experts)).any()):
        raise ValueError(f"moe: ids: got values outside [-1, {num_experts}) (checked because of check_every)")
    if ids.dtype == torch.int64:  # before the bits above 32 are lost
        ids = torch.where((ids >= 0) & (ids < num_experts), ids, -1)
    kind = from_name(activation)
    w1, w2 = _weights(w1), _weights(w2)
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in (x, probs, *w1, *w2))
    mode = main_grad or comm.config.main_grad
    w1, w2 = _main_grad(w1, mode, grad), _main_grad(w2, mode, grad)
    capacity = comm.config.save_capacity if save_capacity is None else save_capacity
    save_rows = saved_rows(capacity, x.shape[0], comm.top_k) if grad else -1
    return (
        x.contiguous(),
        ids.to(torch.int32).contiguous(),
        probs.float().contiguous(),
        w1,
        w2,
        comm.handle,
        num_experts,
        comm.max_tokens,
        comm.size,
        save_rows,
        int(kind),
        NO_LIMIT if act_limit is None else float(act_limit),
    )


def _weights(weights: Sequence[Tensor] | Tensor) -> list[Tensor]:
    return [weights] if isinstance(weights, Tensor) else list(weights)


def _main_grad(weights: list[Tensor], mode: str, grad: bool) -> list[Tensor]:
    """The weights as autograd is to see them: it adds into main_grad where Megatron's attributes ask for
    it.
    """
    if mode not in MAIN_GRAD:
        raise ValueError(f"moe: main_grad: got {mode!r}, need one of {MAIN_GRAD}")
    if mode == "off" and grad:
        return [w.view_as(w) for w in weights]  # the same memory without the attributes
    if mode == "on" and grad and not torch.compiler.is_compiling():
        for w in weights:
            if w.requires_grad and getattr(w, "main_grad", None) is None:
                need = "a main_grad on every expert weight that is trained"
                remedy = "wrap the model in Megatron's DistributedDataParallel, or use main_grad='auto'"
                raise ConfigError([Problem("main_grad", "on, without main_grad", need, remedy)], where="moe")
            if w.requires_grad and not hasattr(w, "grad_added_to_main_grad"):
                w.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return weights
