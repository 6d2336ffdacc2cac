"""Layers on virtual ranks of one GPU, and what they must compute: fp64, expert by expert, same values.

Symbols: R ranks, T tokens of a rank, K experts per token, E experts, L = E/R, H hidden size, I intermediate
size.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_mok import errors, native
from megatron_mok.bench import cases as bench
from megatron_mok.native.structs import CallKind
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


SMALL = Case((200,), 2, 8, 512, 256)
THREE = Case((100, 120, 90), 2, 6, 512, 256)

# The shapes that performance is measured at, and one of them on several ranks.
SHAPES = {name: Case((s.T,), s.K, s.E, s.H, s.I, "distinct") for name, s in bench.SHAPES.items()}
SHAPES["C-4 ranks"] = Case((512,) * 4, 8, 8, 7168, 2048, "distinct")

# With 4 SMs for each, 33 ranks fit on 132; torch has 32 streams for them.
CORNERS = {
    "B01-rank without rows": Case((300,) * 4, 2, 8, 512, 256, "rank 0"),
    "B04-rank without rows or tokens": Case((300, 200, 300, 0), 2, 8, 512, 256, "rank 0"),
    "B05-rank without tokens": Case((512, 0, 512, 512), 2, 8, 512, 256),
    "B05-one rank without tokens": Case((0,), 2, 8, 512, 256),
    "B05-no tokens anywhere": Case((0, 0), 2, 8, 512, 256),
    "B06-uneven": Case((512, 768, 512, 1024), 2, 8, 512, 256),
    "B07-all on one rank": Case((512,) * 4, 2, 8, 512, 256, "rank 0"),
    "B07-all on one expert": Case((2304,), 8, 64, 512, 256, "one expert"),
    "B07-all on one of four ranks": Case((1000,) * 4, 4, 8, 512, 256, "one expert"),
    "B08-repeated": Case((512,), 4, 8, 512, 256, "repeated"),
    "B09-absent": Case((512,), 2, 8, 512, 256, "absent"),
    "B09-absent-R3": Case((512, 100, 300), 2, 9, 512, 256, "absent"),
    "B13-top 1": Case((512,), 1, 8, 512, 256),
    "B15-E63": Case((1024,), 8, 63, 128, 128),
    "B15-E64": Case((1024,), 8, 64, 128, 128),
    "B15-E65": Case((1024,), 8, 65, 128, 128),
    "B15-E128": Case((1024,), 8, 128, 128, 128),
    "B15-E256": Case((1024,), 8, 256, 128, 128),
    "B15-E512": Case((1024,), 8, 512, 128, 128),
    "B15-E896-R2": Case((512,) * 2, 8, 896, 128, 128),
    "B15-E1024-R2": Case((512,) * 2, 8, 1024, 128, 128),
    "B15-E1025-R5": Case((205,) * 5, 8, 1025, 128, 128),
    "B16-H3584": Case((512,), 2, 8, 3584, 384),
    "B16-H7168-K16": Case((256,), 16, 32, 7168, 128),
    "B17-H8192": Case((1024,), 2, 8, 8192, 256),
    "B18-T1": Case((1,), 2, 8, 512, 256),
    "B18-T255": Case((255,), 2, 8, 512, 256),
    "B18-T257": Case((257,), 2, 8, 512, 256),
    "B18-T3552": Case((3552,), 2, 8, 512, 256),
    "top 32": Case((130,), 32, 64, 512, 256),
    "I128-H128": Case((300,), 2, 4, 128, 128),
    "I128-H8192": Case((300,), 2, 4, 8192, 128),
    "I7168": Case((300,), 2, 4, 256, 7168),
    "clamped": Case((300, 200), 4, 8, 512, 256, act_limit=0.5),
    "list of weights": Case((300,), 4, 8, 512, 256, stacked=False),
    "B72-R2": Case((300,) * 2, 4, 8, 512, 256),
    "B72-R3": Case((300,) * 3, 4, 9, 512, 256),
    "B72-R4": Case((300,) * 4, 4, 8, 512, 256),
    "B72-R6": Case((300,) * 6, 4, 12, 512, 256),
    "B72-R8": Case((300,) * 8, 4, 64, 512, 256),
    "B72-R12": Case((100,) * 12, 4, 24, 512, 256),
    "B72-R24": Case((60,) * 24, 4, 48, 512, 256),
    "B72-R32": Case(tuple(range(20, 52)), 4, 64, 512, 256),
}

KINDS = ("random", "absent", "skewed", "repeated", "one expert")  # of routing, in random cases


def random_case(seed: int, weight_bytes: float = WEIGHT_BYTES, flops: float = FLOPS) -> Case:
    """Sizes drawn log-uniformly; weights and the forward's arithmetic within limits; a token somewhere."""
    rng = random.Random(seed)

    def log_uniform(low, high):
        return int(math.exp(rng.uniform(math.log(low), math.log(high + 1))))

    while True:
        ranks = rng.choice([1, 1, 1, 2, 3, 4, 8])
        local = min(log_uniform(1, 160), 160)
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
            routing=rng.choice(["random", *KINDS]),
            seed=seed,
            act_limit=rng.choice([0.0, 0.0, 0.0, 0.5]),
            stacked=rng.random() < 0.5,
            max_tokens=max(tokens) + rng.choice([0, 0, 77]),
        )
        work = 6.0 * sum(tokens) * top_k * hidden * intermediate
        if 6 * case.experts * hidden * intermediate <= weight_bytes and 0 < work <= flops:
            return case


