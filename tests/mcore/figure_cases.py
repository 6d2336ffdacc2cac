"""Runs inside a rank: what the figures say of steps whose routing is known."""

from __future__ import annotations

from typing import Any

import model
import torch
import torch.distributed as dist
from cases import E, K, layer_config, make_layer, random_routes, run, tokens_of

import megatron_mok
from megatron_mok.mcore import figures


class Writer:
    """TensorBoard's and W&B's in one: keeps what it is given."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.logged: list[tuple[dict[str, float], int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((values, step))


def _writer() -> Writer | None:
    """As in Megatron, the last rank alone has one."""
    return Writer() if dist.get_rank() == dist.get_world_size() - 1 else None


def known_routes(save_capacity: float, counts: list[list[int]]) -> dict[str, Any]:
    """Step 5 has one micro-batch for each entry of `counts`, the tokens of each rank; step 6 has none.

    What was written after steps 5, 6, 7, and [rows, recomputed] of this rank's calls as the routing says.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    layer, writer, want = make_layer(layer_config()), _writer(), []
    megatron_mok.configure(save_capacity=save_capacity, max_tokens=64)
    figures.after_step(4, writer, writer)
    for seed, per_rank in enumerate(counts):
        tokens = per_rank[rank]
        probs, routing = random_routes(tokens, seed=seed)
        run(layer, tokens_of(tokens), probs, routing)
        with torch.no_grad():  # evaluation does not count
            layer(tokens_of(tokens).unsqueeze(1))
        every: list[Any] = [None] * world
        dist.all_gather_object(every, routing)
        local = slice(rank * E // world, (rank + 1) * E // world)
        per_expert = torch.cat(every)[:, local].sum(0).tolist()
        kept = -(-int(save_capacity * tokens * K) // 8) * 8
        want.append([sum(per_expert), max(0, sum(-(-n // 8) * 8 for n in per_expert) - kept)])
    written = []
    for step in (5, 6, 7):
        figures.after_step(step, writer, writer, record_next=step < 6)
        written.append(list(writer.scalars) if writer else None)
    figures.forget()
    return {"written": written, "logged": writer.logged if writer else None, "want": want}


def in_a_group(save_capacity: float, counts: list[list[int]]) -> dict[str, Any]:
    model.layout(2)
    return known_routes(save_capacity, counts)


def trained(ep: int, pp: int, **options: Any) -> dict[str, Any]:
    """One training step without figures, one with."""
    model.layout(ep, pp)
    trainer, writer = model.Trainer("mok", **options), _writer()
    trainer.step()
    idle = len(figures._calls)
    figures.after_step(1, writer)
    trainer.step()
    calls = sum(map(len, figures._calls.values()))
    figures.after_step(2, writer, record_next=False)
    trainer.step()
    late = len(figures._calls)
    figures.after_step(3, writer, record_next=False)
    scalars = {name: value for name, value, step in writer.scalars if step == 2} if writer else None
    return {"idle": idle + late, "calls": calls, "scalars": scalars, "all": writer and len(writer.scalars)}
