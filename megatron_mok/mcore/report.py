"""The line that says what runs: one for each model that is built, whatever wraps it, from one rank.

A model's layers, all its chunks included, are built before any of them is wrapped or runs: the line counts
the layers built since the line before.
"""

from __future__ import annotations

_built = 0


def layer_was_built() -> None:
    global _built
    _built += 1


def pending() -> int:
    """MoE layers of this process that no line has counted yet."""
    return _built


def say(backend: str, why: str, *, aloud: bool) -> None:
    """Print the line if this rank is the one to do so (`aloud`); the layers count as said in any case."""
    if aloud and _built:
        print(f"megatron_mok: {_built} MoE layers on this rank, {backend} back end ({why})", flush=True)
    forget()


def forget() -> None:
    global _built
    _built = 0
