"""How much memory a configuration takes, without allocating any.

Symbols: R ranks, T tokens, K experts per token, E experts, L = E/R, H hidden, I intermediate size.
"""

from __future__ import annotations

import torch

from ..reference import schedule
from ..reference.activation import from_name

_ALIGN_BYTES = 256  # every buffer of the workspace starts on it
FLAGS_BYTES = 16384


def workspace_bytes(
    *, max_tokens: int, hidden: int, top_k: int, num_ranks: int, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Bytes of symmetric memory per rank, for all layers of one (group, hidden, top_k, dtype) together.

    Sources of x and dy, 2 * T * H; one slot per route, T * K * H; router gradients; the routing of all ranks
    (the only part that grows with R: 8 bytes per route); flags.
    """
    routes = max_tokens * top_k
    rows = max_tokens * hidden * dtype.itemsize
    buffers = [rows, rows, routes * hidden * dtype.itemsize, routes * 4]
    buffers += [num_ranks * routes * 4, num_ranks * routes * 4, num_ranks * 4, FLAGS_BYTES]
    return sum(-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in buffers)


def saved_bytes(
    *,
    tokens: int,
    ffn: int,
    top_k: int,
    num_experts: int,
    num_ranks: int,
    max_tokens: int | None = None,
    save_capacity: float = 1.25,
    activation: str = "swiglu",
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Bytes that one layer keeps for backward, per micro-batch in flight: h and the schedule table.

    x is kept by autograd and not counted. The table is sized for the worst routing, since the host does not
    know how many rows arrive.
    """
    columns = from_name(activation).fc1_rows(ffn)
    h = schedule.saved_rows(save_capacity, tokens, top_k) * columns * dtype.itemsize
    words = schedule.table_words(num_ranks, max_tokens or tokens, top_k, num_experts // num_ranks)
    return h + 4 * words
