"""The line that says what runs: one for each model that is built, whatever wraps it, from one rank.

A model's layers, all its chunks included, are built before any of them is wrapped or runs: the line counts
the layers built since the line before.
"""

from __future__ import annotations

import torch.distributed as dist

_built = 0


def layer_was_built() -> None:
    global _built
    _built += 1


def pending() -> int:
    """MoE layers of this process that no line has counted yet."""
    return _built


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def say(backend: str, why: str, speaker: int | None) -> None:
    """Print the line on the rank that is to speak; every rank's layers count as said."""
    if rank() == speaker and _built:
        print(f"megatron_mok: {_built} MoE layers on this rank, {backend} back end ({why})", flush=True)
    forget()


def forget() -> None:
    global _built
    _built = 0
