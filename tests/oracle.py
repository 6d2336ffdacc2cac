"""What the layer must compute, written without any of its code: loops, fp64, torch's own autograd.

Symbols: T tokens, K experts per token, E experts, H hidden, I intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Problem:
    """One layer with all its experts: x [T, H], ids and p [T, K], w1 [E, N, H], w2 [E, H, I], dy [T, H]."""

    x: Tensor
    ids: Tensor
    p: Tensor
    w1: Tensor
    w2: Tensor
    dy: Tensor
    activation: str = "swiglu"
    limit: float | None = None

    @property
    def num_experts(self) -> int:
        return len(self.w1)


def problem(
    tokens=24,
    hidden=16,
    ffn=12,
    experts=4,
    top_k=2,
    dtype=torch.float32,
    activation="swiglu",
    limit=None,
    seed=0,
) -> Problem:
    """Random values that `dtype` holds exactly, weights scaled so that every stage stays of order one."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=g)).to(dtype)

    columns = ffn if activation == "squared_relu" else 2 * ffn
    return Problem(
        x=normal(tokens, hidden),
        ids=torch.rand(tokens, experts, generator=g).topk(top_k).indices.int(),
        p=torch.rand(tokens, top_k, generator=g),
        w1=normal(experts, columns, hidden, scale=hidden**-0.5),
        w2=normal(experts, hidden, ffn, scale=ffn**-0.5),
        dy=normal(tokens, hidden),
        activation=activation,
        limit=limit,
    )


def expert(x: Tensor, p: Tensor, w1: Tensor, w2: Tensor, activation: str, limit: float | None) -> Tensor:
    """One expert on rows x [M, H] with probabilities p [M]."""
    h = x @ w1.T
    if activation == "squared_relu":
        a = F.relu(h) ** 2
    else:
        gate, up = h.chunk(2, -1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        functions = {"swiglu": F.silu, "geglu": F.gelu, "quick_geglu": lambda g: g * torch.sigmoid(1.702 * g)}
        a = functions[activation](gate) * up
    return (a * p.unsqueeze(1)) @ w2.T


def token_loop(x, ids, p, w1, w2, activation="swiglu", limit=None) -> Tensor:
    """Token by token, route by route. Small shapes only."""
    rows = []
    for t in range(len(x)):
        total = torch.zeros_like(x[t : t + 1])
        for k in range(ids.shape[1]):
            e = int(ids[t, k])
            if 0 <= e < len(w1):
                total = total + expert(x[t : t + 1], p[t, k : k + 1], w1[e], w2[e], activation, limit)
        rows.append(total)
    return torch.cat(rows) if rows else x.clone()


def expert_loop(x, ids, p, w1, w2, activation="swiglu", limit=None) -> Tensor:
    """The same, expert by expert, for larger shapes (tested against token_loop)."""
    out = torch.zeros_like(x)
    for e, (w1_e, w2_e) in enumerate(zip(w1.unbind(0), w2.unbind(0), strict=True)):
        token, k = (ids == e).nonzero(as_tuple=True)
        if len(token):
            y = expert(x[token], p[token, k], w1_e, w2_e, activation, limit)
            out = out.index_add(0, token, y)
    return out


def solve(q: Problem, layer=expert_loop) -> dict[str, Tensor]:
    """out and all gradients in fp64: {out, dx, dp, dw1, dw2}."""
    x, p, w1, w2 = (t.detach().double().requires_grad_() for t in (q.x, q.p, q.w1, q.w2))
    out = layer(x, q.ids, p, w1, w2, q.activation, q.limit)
    grads = (None,) * 4  # where no token has a route
    if out.requires_grad:
        grads = torch.autograd.grad(out, (x, p, w1, w2), q.dy.double(), allow_unused=True)
    filled = [torch.zeros_like(v) if g is None else g for g, v in zip(grads, (x, p, w1, w2), strict=True)]
    return dict(zip(("out", "dx", "dp", "dw1", "dw2"), (out.detach(), *filled), strict=True))


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||, and the norm of got where want is zero."""
    got, want = got.double(), want.double()
    norm = want.norm().item()
    return (got - want).norm().item() / (norm or 1.0)


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    errors = {name: relative_error(got[name], want[name]) for name in want}
    assert all(e <= tolerance for e in errors.values()), f"relative errors {errors}, need <= {tolerance}"


def assert_equal_bits(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    different = [name for name in want if not torch.equal(got[name], want[name])]
    assert not different, f"not bit-equal: {different}"
