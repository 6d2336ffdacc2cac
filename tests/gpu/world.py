"""Layers on virtual ranks of one GPU, and what they must compute: fp64, expert by expert, same values.

Symbols: R ranks, T tokens of a rank, K experts per token, E experts, L = E/R, H hidden size, I intermediate
size.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_mok import native
from megatron_mok.reference import schedule as reference
from megatron_mok.runtime.virtual import VirtualRanks

# A wait that should succeed and does not is an error after this long, and not a test run that stands still.
TIMEOUT_S = 10.0
ROOT = Path(__file__).resolve().parents[2]
WEIGHT_BYTES, FLOPS = 10**9, 3e11  # what one case may cost


@dataclass(frozen=True)
class Case:
    """One layer: tokens[r] tokens on rank r. routing: see `route`."""

    tokens: tuple[int, ...]
    top_k: int
    experts: int
    hidden: int
    intermediate: int
    routing: str = "random"
    seed: int = 0
    act_limit: float = 0.0
    stacked: bool = True
    max_tokens: int = 0

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    @property
    def local(self) -> int:
        return self.experts // self.ranks

    @property
    def most_tokens(self) -> int:
        return max(self.max_tokens, *self.tokens, 1)

    def __str__(self) -> str:
        return (
            f"R{self.ranks}-T{max(self.tokens)}-K{self.top_k}-E{self.experts}-H{self.hidden}"
            f"-I{self.intermediate}-{self.routing}"
        )


def random_case(
    seed: int, most_local: int = 160, weight_bytes: float = WEIGHT_BYTES, flops: float = FLOPS
) -> Case:
    """Sizes drawn log-uniformly; weights and the forward's arithmetic within limits."""
    rng = random.Random(seed)

    def log_uniform(low, high):
        return int(math.exp(rng.uniform(math.log(low), math.log(high + 1))))

    while True:
        ranks = rng.choice([1, 1, 1, 2, 3, 4, 8])
        local = min(log_uniform(1, most_local), most_local)
        top_k, hidden, intermediate = (
            log_uniform(1, 16),
            128 * log_uniform(1, 56),
            128 * log_uniform(1, 56),
        )
        tokens = tuple(
            rng.choice([0, log_uniform(1, 2000), log_uniform(1, 2000), log_uniform(1, 2000)])
            for _ in range(ranks)
        )
        case = Case(
            tokens=tokens,
            top_k=top_k,
            experts=ranks * local,
            hidden=hidden,
            intermediate=intermediate,
            routing=rng.choice(["random", "random", "absent", "skewed", "repeated", "one expert"]),
            seed=seed,
            act_limit=rng.choice([0.0, 0.0, 0.0, 0.5]),
            stacked=rng.random() < 0.5,
            max_tokens=max(tokens) + rng.choice([0, 0, 77]),
        )
        work = 6.0 * sum(tokens) * top_k * hidden * intermediate
        if 6 * case.experts * hidden * intermediate <= weight_bytes and work <= flops:
            return case


