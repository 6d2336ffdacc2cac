"""One MoE layer over several ranks, one process each: mok, torch's all-to-all with grouped_mm, and peers.

Every rank brings T tokens and holds L = E/R experts. Peers take part where they are installed, through
Megatron-Core's own functions for them (megatron.core.transformer.moe.fused_a2a): they move the rows, the rest
is as in `alltoall`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mok import runtime
from megatron_mok.bench.cases import Inputs, Shape, make_inputs, route
from megatron_mok.bench.implementations import Implementation, activate, grouped_mm
from megatron_mok.config import MokConfig

ROUTINGS = ("balanced", "random", "local")


def rank_inputs(shape: Shape, routing: str, rank: int, ranks: int, device: str, seed: int) -> Inputs:
    """What one rank brings and holds: T tokens of its own, routed over all E experts; L experts.

    local: the rank's own experts get all rows, the same number each; where it has fewer than K, a token names
    one several times.
    """
    local = shape.E // ranks
    mine = make_inputs(replace(shape, E=local, K=min(shape.K, local)), "random", device, seed + rank)
    g = torch.Generator(device=device).manual_seed(seed + 1000 + rank)
    if routing != "local":
        ids = route(shape, routing, g)
    elif shape.K <= local:
        ids = route(replace(shape, E=local), "balanced", g) + rank * local
    else:
        in_turns = torch.arange(shape.rows, device=device, dtype=torch.int32) % local
        ids = in_turns.view(shape.T, shape.K) + rank * local
    p = torch.rand(shape.T, shape.K, device=device, generator=g) + 0.1
    return Inputs(shape, routing, mine.x, mine.dy, ids, p / p.sum(1, keepdim=True), mine.w1, mine.w2)


# ---------------------------------------------------------------- pieces of the ways that are not mok


def combine(y: Tensor, slot: Tensor, valid: Tensor | None) -> Tensor:
    """Sum in fp32 over the rows of each token, rounded once: [M, H], [N, K] -> [N, H].

    valid [N, K] bool: whether a slot has a row; None where all have.
    """
    total = torch.zeros(len(slot), y.shape[1], dtype=torch.float32, device=y.device)
    for k in range(slot.shape[1]):
        rows = y.index_select(0, slot[:, k]).float()
        total = total + (rows if valid is None else torch.where(valid[:, k : k + 1], rows, 0))
    return total.to(y.dtype)


class Pieces:
    """The combination and the activation, each fused by torch.compile on a GPU."""

    def __init__(self, compiled: bool):
        def made(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return torch.compile(f, dynamic=False, fullgraph=True) if compiled else f

        self.combine, self.activate = made(combine), made(activate)


class _Gather(torch.autograd.Function):
    """Rows [M, H] of x [N, H]. The gradient is a combination: one order of adding, no atomics."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, row: Tensor, slot: Tensor, valid: Tensor | None, pieces: Pieces
    ) -> Tensor:
        ctx.rest = slot, valid, pieces
        return x.index_select(0, row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        slot, valid, pieces = ctx.rest
        return pieces.combine(grads[0].contiguous(), slot, valid), None, None, None, None


class _Combine(torch.autograd.Function):
    """Its reverse: tokens [N, H] from rows [M, H]."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, row: Tensor, slot: Tensor, valid: Tensor | None, pieces: Pieces
    ) -> Tensor:
        ctx.row = row
        return pieces.combine(y, slot, valid)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].index_select(0, ctx.row), None, None, None, None


class _Exchange(torch.autograd.Function):
    """Rows to other ranks, in consecutive pieces of `send` rows; `receive` rows come back from each."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        ctx.counts = send, receive
        got = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(got, rows.contiguous(), receive, send)
        return got

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        send, receive = ctx.counts
        return _Exchange.apply(grads[0], receive, send), None, None


def inverse(order: Tensor) -> Tensor:
    """The permutation that takes back `order`."""
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return back


class Torch(Implementation):
    """What the ways share whose experts are torch's grouped_mm."""

    def __init__(self, inputs: Inputs):
        super().__init__(inputs)
        self.ranks = dist.get_world_size()
        self.local = inputs.shape.E // self.ranks
        self.pieces = Pieces(compiled=inputs.x.is_cuda)

    def experts(self, rows: Tensor, weight: Tensor, ends: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        """y [M, H] of rows [M, H] by expert; weight [M] fp32; ends [L] int32: row after an expert's last."""
        h = grouped_mm(rows, w1.transpose(1, 2), offs=ends)
        return grouped_mm(self.pieces.activate(h, weight, None), w2.transpose(1, 2), offs=ends)

    def gather(self, x: Tensor, row: Tensor, slot: Tensor, valid: Tensor | None = None) -> Tensor:
        return _Gather.apply(x, row, slot, valid, self.pieces)

    def combine(self, y: Tensor, row: Tensor, slot: Tensor, valid: Tensor | None = None) -> Tensor:
        return _Combine.apply(y, row, slot, valid, self.pieces)


class AllToAll(Torch):
    """torch.distributed's all-to-all on rows sorted by expert, grouped_mm, compiled pieces."""

    name = "alltoall"

    def layer(self, x: Tensor, p: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        (T, K), R, L = self.inputs.ids.shape, self.ranks, self.local
        flat = self.inputs.ids.reshape(-1).long()
        order = torch.argsort(flat, stable=True)
        token, slot = order // K, inverse(order).view(T, K)
        sent = torch.bincount(flat, minlength=R * L).view(R, L)  # [to rank, its expert]
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        send, receive = sent.sum(1).tolist(), received.sum(1).tolist()
        rows = _Exchange.apply(self.gather(x, token, slot), send, receive)
        weight = _Exchange.apply(p.reshape(-1).index_select(0, order), send, receive)
        expert = torch.arange(L, device=x.device).repeat(R).repeat_interleave(received.view(-1))
        by_expert = torch.argsort(expert, stable=True)
        back = inverse(by_expert)
        ends = received.sum(0).cumsum(0).int()
        rows = self.gather(rows, by_expert, back.unsqueeze(1))
        y = self.experts(rows, weight.index_select(0, by_expert), ends, w1, w2)
        y = _Exchange.apply(self.gather(y, back, by_expert.unsqueeze(1)), receive, send)
        return self.combine(y, token, slot)


# ---------------------------------------------------------------- peers


def _fused_a2a() -> Any:
    return importlib.import_module("megatron.core.transformer.moe.fused_a2a")


class Peer(Torch):
    """What the peers share whose functions Megatron-Core has."""

    def __init__(self, inputs: Inputs):
        super().__init__(inputs)
        self.a2a = _fused_a2a()


class DeepEp(Peer):
    """DeepEP as Megatron-Core's flex dispatcher uses it: a rank gets a token once and sorts by expert."""

    name = "deepep"
    notes = "Megatron-Core's fused_dispatch and fused_combine, sorting and grouped_mm as in alltoall"

    def layer(self, x: Tensor, p: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        shape, K = self.inputs.shape, self.inputs.shape.K
        # once: N received tokens; ids [N, K] of the experts here, -1 for those elsewhere; p [N, K]
        once, ids, weight, counts, handle = self.a2a.fused_dispatch(
            x, self.inputs.ids.long(), p, shape.E, dist.group.WORLD
        )
        flat = ids.reshape(-1).long()
        rows = int(counts.sum())  # the counts are the host's
        order = torch.argsort(torch.where(flat < 0, self.local, flat), stable=True)
        slot = inverse(order).clamp(max=max(rows - 1, 0)).view(-1, K)
        order, valid = order[:rows], ids >= 0
        ends = counts.to(x.device).cumsum(0).int()
        here = self.gather(once, order // K, slot, valid)
        y = self.experts(here, weight.reshape(-1).index_select(0, order), ends, w1, w2)
        return self.a2a.fused_combine(self.combine(y, order // K, slot, valid), dist.group.WORLD, handle)[0]


class HybridEp(Peer):
    """HybridEP as Megatron-Core's flex dispatcher uses it: its kernels also sort the rows by expert."""

    name = "hybridep"
    notes = "Megatron-Core's hybrid_ep_dispatch and hybrid_ep_combine, grouped_mm as in alltoall"

    def __init__(self, inputs: Inputs):
        super().__init__(inputs)
        self.a2a.reset_hybrid_ep_buffer()  # one for the process, made for the sizes of its first call

    def layer(self, x: Tensor, p: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        ids = self.inputs.ids.long()
        routed = torch.zeros(len(ids), self.inputs.shape.E, dtype=torch.bool, device=x.device)
        routed = routed.scatter(1, ids, True)
        probs = torch.zeros(routed.shape, device=x.device).scatter(1, ids, p)
        rows, weight, _, counts, handle = self.a2a.hybrid_ep_dispatch(
            x, routed, probs, dist.group.WORLD, self.local
        )
        ends = counts.to(x.device).cumsum(0).int()
        y = self.experts(rows, weight.float(), ends, w1, w2)
        return self.a2a.hybrid_ep_combine(y, handle, len(rows), None)

    def close(self) -> None:
        self.a2a.reset_hybrid_ep_buffer()


PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (DeepEp, HybridEp)}
# What each is imported from, and where that comes from.
NEEDS = {
    "deepep": ("Buffer", "DeepEP (github.com/deepseek-ai/DeepEP)"),
    "hybridep": ("HybridEPBuffer", "DeepEP's hybrid-ep branch (github.com/deepseek-ai/DeepEP)"),
}
NO_ADAPTER = {
    "ligermoe": "no adapter: liger-cute-kernels 0.8.5 documents its set-up, configure(moe=...), but neither "
    "the layer's call nor the layout of its weights",
}


def absent() -> dict[str, str]:
    """Why each peer that cannot take part here does not, in a line."""
    reasons = dict(NO_ADAPTER)
    for name, (attribute, package) in NEEDS.items():
        try:
            getattr(importlib.import_module("deep_ep"), attribute)
            _fused_a2a()
        except Exception as error:  # a peer that breaks while importing must not break the rest
            reason = (str(error).strip().splitlines() or [""])[0]
            reasons[name] = f"needs {package} and megatron-core; found: {type(error).__name__}: {reason}"
    return reasons


# ---------------------------------------------------------------- ours


def open_comm(shape: Shape, device: torch.device, dtype: torch.dtype, config: MokConfig) -> runtime.Comm:
    """A communicator of the default group, not get_comm's: the next case has other sizes. Collective."""
    return runtime.Comm(dist.group.WORLD, shape.H, shape.K, shape.E, shape.T, device, dtype, config).open()


class MokAcross(Implementation):
    """The operators of this package over the ranks of the default group; `comm` stays the caller's."""

    name = "mok"

    def __init__(self, inputs: Inputs, comm: runtime.Comm):
        super().__init__(inputs)
        self.ranks, self.comm = comm.size, comm
        self.notes = f"back end {comm.backend}"

    def layer(self, x: Tensor, p: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return self._moe("off", x, p, w1, w2)

    def _moe(self, main_grad: str, x: Tensor, p: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        ids, E = self.inputs.ids, self.inputs.shape.E
        return runtime.moe(x, ids, p, w1, w2, comm=self.comm, num_experts=E, main_grad=main_grad)

    def step_acc32(self, main: list[Tensor]) -> tuple[Tensor, Tensor]:
        for weight, buffer in zip(self.leaves[2:], main, strict=True):
            vars(weight).update(main_grad=buffer, grad_added_to_main_grad=False)
        dx, dp, *_ = torch.autograd.grad(self._moe("on", *self.leaves), self.leaves, self.inputs.dy)
        return dx, dp