@dataclass(frozen=True)
class Variant:
    """save: save_capacity; dtype of the weight gradients, and whether they are added to what is there."""

    save: float
    dtype: torch.dtype
    accumulate: bool


def random_variant(seed: int) -> Variant:
    """How the random case of that seed runs."""
    rng = random.Random(f"variant {seed}")  # a sequence of its own: nothing goes with the sizes
    return Variant(
        save=rng.choice([0.0, 0.3, 1.25, 1.25]),
        dtype=rng.choice([torch.float32, torch.float32, torch.bfloat16]),
        accumulate=rng.choice([False, False, True]),
    )


def random_cases(seeds: range, **limits: float) -> dict[str, Case]:
    cases = [random_case(seed, **limits) for seed in seeds]
    return {f"{case.seed}-{case}": case for case in cases}


def forward_cases() -> dict[str, Case]:
    return random_cases(range(320))


def backward_cases() -> dict[str, Case]:
    """Others; at most 0.5 GB of weights, and 0.15 TFLOP in forward and backward."""
    return random_cases(range(10_000, 10_300), weight_bytes=5e8, flops=1.5e11 / 3)


def knobs(case: Case, device: torch.device) -> native.Settings:
    """Another grid, other roles, minibatches and rings than the defaults."""
    rng = random.Random(f"knobs {case.seed} {case}")
    share = torch.cuda.get_device_properties(device).multi_processor_count // case.ranks // 2 * 2
    num_sms = rng.choice([n for n in (4, 10, 32, 66, share) if n <= share])
    return native.Settings(
        num_sms=num_sms,
        comm_sms=rng.choice([n for n in (0, 2, 4, 8) if n < num_sms]),
        backward_comm_sms=rng.choice([n for n in (0, 2, 4, 8) if n < num_sms]),
        minibatch_units=rng.choice([0, 1, 2, 7]),
        ring_rows=rng.choice([0, 128, 1024]),
    )


