"""One MoE layer after the router, several ways: mok, and torch with grouped_mm, eager and compiled.

Each way includes what a training step pays: sorting the routes, gathering rows, the experts, the combination.
Symbols: T tokens, K experts per token, E experts, H hidden size, I expert intermediate size, M = T * K rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_mok import native, runtime
from megatron_mok.bench.cases import Inputs, Shape
from megatron_mok.config import MokConfig
from megatron_mok.reference.schedule import saved_rows
from megatron_mok.runtime.virtual import VirtualRanks

grouped_mm: Callable[..., Tensor] = getattr(F, "grouped_mm", None) or torch._grouped_mm


class Implementation:
    """A way to compute the layer on given inputs. Subclasses define `layer`; the passes follow from it."""

    name = ""
    notes = ""
    ranks = 1

    @classmethod
    def title(cls) -> str:
        return cls.name if cls.ranks == 1 else f"{cls.name} R{cls.ranks}"

    def __init__(self, inputs: Inputs):
        self.inputs = inputs
        self.leaves = [t.detach().requires_grad_() for t in (inputs.x, inputs.p, *self.weights())]

    def weights(self) -> tuple[Tensor, Tensor]:
        """w1 and w2 in the layout that this implementation wants."""
        return self.inputs.w1, self.inputs.w2

    def restore(self, dw1: Tensor) -> Tensor:
        """A gradient of w1 back in the layout [E, 2I, H], gate rows first."""
        return dw1

    def whole(self, by_token: Any) -> Tensor:
        """What a pass gave of out, dx or dp, as one tensor of all T tokens."""
        return by_token

    def layer(self, x: Tensor, p: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        """out [T, H], differentiable in all four."""
        raise NotImplementedError

    def fwd_nograd(self) -> Tensor:
        with torch.no_grad():
            return self.layer(*self.leaves)

    def fwd(self) -> Tensor:
        return self.layer(*self.leaves)

    def step(self) -> tuple[Tensor, ...]:
        """Forward and backward; (dx, dp, dw1, dw2) with fresh weight gradients in the weights' dtype."""
        return torch.autograd.grad(self.fwd(), self.leaves, self.inputs.dy)

    def step_acc32(self, main: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Forward and backward, the weight gradients added to two fp32 buffers; (dx, dp)."""
        dx, dp, dw1, dw2 = self.step()
        main[0].add_(dw1)
        main[1].add_(dw2)
        return dx, dp

    def check(self) -> None:
        """Raise what went wrong on the device, if anything did; the caller has synchronised."""

    def close(self) -> None:
        """Give back what `inputs` do not own."""


@dataclass(frozen=True)
class Routes:
    """Routes sorted by expert, computed on the device without waiting for it.

    order [M]: token * K + k of each row; token [M]; slot [T, K]: row of each route; ends [E] int32: row after
    each expert's last; valid [M] bool: False in padding rows, None where there are none.
    """

    order: Tensor
    token: Tensor
    slot: Tensor
    ends: Tensor
    valid: Tensor | None = None

    @classmethod
    def of(cls, ids: Tensor, num_experts: int) -> Routes:
        expert, order = torch.sort(ids.reshape(-1), stable=True)
        every = torch.arange(num_experts, device=ids.device, dtype=expert.dtype)
        ends = torch.searchsorted(expert, every, right=True).int()
        slot = torch.empty_like(order)
        slot[order] = torch.arange(len(order), device=ids.device)
        return cls(order, order // ids.shape[1], slot.view(ids.shape), ends)


class TorchEager(Implementation):
    """The layer as one would write it, differentiated by autograd."""

    name = "torch-eager"

    def layer(self, x, p, w1, w2):
        routes = Routes.of(self.inputs.ids, len(w1))
        h = grouped_mm(x.index_select(0, routes.token), w1.transpose(1, 2), offs=routes.ends)
        gate, up = h.chunk(2, -1)
        weight = p.reshape(-1).index_select(0, routes.order).unsqueeze(1)
        y = grouped_mm((F.silu(gate) * up * weight).to(x.dtype), w2.transpose(1, 2), offs=routes.ends)
        return torch.zeros_like(x).index_add(0, routes.token, y)


# ---- explicit forward and backward around six grouped GEMMs, for everything that is not autograd's ----


def _zero_padding(rows: Tensor, valid: Tensor | None) -> Tensor:
    """A GEMM leaves anything in padding rows; a weight gradient adds over them."""
    return rows if valid is None else torch.where(valid.unsqueeze(1), rows, 0)


def activate(h: Tensor, p: Tensor, valid: Tensor | None) -> Tensor:
    """silu(gate) * up * p in fp32, rounded once: [M, 2I], [M] -> [M, I]."""
    gate, up = h.float().chunk(2, -1)
    return _zero_padding((F.silu(gate) * up * p.unsqueeze(1)).to(h.dtype), valid)


def activate_backward(
    da: Tensor, h: Tensor, p: Tensor, valid: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dh [M, 2I], dp [M], the activation again [M, I]) from its gradient da [M, I]."""
    gate, up = h.float().chunk(2, -1)
    da, weight = da.float(), p.unsqueeze(1)
    s = torch.sigmoid(gate)
    silu = gate * s
    scaled = da * weight
    dh = torch.cat([scaled * up * (s + silu * (1 - s)), scaled * silu], -1).to(h.dtype)
    a = (silu * up * weight).to(h.dtype)
    return _zero_padding(dh, valid), (silu * up * da).sum(-1), _zero_padding(a, valid)


def combine(y: Tensor, slot: Tensor) -> Tensor:
    """Sum over each token's rows in fp32, rounded once: [M, H], [T, K] -> [T, H]."""
    total = y.index_select(0, slot[:, 0]).float()
    for k in range(1, slot.shape[1]):
        total = total + y.index_select(0, slot[:, k]).float()
    return total.to(y.dtype)


@dataclass(frozen=True)
class Pieces:
    """What lies between the GEMMs."""

    gather: Callable[[Tensor, Tensor], Tensor] = lambda x, token: x.index_select(0, token)
    activate: Callable[..., Tensor] = activate
    activate_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = activate_backward
    combine: Callable[..., Tensor] = combine

    def compiled(self) -> Pieces:
        return replace(
            self,
            **{name: torch.compile(f, dynamic=False, fullgraph=True) for name, f in vars(self).items()},
        )


class TorchGemms:
    """The six grouped GEMMs by torch; rows sorted by expert, no padding."""

    def routes(self, ids: Tensor, num_experts: int) -> Routes:
        return Routes.of(ids, num_experts)

    def nt(self, a: Tensor, w: Tensor, routes: Routes) -> Tensor:
        """a @ w[e]^T"""
        return grouped_mm(a, w.transpose(1, 2), offs=routes.ends)

    def nn(self, a: Tensor, w: Tensor, routes: Routes) -> Tensor:
        """a @ w[e]"""
        return grouped_mm(a, w, offs=routes.ends)

    def weight_gradient(self, a: Tensor, b: Tensor, routes: Routes, main: Tensor | None) -> Tensor | None:
        """a^T @ b for each expert: a new tensor, or added to `main` fp32 and None."""
        grad = grouped_mm(a.t(), b, offs=routes.ends)
        if main is None:
            return grad
        main.add_(grad)
        return None


class _Explicit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, p, w1, w2, ids, gemms, pieces, main):
        routes = gemms.routes(ids, len(w1))
        rows = pieces.gather(x, routes.token)
        weight = p.reshape(-1).index_select(0, routes.order)
        h = gemms.nt(rows, w1, routes)
        y = gemms.nt(pieces.activate(h, weight, routes.valid), w2, routes)
        ctx.save_for_backward(rows, weight, h, w1, w2)
        ctx.rest = (routes, gemms, pieces, main)
        return pieces.combine(y, routes.slot)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, weight, h, w1, w2 = ctx.saved_tensors
        routes, gemms, pieces, main = ctx.rest
        dy = pieces.gather(grads[0], routes.token)
        dh, dp, a = pieces.activate_backward(gemms.nn(dy, w2, routes), h, weight, routes.valid)
        dw2 = gemms.weight_gradient(dy, a, routes, main[1])
        dx = pieces.combine(gemms.nn(dh, w1, routes), routes.slot)
        dw1 = gemms.weight_gradient(dh, rows, routes, main[0])
        return dx, dp[routes.slot], dw1, dw2, None, None, None, None


