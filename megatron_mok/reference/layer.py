"""The whole layer on one rank: routing, dispatch, experts, combine, and the way back.

Symbols: R ranks, T tokens here, K experts per token, E experts, L = E/R here, H hidden, S rows of h saved,
N = 2I columns of h (I without a gate).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import WorkspaceTooSmall
from . import moe, mxfp8, schedule
from .activation import Activation
from .exchange import Call, Exchange

NEEDS_DX, NEEDS_DP = 1, 2
_OPERANDS: dict[str, moe.Operand] = {"bf16": moe.exact_operand, "mxfp8": mxfp8.operand}


def forward(
    exchange: Exchange,
    x: Tensor,
    ids: Tensor,
    probs: Tensor,
    w1: Sequence[Tensor],
    w2: Sequence[Tensor],
    num_experts: int,
    max_tokens: int,
    save_rows: int,
    activation: int,
    act_limit: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out [T, H], h [S, N], schedule table); with save_rows = -1 the last two are empty.

    Collective. WorkspaceTooSmall where T > max_tokens, after telling the peers.
    """
    (tokens, top_k), hidden, num_local = ids.shape, x.shape[1], num_experts // exchange.size
    if tokens > max_tokens:
        error = WorkspaceTooSmall(
            f"tokens: got {tokens}, need at most {max_tokens}, for which the workspace was made; raise "
            "max_tokens (--mok-max-tokens), or between steps call reserve(max_tokens) on all ranks",
            got=tokens,
            max_tokens=max_tokens,
        )
        with exchange.aborting():
            raise error
    words = exchange.publish(Call.FORWARD, tokens=tokens)
    every_ids, every_p, every_t = exchange.gather_routing(ids, probs, words)
    table = schedule.build(
        every_ids, every_p, every_t, rank=exchange.rank, num_experts=num_experts, max_tokens=max_tokens
    )
    rows = schedule.rows(table, num_local)
    routed = ids[(ids >= 0) & (ids < num_experts)].long()
    asked = torch.bincount(routed // num_local, minlength=exchange.size).tolist()
    route = exchange.connect(rows.source, rows.slot, asked)
    y, h = moe.forward(
        exchange.pull(route, x[route.slot // top_k]),
        rows.p,
        rows.per_expert,
        w1,
        w2,
        Activation(activation),
        act_limit,
        _OPERANDS[exchange.precision],
    )
    out = moe.combine(exchange.push(route, y, tokens * top_k).view(tokens, top_k, hidden), x.dtype)
    if save_rows < 0:
        return out, h.new_empty(0, h.shape[1]), table.new_empty(0)
    index = rows.saved_index()
    kept = index < save_rows // schedule.GROUP_ROWS * schedule.GROUP_ROWS
    saved = h.new_zeros(save_rows, h.shape[1])
    saved[index[kept]] = h[kept]
    return out, saved, table


def backward(
    exchange: Exchange,
    dy: Tensor,
    x: Tensor,
    w1: Sequence[Tensor],
    w2: Sequence[Tensor],
    h: Tensor,
    table: Tensor,
    dw1: Sequence[Tensor],
    dw2: Sequence[Tensor],
    num_experts: int,
    top_k: int,
    accumulate: bool,
    needs: int,
    activation: int,
    act_limit: float,
) -> tuple[Tensor, Tensor]:
    """(dx [T, H], dp [T, K] fp32), each with T = 0 rows where `needs` does not ask for it. Collective.

    Whether dx and dp travel is decided by the needs of all ranks together, so that they may differ.
    """
    tokens, hidden = x.shape
    rows = schedule.rows(table, num_experts // exchange.size)
    owned = torch.bincount(rows.source, minlength=exchange.size).tolist()
    words = exchange.publish(Call.BACKWARD, tokens=tokens, needs=needs, asks=tuple(owned))
    needed = 0
    for word in words:
        needed |= word.needs
    route = exchange.connect(rows.source, rows.slot, [word.asks[exchange.rank] for word in words])
    index = rows.saved_index()
    saved = index < len(h) // schedule.GROUP_ROWS * schedule.GROUP_ROWS
    h_rows = h.new_empty(len(index), h.shape[1])
    h_rows[saved] = h[index[saved]]
    token = route.slot // top_k
    dx, dp = moe.backward(
        exchange.pull(route, dy[token]),
        exchange.pull(route, x[token]),
        rows.p,
        rows.per_expert,
        w1,
        w2,
        h_rows,
        saved,
        dw1,
        dw2,
        accumulate,
        Activation(activation),
        act_limit,
        _OPERANDS[exchange.precision],
    )
    out_dx, out_dp = x.new_empty(0, hidden), dp.new_empty(0, top_k, dtype=torch.float32)
    if needed & NEEDS_DX:
        slots = exchange.push(route, dx, tokens * top_k).view(tokens, top_k, hidden)
        if needs & NEEDS_DX:
            out_dx = moe.combine(slots, x.dtype)
    if needed & NEEDS_DP:
        slots = exchange.push(route, dp.float(), tokens * top_k).view(tokens, top_k)
        if needs & NEEDS_DP:
            out_dp = slots
    return out_dx, out_dp