def route(kind: str, tokens: int, top_k: int, experts: int, generator: torch.Generator) -> Tensor:
    """ids [T, K] int32 on the generator's device; the first route is present, whatever the kind."""
    device = generator.device
    shape = (tokens, top_k)
    ids = torch.randint(experts, shape, generator=generator, device=device, dtype=torch.int32)
    draw = torch.rand(shape, generator=generator, device=device)
    if kind == "absent":
        draw[:1, :1] = 1.0
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
    elif kind == "crowded":  # nearly every token chooses the first K experts, each once
        ids = torch.where(draw[:, :1] < 0.97, draw.argsort(1).int(), ids)
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
        torch.cuda.synchronize(self.device)
        self.virtual.check()
        return calls

    def failures(self) -> list[errors.MokError | None]:
        """What each rank raises. The caller has synchronised."""
        found: list[errors.MokError | None] = []
        for rank in self.virtual.ranks:
            try:
                rank.check()
                found.append(None)
            except errors.MokError as error:
                found.append(error)
        return found

    def pretend_published(self, rank: int, call: int, kind: CallKind, layer: int) -> None:
        """Every rank sees that `rank` has published that call, which it may never do."""
        word = call << 24 | kind << 20 | layer
        for region in self.virtual.regions:
            region[: 8 * self.case.ranks].view(torch.int64)[rank] = word
        torch.cuda.synchronize(self.device)

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
        torch.cuda.synchronize(self.device)
        self.virtual.check()
        return gradients

    def step(self, layer: Layer, save: float = True, **options) -> list[Gradients]:
        """Forward and backward."""
        return self.backward(layer, self.forward(layer, save), **options)


@dataclass
class Gradients:
    """One rank's: dx [T, H] bf16, dp [T, K] fp32, dw1 [L, 2I, H], dw2 [L, H, I].

    Of expected ones also out [T, H], what forward returns, and dp_scale [T, K], the norm of the I terms that
    dp sums.
    """

    dw1: Tensor
    dw2: Tensor
    dx: Tensor = field(default_factory=lambda: torch.empty(0))
    dp: Tensor = field(default_factory=lambda: torch.empty(0))
    dp_scale: Tensor = field(default_factory=lambda: torch.empty(0))
    out: Tensor = field(default_factory=lambda: torch.empty(0))

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


