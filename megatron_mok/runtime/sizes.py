"""How much memory a configuration takes, without allocating any.

Symbols: R ranks, T tokens, K experts per token, E experts, L = E/R, H hidden, I intermediate size.
"""

from __future__ import annotations

import torch

from .. import native
from ..reference import schedule
from ..reference.activation import from_name

# As in csrc/layout/workspace.h.
_ALIGN_BYTES = 1024  # every buffer of the workspace starts on it
_FLAGS_BYTES, _CONTROL_BYTES = 1160, 72


def workspace_bytes(
    *, max_tokens: int, hidden: int, top_k: int, num_ranks: int, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Bytes of symmetric memory per rank, for all layers of one (group, hidden, top_k, dtype) together.

    Sources of x and dy, 2 * T * H; one slot per route, T * K * H; router gradients; the routing of all ranks
    (the only part that grows with R: 8 bytes per route); flags. Rings come on top: see local_bytes.
    """
    routes = max_tokens * top_k
    rows = max_tokens * hidden * dtype.itemsize
    routing = num_ranks * routes * 4
    buffers = [_FLAGS_BYTES, _CONTROL_BYTES, num_ranks * 4, routing, routing]
    buffers += [rows, rows, routes * hidden * dtype.itemsize, routes * 4]
    return sum(-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in buffers)


def local_bytes(
    *,
    max_tokens: int,
    hidden: int,
    ffn: int,
    top_k: int,
    num_experts: int,
    num_ranks: int,
    num_sms: int = 0,
    minibatch_rows: int = 0,
    ring_rows: int = 0,
) -> int:
    """Bytes of a rank's own buffers (rings and counters) beside the workspace, on the CUDA back end.

    One set for all layers of one (workspace, num_experts, ffn); forward and backward share it. The library
    says it, so LibraryMissing where that is not built; num_sms, minibatch_rows, ring_rows: 0 for the default.
    """
    _, layout = native.workspace_layout(
        rank=0, num_ranks=num_ranks, num_experts=num_experts, top_k=top_k, hidden=hidden, intermediate=ffn,
        max_tokens=max_tokens,
        settings=native.Settings(
            num_sms=num_sms, minibatch_units=-(-minibatch_rows // native.UNIT_ROWS), ring_rows=ring_rows
        ),
    )  # fmt: skip
    return layout.local_backward_bytes


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
