"""check_every: now and then one layer's output is compared with the reference, on the job's own data."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..reference import exchange, layer

if TYPE_CHECKING:
    from .comm import Comm

# of ||out - reference|| / ||reference||: some roundings in bf16, the order of sums in fp32 and fp64
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4, torch.float64: 1e-10}


class LayerCheck:
    """Counts the training forwards of one layer, the first that called; every N-th is due."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.layer: int | None = None
        self.forwards = 0

    def due(self, layer_number: int) -> bool:
        if self.layer is None:
            self.layer = layer_number
        if not self.every or layer_number != self.layer or not torch.is_grad_enabled():
            return False
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False  # the reference reads counts on the host
        self.forwards += 1
        return self.forwards % self.every == 0


@torch.no_grad()
def compare(comm: Comm, arguments: tuple, out: Tensor) -> None:
    """RuntimeError, on all ranks, where `out` [T, H] of any rank is not the reference's. Collective."""
    x, ids, probs, w1, w2, _, num_experts, max_tokens, _, _, activation, act_limit = arguments
    assert comm.control is not None  # it has just run a forward
    ranks = exchange.lookup(comm.control)
    want, _, _ = layer.forward(
        ranks, x, ids, probs, w1, w2, num_experts, max_tokens, -1, activation, act_limit
    )
    norm = want.double().norm()
    error = ((out.double() - want.double()).norm() / (norm if norm > 0 else 1)).item()
    errors = [json.loads(text) for text in ranks.gather_bytes(json.dumps(repr(error)).encode())]
    limit = TOLERANCE[x.dtype]
    wrong = {rank: text for rank, text in enumerate(errors) if not float(text) <= limit}
    if wrong:
        raise RuntimeError(
            f"check_every: ||out - reference|| / ||reference|| by rank: {wrong}, need at most {limit}; "
            "train with another dispatcher, and report these shapes and routes"
        )
