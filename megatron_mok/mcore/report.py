"""The line that says what runs: one for each model that is built, whatever wraps it, from one rank.

A model's layers, all its chunks included, are built before any of them is wrapped or runs: the line counts
the layers built since the line before.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist

_built: weakref.WeakSet[Any] = weakref.WeakSet()  # a model that was dropped is not counted


def layer_was_built(layer: Any) -> None:
    _built.add(layer)


def pending() -> int:
    """MoE layers of this process that no line has counted yet."""
    return len(_built)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def say(backend: str, why: str, speaker: int | None) -> None:
    """Print the line on the rank that is to speak; every rank's layers count as said."""
    if rank() == speaker and _built:
        print(f"megatron_mok: {len(_built)} MoE layers on this rank, {backend} back end ({why})", flush=True)
    forget()


def forget() -> None:
    _built.clear()