class Solver:
    """A layer expert by expert: values in `gemm` where they are stored, sums and the activation in `wide`."""

    def __init__(self, layer: Layer, wide: torch.dtype, gemm: torch.dtype) -> None:
        self.layer, self.case, self.wide, self.gemm = layer, layer.case, wide, gemm
        experts = layer.case.experts
        ids = torch.cat(layer.ids).flatten()
        ids = torch.where((ids >= 0) & (ids < experts), ids, experts)
        counts = torch.bincount(ids, minlength=experts + 1)[:-1].tolist()
        self.num_slots = len(ids)
        self.routes = ids.argsort(stable=True)[: sum(counts)]  # of the M rows, expert by expert
        ends = itertools.accumulate(counts)
        spans = [slice(end - n, end) for n, end in zip(counts, ends, strict=True)]
        self.experts = [(e, here) for e, here in enumerate(spans) if counts[e] > 0]
        self.p = torch.cat(layer.probs).flatten()[self.routes].to(wide)

    def rows_of(self, tokens: list[Tensor]) -> Tensor:
        """[M, H] from each rank's [T, H]."""
        return torch.cat(tokens)[self.routes // self.case.top_k].to(self.gemm)

    def multiply(self, rows: Tensor, weights: Tensor, *, transposed: bool) -> Tensor:
        """Each expert's rows by its weight."""
        out = rows.new_empty(len(rows), weights.shape[1 if transposed else 2])
        for e, here in self.experts:
            weight = weights[e].to(self.gemm)
            torch.mm(rows[here], weight.t() if transposed else weight, out=out[here])
        return out

    def weight_gradient(self, gradients: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """Each expert's gradients^T @ rows."""
        gradients, rows = gradients.to(self.wide), rows.to(self.wide)
        out = torch.zeros_like(weights, dtype=self.wide)
        for e, here in self.experts:
            torch.mm(gradients[here].t(), rows[here], out=out[e])
        return out

    def slots_of(self, rows: Tensor) -> Tensor:
        """Rows at their slots, zeros at those of absent routes: [tokens of all ranks, K, ...]."""
        slots = rows.new_zeros(self.num_slots, *rows.shape[1:])
        slots[self.routes] = rows
        return slots.unflatten(0, (self.num_slots // self.case.top_k, self.case.top_k))

    def tokens_of(self, rows: Tensor) -> list[Tensor]:
        """Each rank's [T, H]: sums of its tokens' rows."""
        return list(self.slots_of(rows).to(self.wide).sum(1).to(self.gemm).split(self.case.tokens))

    @torch.no_grad()
    def forward(self) -> list[Tensor]:
        """out of each rank."""
        self.x = self.rows_of(self.layer.x)
        self.h = self.multiply(self.x, self.layer.w1, transposed=True).to(self.wide)
        self.act = activation(self.h, self.p, self.case.act_limit).to(self.gemm)
        return self.tokens_of(self.multiply(self.act, self.layer.w2, transposed=True))

    @torch.no_grad()
    def backward(self) -> list[Gradients]:
        """Behind forward()."""
        layer, case = self.layer, self.case
        dy = self.rows_of(layer.dy)
        d_act = self.multiply(dy, layer.w2, transposed=False).to(self.wide)
        with torch.enable_grad():
            h, p = self.h.detach().requires_grad_(), self.p.detach().requires_grad_()
            act = activation(h, p, case.act_limit)
        dh, dp = torch.autograd.grad(act, (h, p), d_act)
        dh = dh.to(self.gemm)
        scale = (activation(self.h, torch.ones_like(self.p), case.act_limit) * d_act).norm(dim=1)
        dw1 = self.weight_gradient(dh, self.x, layer.w1)
        dw2 = self.weight_gradient(dy, self.act, layer.w2)
        of_ranks = [
            *[dw.split(case.local) for dw in (dw1, dw2)],
            self.tokens_of(self.multiply(dh, layer.w1, transposed=False)),
            *[self.slots_of(values).split(case.tokens) for values in (dp, scale)],
        ]
        return [Gradients(*of_rank) for of_rank in zip(*of_ranks, strict=True)]


EXACT, ROUNDED = (torch.float64, torch.float64), (torch.float32, torch.bfloat16)


def expected(layer: Layer) -> Expected:
    return Expected(Solver(layer, *EXACT).forward(), Solver(layer, *ROUNDED).forward())


def expected_gradients(layer: Layer) -> tuple[list[Gradients], list[Gradients]]:
    """Per rank, (in fp64, what torch computes in bf16 with the kernels' roundings and d_act in bf16 too)."""

    def solve(*dtypes: torch.dtype) -> list[Gradients]:
        solver = Solver(layer, *dtypes)
        outs = solver.forward()
        return [replace(gradients, out=out) for gradients, out in zip(solver.backward(), outs, strict=True)]

    return solve(*EXACT), solve(*ROUNDED)


def routed_rows(layer: Layer) -> Tensor:
    """[E] rows of each expert."""
    ids = torch.cat(layer.ids).flatten()
    return torch.bincount(ids[(ids >= 0) & (ids < layer.case.experts)].long(), minlength=layer.case.experts)


def distances(first: Tensor, second: Tensor) -> Tensor:
    """[L] of fp64: the norm of each expert's difference, some experts at a time, as fp64 takes much room."""
    parts = [t.split(max(1, 2**27 // first[0].numel())) for t in (first, second)]
    return torch.cat([(a.double() - b.double()).flatten(1).norm(dim=1) for a, b in zip(*parts, strict=True)])


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
            if name.startswith("dw"):
                norm = truth.flatten(1).norm(dim=1)
                distance, usual = distances(ours, truth), distances(theirs, truth)
                error, allowed = (ratio(d.norm().item(), norm.norm().item()) for d in (distance, usual))
            else:
                error, allowed = relative_error(ours, truth), relative_error(theirs, truth)
            little = 1e-6
            if name == "dp" and bool(truth.any()):  # torch may be right by luck in a few sums that cancel
                tokens = case.tokens[r]
                little += 0.01 * (exact[r].dp_scale.norm() / truth.norm()).item() / tokens**0.5
            what = f"{name} of rank {r}: relative error {error:.3g}, torch's in bf16 {allowed:.3g}"
            assert math.isfinite(error) and error <= 2 * allowed + little, what
            if not name.startswith("dw"):
                continue
            assert not bool(ours[rows[r] == 0].any()), f"{name} of rank {r}: experts without rows"
            if case.act_limit == 0:  # one value that rounding moves over the limit changes a small expert
                wrong = (distance > 3 * usual + 1e-6 * norm).nonzero().flatten().tolist()
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


def ratio(distance: float, norm: float) -> float:
    """distance / norm; inf where either is not finite, 0 for two zeros."""
    if not (math.isfinite(distance) and math.isfinite(norm)):
        return math.inf
    return distance / norm if norm > 0 else (math.inf if distance > 0 else 0.0)


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||; inf where one is not finite, 0 for two zeros."""
    return ratio((got.double() - want.double()).norm().item(), want.double().norm().item())


def assert_close(got: Tensor, exact: Tensor, torch_bf16: Tensor, what: str = "out") -> None:
    """error(kernel) <= 2 * error(torch in bf16) + a little, and rows that are exactly zero stay so."""
    error, theirs = relative_error(got, exact), relative_error(torch_bf16, exact)
    fits = math.isfinite(error) and error <= 2 * theirs + 1e-6
    assert fits, f"{what}: relative error {error:.3g}, torch's in bf16 {theirs:.3g}"
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


def assert_row_counts(layer: Layer, calls: list[native.Call]) -> None:
    """The rows of each expert in the GPU's table are a bincount of all ranks' ids."""
    for r, (call, want) in enumerate(zip(calls, routed_rows(layer).split(layer.case.local), strict=True)):
        got = reference.rows(call.schedule, layer.case.local).per_expert
        assert torch.equal(got, want), f"rows of rank {r}'s experts"


def assert_named(
    world: World, missing: int, *, call: int, layer: int, phase: str, expected: str, seen: str
) -> None:
    """Every other rank has one error: a time-out that names `missing`, or that a peer had one before it."""
    found = [error for rank, error in enumerate(world.failures()) if rank != missing]
    late = [error for error in found if isinstance(error, errors.PeerTimeout)]
    assert late and all(isinstance(error, errors.PeerTimeout | errors.PeerAbort) for error in found), found
    for error in late:
        assert (error.peer, error.call, error.layer, error.phase) == (missing, call, layer, phase)
        assert (error.expected, error.seen) == (expected, seen)
        assert world.timeout_s <= error.seconds < 5
    assert all(error.peer != missing for error in found if isinstance(error, errors.PeerAbort))


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
            if n == 0:
                continue
            here, w1 = x[token[start : start + n]], layer.w1[r * case.local + e]
            exact[start : start + n] = here.double() @ w1.double().t()
            rounded[start : start + n] = here @ w1.t()
            start += n
        assert start == len(got)
        assert_close(got, exact, rounded, f"h of rank {r}")


def assert_same_bits(layer: Layer, first: list[native.Call], second: list[native.Call]) -> None:
    """out, schedule and saved h of two runs, both from World.prepare, are equal bit for bit."""
    for r, (a, b) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(a.out, b.out), f"out of rank {r}"
        assert torch.equal(a.schedule, b.schedule), f"schedule of rank {r}"
        if len(a.h):
            assert torch.equal(saved_rows(layer, a, r)[2], saved_rows(layer, b, r)[2]), f"h of rank {r}"


class Neighbour:
    """Something else that keeps the GPU busy, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.values = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)

    def multiply(self, times: int) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(times):
                self.values = (self.values @ self.values).clamp(-1, 1)


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