class Explicit(Implementation):
    """Grouped GEMMs of one library with fused pieces in between."""

    def __init__(self, inputs: Inputs, gemms: Any = None, pieces: Pieces | None = None):
        super().__init__(inputs)
        self.gemms, self.pieces = gemms or TorchGemms(), pieces or Pieces()

    def layer(self, x, p, w1, w2):
        return self._apply((None, None), x, p, w1, w2)

    def _apply(self, main, *leaves):
        return _Explicit.apply(*leaves, self.inputs.ids, self.gemms, self.pieces, main)

    def step_acc32(self, main):
        out = self._apply(main, *self.leaves)
        dx, dp, *_ = torch.autograd.grad(out, self.leaves, self.inputs.dy, allow_unused=True)
        return dx, dp


class TorchCompiled(Explicit):
    """torch's grouped GEMMs, everything between them fused by torch.compile."""

    name = "torch-compiled"

    def __init__(self, inputs: Inputs):
        torch._dynamo.reset()  # shapes are static: another case must not count as a recompilation
        super().__init__(inputs, pieces=Pieces().compiled())


class Mok(Implementation):
    """The operators of this package, on one rank."""

    name = "mok"

    def __init__(self, inputs: Inputs):
        super().__init__(inputs)
        sizes, x = inputs.shape, inputs.x
        # of its own, not get_comm's: the next case has other sizes
        self.comm = runtime.Comm(
            None, sizes.H, sizes.K, sizes.E, sizes.T, x.device, x.dtype, MokConfig()
        ).open()
        self.notes = f"back end {self.comm.backend}"

    def layer(self, x, p, w1, w2):
        return self._moe("off", x, p, w1, w2)

    def _moe(self, main_grad, x, p, w1, w2):
        ids = self.inputs.ids
        return runtime.moe(x, ids, p, w1, w2, comm=self.comm, num_experts=len(w1), main_grad=main_grad)

    def step_acc32(self, main):
        """As Megatron asks for it: the kernel adds into main_grad, autograd gets a placeholder."""
        for weight, buffer in zip(self.leaves[2:], main, strict=True):
            vars(weight).update(main_grad=buffer, grad_added_to_main_grad=False)
        out = self._moe("on", *self.leaves)
        dx, dp, *_ = torch.autograd.grad(out, self.leaves, self.inputs.dy)
        return dx, dp

    def close(self):
        self.comm.close()


