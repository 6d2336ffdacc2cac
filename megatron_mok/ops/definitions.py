"""Schemas, argument checks, and the implementations behind each dispatch key.

Symbols: R ranks, T tokens here, K experts per token, E experts, L = E/R here, H hidden, I intermediate size,
N = 2I (I for an activation without a gate), S rows of h saved.

moe_forward(x [T, H], ids [T, K] int32, probs [T, K] fp32, w1, w2, ...) -> (out [T, H], h [S, N], schedule)
    w1: L tensors [N, H], gate rows before up rows, or one [L, N, H]; w2: L tensors [H, I], or one [L, H, I].
    ids outside [0, E) are no route. comm: handle of a communicator. max_tokens: the largest T that any rank
    may bring. save_rows: S, or -1 where no gradient is wanted (h and schedule come back empty).
    activation: reference.activation.Activation; act_limit: its clamp, 0 for none.

moe_backward(dy [T, H], x, ids, w1, w2, h, schedule, dw1, dw2, ...) -> (dx [T, H], dp [T, K] fp32)
    ids, h, schedule: of the forward call (ids tell the kernels which of this rank's slots no peer fills).
    dw1, dw2: empty where not wanted, else buffers like w1 and w2, in fp32 or the weights' dtype; accumulate=1
    adds into them, 0 writes them (zeros for an expert without rows). needs: 1 for dx, 2 for dp; what is not
    needed comes back without rows.

Both are collective over the communicator's ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module

import torch
from torch import Tensor

from ..errors import LibraryMissing
from ..reference import exchange, layer, schedule
from ..reference.activation import Activation

NEEDS_DX, NEEDS_DP = layer.NEEDS_DX, layer.NEEDS_DP
DTYPES = (torch.bfloat16, torch.float32, torch.float64)

torch.library.define(
    "megatron_mok::moe_forward",
    "(Tensor x, Tensor ids, Tensor probs, Tensor[] w1, Tensor[] w2, int comm, SymInt num_experts, "
    "SymInt max_tokens, int num_ranks, SymInt save_rows, int activation, float act_limit) "
    "-> (Tensor out, Tensor h, Tensor schedule)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "megatron_mok::moe_backward",
    "(Tensor dy, Tensor x, Tensor ids, Tensor[] w1, Tensor[] w2, Tensor h, Tensor schedule, "
    "Tensor(a!)[] dw1, Tensor(b!)[] dw2, int comm, SymInt num_experts, SymInt top_k, SymInt max_tokens, "
    "int num_ranks, int accumulate, int needs, int activation, float act_limit) -> (Tensor dx, Tensor dp)",
    tags=torch.Tag.pt2_compliant_tag,
)
moe_forward = torch.ops.megatron_mok.moe_forward.default
moe_backward = torch.ops.megatron_mok.moe_backward.default


def _need(holds: bool, field: str, got: object, need: str) -> None:
    if not holds:
        raise ValueError(f"moe: {field}: got {got}, need {need}")


def check(
    x: Tensor,
    ids: Tensor,
    probs: Tensor,
    w1: Sequence[Tensor],
    w2: Sequence[Tensor],
    num_experts: int,
    num_ranks: int,
    activation: int,
) -> None:
    """TypeError for a wrong dtype, ValueError for a wrong shape or device, naming the argument."""
    wanted = {"ids": (ids, (torch.int32,)), "probs": (probs, (torch.float32,)), "x": (x, DTYPES)}
    weights = {f"{name}[{i}]": w for name, ws in (("w1", w1), ("w2", w2)) for i, w in enumerate(ws)}
    for name, (tensor, dtypes) in (wanted | {n: (w, (x.dtype,)) for n, w in weights.items()}).items():
        if tensor.dtype not in dtypes:
            raise TypeError(f"moe: {name}: got {tensor.dtype}, need {' or '.join(map(str, dtypes))}")
        _need(tensor.device == x.device, name, f"a tensor on {tensor.device}", f"one on {x.device}, like x")
    _need(x.dim() == 2, "x", tuple(x.shape), "[T, H]")
    _need(ids.dim() == 2 and len(ids) == len(x), "ids", tuple(ids.shape), f"[{len(x)}, K], one row per token")
    _need(probs.shape == ids.shape, "probs", tuple(probs.shape), f"{tuple(ids.shape)}, like ids")
    _need(num_experts % num_ranks == 0, "num_experts", num_experts, f"a multiple of {num_ranks} ranks")
    local, hidden = num_experts // num_ranks, x.shape[1]
    kind = Activation(activation)
    ffn = w2[0].shape[-1] if w2 else 0
    for name, ws, (rows, columns) in (("w1", w1, (kind.fc1_rows(ffn), hidden)), ("w2", w2, (hidden, ffn))):
        shapes = [tuple(w.shape) for w in ws]
        _need(
            shapes in ([(rows, columns)] * local, [(local, rows, columns)])
            if local > 1 or len(shapes) != 1
            else shapes[0] in ((rows, columns), (1, rows, columns)),
            name,
            f"{len(shapes)} of {sorted(set(shapes))}",
            f"{local} of [{rows}, {columns}] or one [{local}, {rows}, {columns}]",
        )


# ---- reference implementation: any device that torch runs on, for a communicator of the reference ----


def _reference_forward(
    x, ids, probs, w1, w2, comm, num_experts, max_tokens, num_ranks, save_rows, activation, act_limit
):
    ranks = exchange.lookup(comm)
    with ranks.aborting():
        check(x, ids, probs, w1, w2, num_experts, num_ranks, activation)
        _need(num_ranks == ranks.size, "num_ranks", num_ranks, f"{ranks.size}, the communicator's size")
    return layer.forward(
        ranks, x, ids, probs, w1, w2, num_experts, max_tokens, save_rows, activation, act_limit
    )


def _reference_backward(
    dy, x, ids, w1, w2, h, table, dw1, dw2, comm, num_experts, top_k, max_tokens, num_ranks, accumulate,
    needs, activation, act_limit,
):  # fmt: skip
    ranks = exchange.lookup(comm)
    with ranks.aborting():
        words = schedule.table_words(num_ranks, max_tokens, top_k, num_experts // num_ranks)
        _need(table.numel() == words, "schedule", f"{table.numel()} words", f"{words}, those of the forward")
        _need(dy.shape == x.shape and dy.dtype == x.dtype, "dy", f"{tuple(dy.shape)} {dy.dtype}",
              f"{tuple(x.shape)} {x.dtype}, like x")  # fmt: skip
        for name, buffers, ws in (("dw1", dw1, w1), ("dw2", dw2, w2)):
            got, want = ([tuple(t.shape) for t in tensors] for tensors in (buffers, ws))
            _need(got in ([], want), name, got, f"nothing or {want}, like the weights")
    return layer.backward(
        ranks, dy, x, w1, w2, h, table, dw1, dw2, num_experts, top_k, bool(accumulate),
        needs, activation, act_limit,
    )  # fmt: skip


torch.library.impl("megatron_mok::moe_forward", "CPU", _reference_forward)
torch.library.impl("megatron_mok::moe_backward", "CPU", _reference_backward)


# ---- CUDA: the kernels, or the reference where its communicator was asked for by name ----


def _native(name: str):
    try:
        module = import_module("megatron_mok.native")
    except ImportError:
        module = None
    if not hasattr(module, name):
        raise LibraryMissing(
            f"megatron_mok.native.{name}: the library with the kernels is not part of this installation; "
            "run `make build` (needs nvcc), or use backend='reference' (--mok-backend reference)"
        )
    return getattr(module, name)


def ranks_of(comm: int):
    """The communicator behind a handle. ValueError where it was released."""
    return exchange.lookup(comm) if exchange.registered(comm) else _native("lookup")(comm)


def aborting_backward(comm: int) -> AbstractContextManager:
    """Whatever is raised inside also ends, on the peers, the backward call that they are about to start."""
    if exchange.registered(comm):
        return exchange.lookup(comm).aborting()
    return ranks_of(comm).aborting(_native("structs").CallKind.BACKWARD)


def _cuda_forward(x, ids, probs, w1, w2, comm, *rest):
    if exchange.registered(comm):
        return _reference_forward(x, ids, probs, w1, w2, comm, *rest)
    with _native("lookup")(comm).aborting():
        num_experts, _, num_ranks, _, activation, _ = rest
        check(x, ids, probs, w1, w2, num_experts, num_ranks, activation)
    return _native("moe_forward")(x, ids, probs, w1, w2, comm, *rest)


def _cuda_backward(dy, x, ids, w1, w2, h, schedule, dw1, dw2, comm, *rest):
    here = exchange.registered(comm)
    run = _reference_backward if here else _native("moe_backward")
    return run(dy, x, ids, w1, w2, h, schedule, dw1, dw2, comm, *rest)


torch.library.impl("megatron_mok::moe_forward", "CUDA", _cuda_forward)
torch.library.impl("megatron_mok::moe_backward", "CUDA", _cuda_backward)


# ---- shapes without data, for torch.compile ----


def _fake_forward(
    x, ids, probs, w1, w2, comm, num_experts, max_tokens, num_ranks, save_rows, activation, act_limit
):
    words, saved = 0, 0
    if save_rows >= 0:
        words = schedule.table_words(num_ranks, max_tokens, ids.shape[1], num_experts // num_ranks)
        saved = save_rows
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty(saved, w1[0].shape[-2]),
        ids.new_empty(words),
    )


def _fake_backward(
    dy, x, ids, w1, w2, h, schedule, dw1, dw2, comm, num_experts, top_k, max_tokens, num_ranks, accumulate,
    needs, activation, act_limit,
):  # fmt: skip
    tokens = x.shape[0]
    return (
        x.new_empty(tokens if needs & NEEDS_DX else 0, x.shape[1]),
        x.new_empty(tokens if needs & NEEDS_DP else 0, top_k, dtype=torch.float32),
    )


torch.library.register_fake("megatron_mok::moe_forward", _fake_forward)
torch.library.register_fake("megatron_mok::moe_backward", _fake_backward)
