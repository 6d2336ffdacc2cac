"""Layers on virtual ranks of one GPU, and what they must compute: fp64, expert by expert, same values.

Symbols: R ranks, T tokens of a rank, K experts per token, E experts, L = E/R, H hidden size, I intermediate
size.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_mok import native
from megatron_mok.reference import schedule as reference
from megatron_mok.runtime.virtual import VirtualRanks

# A wait that should succeed and does not is an error after this long, and not a test run that stands still.
TIMEOUT_S = 10.0
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


def random_case(seed: int) -> Case:
    """Sizes drawn log-uniformly, within WEIGHT_BYTES and FLOPS."""
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
            routing=rng.choice(["random", "random", "absent", "skewed", "repeated", "one expert"]),
            seed=seed,
            act_limit=rng.choice([0.0, 0.0, 0.0, 0.5]),
            stacked=rng.random() < 0.5,
            max_tokens=max(tokens) + rng.choice([0, 0, 77]),
        )
        flops = 6.0 * sum(tokens) * top_k * hidden * intermediate
        if 6 * case.experts * hidden * intermediate <= WEIGHT_BYTES and flops <= FLOPS:
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
    """A case's tensors: x[r] [T, H] bf16, ids[r] and probs[r] [T, K]; w1 [E, 2I, H], w2 [E, H, I]."""

    case: Case
    x: list[Tensor]
    ids: list[Tensor]
    probs: list[Tensor]
    w1: Tensor
    w2: Tensor

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

    def prepare(self, layer: Layer, save: bool = False, **options) -> list[native.Call]:
        """Calls with poisoned outputs and local buffers."""
        case = layer.case
        rows = [-(-t * case.top_k * 5 // 4) // 8 * 8 + 8 if save else 0 for t in case.tokens]
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

    def forward(self, layer: Layer, save: bool = False, **options) -> list[native.Call]:
        """One checked call: raises what a rank raises."""
        calls = self.prepare(layer, save, **options)
        self.virtual.launch(calls)
        torch.cuda.synchronize()
        self.virtual.check()
        return calls


@dataclass
class Expected:
    """out[r] [T, H] in fp64, and what torch computes in bf16 with the kernels' rounding points."""

    out: list[Tensor]
    out_bf16: list[Tensor]


def activation(h: Tensor, p: Tensor, limit: float) -> Tensor:
    gate, up = h.chunk(2, -1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
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