def route(kind: str, tokens: int, top_k: int, experts: int, generator: torch.Generator) -> Tensor:
    """ids [T, K] int32 on the generator's device."""
    device = generator.device
    shape = (tokens, top_k)
    ids = torch.randint(experts, shape, generator=generator, device=device, dtype=torch.int32)
    draw = torch.rand(shape, generator=generator, device=device)
    if kind == "absent":
        ids[draw < 0.4] = -1
        ids[(draw >= 0.4) & (draw < 0.45)] = experts  # out of range: no route either
        ids[(draw >= 0.45) & (draw < 0.5)] = 2**31 - 1
        ids[(draw >= 0.5) & (draw < 0.55)] = -(2**31)
    elif kind == "skewed":
        ids[draw < 0.8] //= 8
    elif kind == "repeated":
        ids = ids[:, :1].expand(shape).contiguous()
    elif kind == "one expert":
        ids.fill_(experts // 2)
    elif kind == "rank 0":  # two experts of rank 0 get everything
        ids %= 2
    elif kind == "distinct":
        order = torch.rand(tokens, experts, generator=generator, device=device).argsort(1)
        ids = order[:, :top_k].int().contiguous()
    else:
        assert kind == "random", kind
    return ids


@dataclass
class Layer:
    """A case's tensors: x[r], dy[r] [T, H] bf16, ids[r], probs[r] [T, K]; w1 [E, 2I, H], w2 [E, H, I]."""

    case: Case
    x: list[Tensor]
    ids: list[Tensor]
    probs: list[Tensor]
    w1: Tensor
    w2: Tensor
    dy: list[Tensor] = field(default_factory=list)

    @staticmethod
    def make(case: Case, device: torch.device) -> Layer:
        g = torch.Generator(device).manual_seed(case.seed)

        def normal(*shape, scale=1.0):
            return torch.randn(*shape, generator=g, device=device, dtype=torch.bfloat16).mul_(scale)

        h, i, e = case.hidden, case.intermediate, case.experts
        return Layer(
            case,
            x=[normal(t, h) for t in case.tokens],
            ids=[route(case.routing, t, case.top_k, e, g) for t in case.tokens],
            probs=[torch.rand(t, case.top_k, generator=g, device=device) for t in case.tokens],
            w1=normal(e, 2 * i, h, scale=h**-0.5),
            w2=normal(e, h, i, scale=i**-0.5),
            dy=[normal(t, h) for t in case.tokens],
        )

    def weights(self, rank: int) -> tuple[list[Tensor], list[Tensor]]:
        here = slice(rank * self.case.local, (rank + 1) * self.case.local)
        w1, w2 = self.w1[here], self.w2[here]
        return ([w1], [w2]) if self.case.stacked else (list(w1), list(w2))

    def inputs(self) -> list[tuple]:
        return [(self.x[r], self.ids[r], self.probs[r], *self.weights(r)) for r in range(self.case.ranks)]

    def table(self, rank: int) -> Tensor:
        """The schedule that the reference builds for `rank`."""
        case = self.case
        width = max(*case.tokens, 1) if case.ranks > 1 else case.tokens[0]
        ids = self.w1.new_full((case.ranks, width, case.top_k), -1, dtype=torch.int32)
        probs = torch.zeros(ids.shape, device=ids.device)
        for r, t in enumerate(case.tokens):
            ids[r, :t], probs[r, :t] = self.ids[r], self.probs[r]
        return reference.build(
            ids, probs, torch.tensor(case.tokens, device=ids.device), rank=rank,
            num_experts=case.experts, max_tokens=case.most_tokens,
        )  # fmt: skip


@dataclass
class World:
    """Virtual ranks for layers like `case`; every buffer is filled with NaN before every call."""

    case: Case
    device: torch.device
    settings: native.Settings = field(default_factory=lambda: native.Settings())
    timeout_s: float = TIMEOUT_S

    def __enter__(self) -> World:
        case = self.case
        self.virtual = VirtualRanks(
            case.ranks,
            hidden=case.hidden,
            top_k=case.top_k,
            max_tokens=case.most_tokens,
            device=self.device,
            settings=replace(self.settings, timeout_s=self.timeout_s, first_timeout_s=self.timeout_s),
        )
        for region in self.virtual.regions:
            region.fill_(0xFF)
        for rank in self.virtual.ranks:
            rank.init()
        return self

    def __exit__(self, *_: object) -> None:
        self.virtual.close()

    def prepare(self, layer: Layer, save: float = 0.0, **options) -> list[native.Call]:
        """Calls with poisoned outputs and local buffers. save: save_capacity; True for the default, 1.25."""
        case = layer.case
        capacity = 1.25 if save is True else float(save)
        rows = [reference.saved_rows(capacity, t, case.top_k) for t in case.tokens]
        calls = self.virtual.prepare(
            layer.inputs(), num_experts=case.experts, save_rows=rows, act_limit=case.act_limit, **options
        )
        for rank, call, stream in zip(self.virtual.ranks, calls, self.virtual.streams, strict=True):
            with torch.cuda.stream(stream):
                rank._shape(case.experts, case.intermediate).local.fill_(0xFF)
                call.out.fill_(math.nan)
                call.h.fill_(math.nan)
                call.schedule.fill_(-1)
        return calls

    def forward(self, layer: Layer, save: float = 0.0, **options) -> list[native.Call]:
        """One checked call: raises what a rank raises."""
        calls = self.prepare(layer, save, **options)
        self.virtual.launch(calls)
        torch.cuda.synchronize()
        self.virtual.check()
        return calls

    def turn_rows(self, case: Case) -> int:
        """Rows of one expert that a weight gradient sums in one turn."""
        layout = self.virtual.ranks[0]._shape(case.experts, case.intermediate).layout
        return layout.segment_units * native.UNIT_ROWS

    def poison(self, case: Case, value: int = 0xFF) -> None:
        """Every byte of the workspaces except flags and control words."""
        for rank, region in zip(self.virtual.ranks, self.virtual.regions, strict=True):
            shape = rank._shape(case.experts, case.intermediate)
            region[shape.layout.off_tokens :].fill_(value)
            shape.local.fill_(value)

    def prepare_backward(
        self, layer: Layer, calls: list[native.Call], gradients: list[Gradients], **options
    ) -> list[native.BackwardCall]:
        """Backward calls with poisoned outputs and workspaces."""
        self.poison(layer.case)
        prepared = self.virtual.prepare_backward(
            layer.inputs(), calls, layer.dy, [g.buffers(layer.case) for g in gradients],
            num_experts=layer.case.experts, act_limit=layer.case.act_limit, **options,
        )  # fmt: skip
        for call, into, stream in zip(prepared, gradients, self.virtual.streams, strict=True):
            with torch.cuda.stream(stream):
                into.dx, into.dp = call.dx.fill_(math.nan), call.dp.fill_(math.nan)
                for _, sums in call.rounded:
                    for part in sums:
                        part.fill_(math.nan)
        return prepared

    def backward(
        self,
        layer: Layer,
        calls: list[native.Call],
        gradients: list[Gradients] | None = None,
        **options,
    ) -> list[Gradients]:
        """One checked backward of forward `calls`; into `gradients`, or into fp32 buffers full of NaN."""
        if gradients is None:
            gradients = [Gradients.empty(layer.case, self.device) for _ in calls]
        self.virtual.launch_backward(self.prepare_backward(layer, calls, gradients, **options))
        torch.cuda.synchronize()
        self.virtual.check()
        return gradients

    def step(self, layer: Layer, save: float = True, **options) -> list[Gradients]:
        """Forward and backward."""
        return self.backward(layer, self.forward(layer, save), **options)


@dataclass
class Gradients:
    """One rank's: dx [T, H] bf16, dp [T, K] fp32, dw1 [L, 2I, H], dw2 [L, H, I].

    dp_scale [T, K] of expected ones: the norm of the I terms that dp sums.
    """

    dw1: Tensor
    dw2: Tensor
    dx: Tensor = field(default_factory=lambda: torch.empty(0))
    dp: Tensor = field(default_factory=lambda: torch.empty(0))
    dp_scale: Tensor = field(default_factory=lambda: torch.empty(0))

    @staticmethod
    def empty(
        case: Case, device: torch.device, dtype: torch.dtype = torch.float32, value: float = math.nan
    ) -> Gradients:
        local, h, i = case.local, case.hidden, case.intermediate
        shapes = ((local, 2 * i, h), (local, h, i))
        return Gradients(*[torch.full(shape, value, dtype=dtype, device=device) for shape in shapes])

    def buffers(self, case: Case) -> tuple[list[Tensor], list[Tensor]]:
        """As the operator takes them."""
        if case.stacked:
            return [self.dw1], [self.dw2]
        return list(self.dw1.unbind()), list(self.dw2.unbind())


@dataclass
class Expected:
    """out[r] [T, H] in fp64, and what torch computes in bf16 with the kernels' rounding points."""

    out: list[Tensor]
    out_bf16: list[Tensor]


def activation(h: Tensor, p: Tensor, limit: float) -> Tensor:
    """From h [M, 2I] and p [M]. Whether a value is clamped is decided by h in bf16, as it is stored; at the
    limit the gradient passes, as torch.clamp's does in some versions only.
    """
    gate, up = h.chunk(2, -1)
    if limit > 0:
        gate = torch.where(gate.bfloat16() > limit, limit, gate)
        up = torch.where(up.bfloat16().abs() > limit, limit * up.sign(), up)
    return torch.nn.functional.silu(gate) * up * p.unsqueeze(-1)


def expected(layer: Layer) -> Expected:
    case = layer.case
    x = torch.cat(layer.x)
    ids, p = torch.cat(layer.ids).flatten(), torch.cat(layer.probs).flatten()
    ids = torch.where((ids >= 0) & (ids < case.experts), ids, case.experts)
    order = ids.argsort(stable=True)
    counts = torch.bincount(ids, minlength=case.experts + 1).tolist()
    out = torch.zeros(len(x), case.hidden, dtype=torch.float64, device=x.device)
    y = torch.zeros(len(ids), case.hidden, dtype=torch.bfloat16, device=x.device)
    for e, routes in enumerate(order.split(counts)[:-1]):
        if len(routes) == 0:
            continue
        token = routes // case.top_k
        rows, pe, w1, w2 = x[token], p[routes], layer.w1[e], layer.w2[e]
        exact = activation(rows.double() @ w1.double().t(), pe.double(), case.act_limit)
        out.index_add_(0, token, exact @ w2.double().t())
        rounded = activation((rows @ w1.t()).float(), pe, case.act_limit).bfloat16()
        y[routes] = rounded @ w2.t()
    out_bf16 = y.view(len(x), case.top_k, case.hidden).float().sum(1).bfloat16()
    return Expected(list(out.split(case.tokens)), list(out_bf16.split(case.tokens)))


def expected_gradients(layer: Layer) -> tuple[list[Gradients], list[Gradients]]:
    """Per rank, (in fp64, what torch computes in bf16 with the kernels' roundings and d_act in bf16 too)."""
    case = layer.case
    x, dy = torch.cat(layer.x), torch.cat(layer.dy)
    ids, p = torch.cat(layer.ids).flatten(), torch.cat(layer.probs).flatten()
    ids = torch.where((ids >= 0) & (ids < case.experts), ids, case.experts)
    counts = torch.bincount(ids, minlength=case.experts + 1).tolist()
    routes_of = ids.argsort(stable=True).split(counts)[:-1]

    def solve(wide: torch.dtype, gemm: torch.dtype) -> list[Gradients]:
        """Values in `gemm` where they are stored, sums and the activation in `wide`."""
        dx_rows = torch.zeros(len(ids), case.hidden, dtype=gemm, device=x.device)
        dp, scale = torch.zeros(2, len(ids), dtype=wide, device=x.device)
        dw1, dw2 = torch.zeros_like(layer.w1, dtype=wide), torch.zeros_like(layer.w2, dtype=wide)
        for e, routes in enumerate(routes_of):
            if len(routes) == 0:
                continue
            token = routes // case.top_k
            x_e, dy_e, w1, w2 = (t.to(gemm) for t in (x[token], dy[token], layer.w1[e], layer.w2[e]))
            h = (x_e @ w1.t()).to(wide).requires_grad_()
            p_e = p[routes].to(wide).requires_grad_()
            act = activation(h, p_e, case.act_limit)
            d_act = (dy_e @ w2).to(wide)
            dh, dp[routes] = torch.autograd.grad(act, (h, p_e), d_act)
            scale[routes] = (activation(h.detach(), torch.ones_like(p_e), case.act_limit) * d_act).norm(dim=1)
            dh, act = dh.to(gemm), act.detach().to(gemm)
            dx_rows[routes] = dh @ w1
            dw1[e], dw2[e] = dh.t().to(wide) @ x_e.to(wide), dy_e.t().to(wide) @ act.to(wide)
        dx = dx_rows.view(len(x), case.top_k, case.hidden).to(wide).sum(1).to(gemm)
        weights = [dw.split(case.local) for dw in (dw1, dw2)]
        rows = [t.split(case.tokens) for t in (dx, dp.view(-1, case.top_k), scale.view(-1, case.top_k))]
        return [Gradients(*of_rank) for of_rank in zip(*weights, *rows, strict=True)]

    return solve(torch.float64, torch.float64), solve(torch.float32, torch.bfloat16)


def routed_rows(layer: Layer) -> Tensor:
    """[E] rows of each expert."""
    ids = torch.cat(layer.ids).flatten()
    return torch.bincount(ids[(ids >= 0) & (ids < layer.case.experts)].long(), minlength=layer.case.experts)


def assert_gradients(
    layer: Layer, got: list[Gradients], want: tuple[list[Gradients], list[Gradients]] | None = None
) -> None:
    """error(kernel) <= 2 * error(torch in bf16) + a little, for each gradient and expert; exact zeros."""
    case = layer.case
    exact, rounded = want or expected_gradients(layer)
    rows = routed_rows(layer).split(case.local)
    for r in range(case.ranks):
        present = (layer.ids[r] >= 0) & (layer.ids[r] < case.experts)
        assert not bool(got[r].dp[~present].any()), f"dp of rank {r}: absent routes"
        assert not bool(got[r].dx[~present.any(1)].any()), f"dx of rank {r}: tokens without a route"
        for name in ("dx", "dp", "dw1", "dw2"):
            ours, truth, theirs = (getattr(g[r], name) for g in (got, exact, rounded))
            assert ours.shape == truth.shape, f"{name} of rank {r}"
            theirs = theirs.to(ours.dtype)
            error, allowed = relative_error(ours, truth), relative_error(theirs, truth)
            little = 1e-6
            if name == "dp" and bool(truth.any()):  # torch may be right by luck in a few sums that cancel
                tokens = case.tokens[r]
                little += 0.01 * (exact[r].dp_scale.norm() / truth.norm()).item() / tokens**0.5
            what = f"{name} of rank {r}: relative error {error:.3g}, torch's in bf16 {allowed:.3g}"
            assert error <= 2 * allowed + little, what
            if not name.startswith("dw"):
                continue
            assert not bool(ours[rows[r] == 0].any()), f"{name} of rank {r}: experts without rows"
            if case.act_limit == 0:  # one value that rounding moves over the limit changes a small expert
                norm, distance = (t.double().flatten(1).norm(dim=1) for t in (truth, ours.double() - truth))
                bound = 3 * (theirs.double() - truth).flatten(1).norm(dim=1) + 1e-6 * norm
                wrong = (distance > bound).nonzero().flatten().tolist()
                assert not wrong, f"{name} of rank {r}: experts {wrong}"


def assert_same_gradients(
    first: list[Gradients], second: list[Gradients], weights: float | None = None
) -> None:
    """Equal bit for bit; weight gradients within a relative error of `weights` where that is given."""
    for r, (a, b) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(a.dx, b.dx), f"dx of rank {r}"
        assert torch.equal(a.dp, b.dp), f"dp of rank {r}"
        for name in ("dw1", "dw2"):
            one, other = getattr(a, name), getattr(b, name)
            if weights is None:
                assert torch.equal(one, other), f"{name} of rank {r}"
            else:
                assert relative_error(one, other) <= weights, f"{name} of rank {r}"


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||; inf where got is not finite, 0 for two zeros."""
    if not bool(got.isfinite().all()):
        return math.inf
    distance, norm = (got.double() - want.double()).norm().item(), want.double().norm().item()
    return distance / norm if norm > 0 else (math.inf if distance > 0 else 0.0)


def assert_close(got: Tensor, exact: Tensor, torch_bf16: Tensor, what: str = "out") -> None:
    """error(kernel) <= 2 * error(torch in bf16) + a little, and rows that are exactly zero stay so."""
    error, theirs = relative_error(got, exact), relative_error(torch_bf16, exact)
    assert error <= 2 * theirs + 1e-6, f"{what}: relative error {error:.3g}, torch's in bf16 {theirs:.3g}"
    zero = (exact == 0).all(-1)
    assert not bool(got[zero].any()), f"{what}: rows without a route are not zero"


def assert_outputs(layer: Layer, calls: list[native.Call], want: Expected | None = None) -> None:
    want = want or expected(layer)
    for r, call in enumerate(calls):
        assert_close(call.out, want.out[r], want.out_bf16[r], f"out of rank {r}")


def assert_schedules(layer: Layer, calls: list[native.Call]) -> None:
    """The GPU's table equals the reference's, wherever something is specified."""
    case = layer.case
    header = reference.header_words(case.local)
    size = reference.capacity(case.ranks, case.most_tokens, case.top_k, case.local)
    for r, call in enumerate(calls):
        want, got = layer.table(r), call.schedule
        assert got.shape == want.shape and got.dtype == want.dtype
        assert torch.equal(got[:header], want[:header]), f"header of rank {r}"
        blocks, units = int(want[1]), int(want[3])
        starts = [(header + i * size, blocks * reference.BLOCK_ROWS) for i in range(3)]
        starts += [(header + 3 * size, blocks), (header + 3 * size + size // reference.BLOCK_ROWS, units)]
        names = ("source", "slot", "probability", "block", "unit")
        for name, (first, used) in zip(names, starts, strict=True):
            equal = torch.equal(got[first : first + used], want[first : first + used])
            assert equal, f"{name} column of rank {r}"


def saved_rows(layer: Layer, call: native.Call, rank: int) -> tuple[reference.Rows, Tensor, Tensor]:
    """(rows of the schedule, which of them are saved, their h [saved, 2I] as the kernels left it)."""
    rows = reference.rows(call.schedule, layer.case.local)
    index = rows.saved_index()
    kept = index < len(call.h)
    return rows, kept, native.unpack_h(call.h)[index[kept]]


def assert_saved(layer: Layer, calls: list[native.Call]) -> None:
    """h of every saved row against x @ W1^T."""
    case = layer.case
    for r, call in enumerate(calls):
        rows, kept, got = saved_rows(layer, call, r)
        x = torch.cat(layer.x)
        first = torch.tensor([0, *case.tokens], device=x.device).cumsum(0)
        token = (first[rows.source] + rows.slot // case.top_k)[kept]
        exact, rounded = torch.empty_like(got, dtype=torch.float64), torch.empty_like(got)
        start = 0
        for e, n in enumerate(torch.bincount(rows.expert[kept], minlength=case.local).tolist()):
            here, w1 = x[token[start : start + n]], layer.w1[r * case.local + e]
            exact[start : start + n] = here.double() @ w1.double().t()
            rounded[start : start + n] = here @ w1.t()
            start += n
        assert start == len(got)
        assert_close(got, exact, rounded, f"h of rank {r}")


def assert_same_bits(layer: Layer, first: list[native.Call], second: list[native.Call]) -> None:
    """out, schedule and saved h of two runs are equal bit for bit."""
    for r, (a, b) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(a.out, b.out), f"out of rank {r}"
        if len(a.h):
            assert torch.equal(saved_rows(layer, a, r)[2], saved_rows(layer, b, r)[2]), f"h of rank {r}"


def python(code: str, **variables: str) -> str:
    """Output of a fresh Python in the repository's root."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
