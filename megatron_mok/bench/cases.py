"""What one layer is measured on: shapes, routing, random inputs, and the arithmetic of its passes.

Symbols: T tokens, K experts per token, E experts (all on one rank), H hidden size, I expert intermediate
size, M = T * K routed rows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

ROUTINGS = ("balanced", "random", "skewed")
PASSES = ("fwd_nograd", "fwd", "bwd", "bwd_acc32")
ZIPF = 1.2


@dataclass(frozen=True)
class Shape:
    """One layer's sizes, in the order in which `--shape T,H,I,E,K` takes them."""

    T: int
    H: int
    I: int  # noqa: E741 (the field's name for it)
    E: int
    K: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """A name of SHAPES or T,H,I,E,K. ValueError for anything else."""
        if text.upper() in SHAPES:
            return SHAPES[text.upper()]
        try:
            shape = cls(*map(int, text.split(",")))
        except (TypeError, ValueError):
            names = ", ".join(sorted(SHAPES))
            raise ValueError(f"--shape: got {text!r}, need {names} or five numbers T,H,I,E,K") from None
        if min(asdict(shape).values()) < 1 or shape.K > shape.E:
            raise ValueError(f"--shape: got {text!r}, need positive numbers with K <= E")
        return shape

    @property
    def rows(self) -> int:
        return self.T * self.K

    def flops(self, which: str) -> int:
        """6 * M * H * I for a forward pass, 12 * M * H * I for a backward pass."""
        return (6 if which.startswith("fwd") else 12) * self.rows * self.H * self.I

    @property
    def weight_bytes(self) -> int:
        """bf16 weights of the experts that can have rows."""
        return 6 * min(self.E, self.rows) * self.H * self.I

    @property
    def label(self) -> str:
        name = next((name for name, shape in SHAPES.items() if shape == self), None)
        return f"{name + ': ' if name else ''}T{self.T} H{self.H} I{self.I} E{self.E} K{self.K}"


SHAPES = {
    "A": Shape(8192, 2048, 768, 128, 8),  # Qwen3-30B-A3B
    "B": Shape(8192, 4096, 1536, 128, 8),  # Qwen3-235B-A22B
    "C": Shape(2048, 7168, 2048, 8, 8),  # DeepSeek-V3, 8 local experts
    "C512": Shape(512, 7168, 2048, 8, 8),  # C with few tokens
    "C64": Shape(64, 7168, 2048, 8, 8),
    "D": Shape(4096, 7168, 2048, 32, 8),  # DeepSeek-V3, 32 local experts
}


def cases(shape: Shape, routings: list[str]) -> list[tuple[Shape, str]]:
    """(shape, routing) of each measurement.

    With K = E every token goes to every expert, so skew is measured with K = 1, beside a balanced K = 1.
    """
    made = []
    for routing in routings:
        if routing == "skewed" and shape.K == shape.E:
            one = Shape(shape.T, shape.H, shape.I, shape.E, 1)
            made += [(one, "balanced"), (one, "skewed")]
        else:
            made.append((shape, routing))
    return list(dict.fromkeys(made))


def route(shape: Shape, routing: str, generator: torch.Generator) -> Tensor:
    """Expert ids [T, K] int32, distinct for each token.

    balanced: every expert gets the same number of rows (to within one). random: K experts drawn uniformly.
    skewed: every token has expert 0, its other slots follow Zipf(1.2) over the rest; with K = 1, half of the
    tokens have expert 0 and the others are uniform.
    """
    T, E, K, device = shape.T, shape.E, shape.K, generator.device
    if routing == "random":
        return torch.rand(T, E, device=device, generator=generator).topk(K, dim=1).indices.int()
    if routing == "balanced":
        turns = -(-T * K // E)
        if E % K == 0:  # each turn deals every expert once; no token straddles two turns
            deal = torch.rand(turns, E, device=device, generator=generator).argsort(dim=1)
        else:
            deal = torch.randperm(E, device=device, generator=generator).expand(turns, E)
        ids = deal.reshape(-1)[: T * K].view(T, K)
        return ids[torch.randperm(T, device=device, generator=generator)].int().contiguous()
    if routing != "skewed":
        raise ValueError(f"--routing: got {routing!r}, need one of {', '.join(ROUTINGS)}")
    if K == 1:
        rest = torch.randint(1, max(E, 2), (T, 1), device=device, generator=generator) % E
        first = torch.arange(T, device=device).unsqueeze(1) % 2 == 0
        return torch.where(first, 0, rest).int()
    # Gumbel noise on log weights: a draw without replacement in one top-k
    weights = torch.arange(1, E, device=device, dtype=torch.float32).log().mul(-ZIPF)
    uniform = torch.rand(T, E - 1, device=device, generator=generator).clamp_min(1e-20)
    others = (weights - uniform.log().neg().log()).topk(K - 1, dim=1).indices + 1
    return torch.cat([torch.zeros(T, 1, dtype=others.dtype, device=device), others], dim=1).int()


@dataclass
class Inputs:
    """x and dy [T, H]; ids [T, K] int32; p [T, K] fp32; w1 [E, 2I, H] (gate rows first); w2 [E, H, I]."""

    shape: Shape
    routing: str
    x: Tensor
    dy: Tensor
    ids: Tensor
    p: Tensor
    w1: Tensor
    w2: Tensor


def make_inputs(shape: Shape, routing: str, device: str, seed: int, dtype=torch.bfloat16) -> Inputs:
    """Fresh normal inputs; weights scaled so that products keep unit variance; probabilities sum to 1."""
    g = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device, dtype=dtype, generator=g)

    x, dy = normal(shape.T, shape.H), normal(shape.T, shape.H)
    w1 = normal(shape.E, 2 * shape.I, shape.H).mul_(shape.H**-0.5)
    w2 = normal(shape.E, shape.H, shape.I).mul_(shape.I**-0.5)
    p = torch.rand(shape.T, shape.K, device=device, generator=g) + 0.1
    return Inputs(shape, routing, x, dy, route(shape, routing, g), p / p.sum(1, keepdim=True), w1, w2)