class MokRanks(Implementation):
    """The kernels on virtual ranks of one GPU: each has 1/R of the tokens, of the experts and of the SMs.

    A pass starts all ranks behind the current stream's work, which then waits for all of them. What it gives
    by token is a list with one tensor a rank.
    """

    name = "mok"
    timeout_s = 30.0

    @classmethod
    def of(cls, ranks: int) -> type[MokRanks]:
        """The class for R ranks. ValueError below 2: one rank is Mok."""
        if ranks < 2:
            raise ValueError(f"--ranks: got {ranks}, need 2 or more; one rank is always measured")
        return type(f"{cls.__name__}{ranks}", (cls,), {"ranks": ranks})

    @classmethod
    def fit(cls, shape: Shape) -> None:
        """ValueError where the work cannot be divided evenly."""
        if shape.T % cls.ranks or shape.E % cls.ranks:
            raise ValueError(
                f"--ranks: got {cls.ranks}, need a divisor of {shape.T} tokens and {shape.E} experts"
            )

    def __init__(self, inputs: Inputs):
        super().__init__(inputs)
        sizes, ranks = inputs.shape, self.ranks
        self.fit(sizes)
        tokens, self.experts = sizes.T // ranks, sizes.E // ranks
        self.virtual = VirtualRanks(
            ranks, hidden=sizes.H, top_k=sizes.K, max_tokens=tokens, device=inputs.x.device,
            settings=native.Settings(timeout_s=self.timeout_s, first_timeout_s=self.timeout_s),
        )  # fmt: skip
        self.dy = inputs.dy.split(tokens)
        by_token = [t.split(tokens) for t in (inputs.x, inputs.ids, inputs.p)]
        weights = [self._by_rank(w) for w in (inputs.w1, inputs.w2)]
        self.parts = list(zip(*by_token, *weights, strict=True))
        self.save_rows = saved_rows(MokConfig().save_capacity, tokens, sizes.K)
        self.notes = f"virtual ranks, {self.virtual.settings.num_sms} SMs each"

    def _by_rank(self, of_all: Tensor) -> list[list[Tensor]]:
        """A tensor of all experts as each rank's stacked one."""
        return [[part] for part in of_all.split(self.experts)]

    def whole(self, by_token: list[Tensor]) -> Tensor:
        return torch.cat(by_token)

    def _forward(self, save_rows: int) -> list[native.Call]:
        return self.virtual.forward(
            self.parts, num_experts=self.inputs.shape.E, save_rows=[save_rows] * self.ranks
        )

    def fwd_nograd(self):
        return [call.out for call in self._forward(0)]

    def fwd(self):
        return [call.out for call in self._forward(self.save_rows)]

    def step(self):
        dw1, dw2 = torch.empty_like(self.inputs.w1), torch.empty_like(self.inputs.w2)
        return *self._step([dw1, dw2], accumulate=False), dw1, dw2

    def step_acc32(self, main):
        return self._step(main, accumulate=True)

    def _step(self, gradients: list[Tensor], accumulate: bool) -> tuple[Any, Any]:
        forward = self._forward(self.save_rows)
        into = list(zip(*map(self._by_rank, gradients), strict=True))
        backward = self.virtual.prepare_backward(
            self.parts, forward, self.dy, into, num_experts=self.inputs.shape.E, accumulate=accumulate
        )
        self.virtual.launch_backward(backward)
        return [call.dx for call in backward], [call.dp for call in backward]

    def check(self):
        self.virtual.check()

    def close(self):
        self.virtual.close()
