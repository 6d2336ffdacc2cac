"""Runs inside a rank: save under one dispatcher and layout, resume under another."""

from __future__ import annotations

import pathlib
from typing import Any

import model
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from model import layout

SEED_OF_RESUMED = 2  # other weights than the saved ones, so that a tensor that is not loaded shows


def sharded(trainer: model.Trainer, loading: bool, optimizer: bool = True) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    chunk = trainer.models[0].module
    # Megatron's training loop sets this flag: with one rank per expert-parallel group there is one optimizer
    # where there are two otherwise, and their states are to have the same names.
    metadata = {"dp_cp_group": group, "chained_optim_avoid_prefix": True}
    state: dict[str, Any] = {"model": chunk.sharded_state_dict(metadata=metadata)}
    if optimizer:
        state["optimizer"] = trainer.optimizer.sharded_state_dict(
            state["model"], is_loading=loading, metadata=metadata
        )
    return state


def save(trainer: model.Trainer, folder: str, **options: Any) -> None:
    if dist.get_rank() == 0:
        pathlib.Path(folder).mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(sharded(trainer, loading=False, **options), folder)


def load(trainer: model.Trainer, folder: str, optimizer: bool = True) -> None:
    state = dist_checkpointing.load(sharded(trainer, loading=True, optimizer=optimizer), folder)
    trainer.models[0].module.load_state_dict(state["model"])
    if optimizer:
        trainer.optimizer.load_state_dict(state["optimizer"])


def save_and_go_on(
    dispatcher: str, folder: str, ep: int, before: int, after: int, **options: Any
) -> list[float]:
    """`before` steps, a checkpoint, and the losses of `after` more steps."""
    layout(ep)
    trainer = model.Trainer(dispatcher, **options)
    trainer.steps(before)
    save(trainer, folder)
    return trainer.steps(after)["losses"]


def resume(dispatcher: str, folder: str, ep: int, before: int, after: int, **options: Any) -> list[float]:
    """Losses of `after` steps from the checkpoint."""
    layout(ep)
    trainer = model.Trainer(dispatcher, seed=SEED_OF_RESUMED, **options)
    load(trainer, folder)
    for _ in range(before * trainer.micro_batches):
        next(trainer.batches[0])
    return trainer.steps(after)["losses"]


def keys(dispatcher: str, **options: Any) -> dict[str, Any]:
    """What a checkpoint of this dispatcher holds of the experts: key -> global shape, offset, replica."""
    layout(4)
    chunk = model.Trainer(dispatcher, **options).models[0].module
    state = chunk.sharded_state_dict()
    found = {}
    for name, item in state.items():
        if ".experts." in name:
            parts = item.build() if hasattr(item, "build") else item
            for i, part in enumerate(parts if isinstance(parts, list | tuple) else [parts]):
                found[f"{name}/{i}"] = tuple(
                    str(getattr(part, field, None))
                    for field in ("key", "global_shape", "global_offset", "replica_id")
                )
    return found


def pattern_round_trip(first: str, second: str, folder: str) -> dict[str, bool]:
    """B83: gate rows 1, up rows 2, down 3, saved by one and loaded by the other; weights bit for bit, same
    loss."""
    layout(4)

    def fill(trainer: model.Trainer) -> None:
        for name, parameter in trainer.models[0].module.named_parameters():
            if ".experts.local_experts." in name and "linear_fc1" in name:
                half = parameter.shape[0] // 2
                parameter.data[:half] = 0.01
                parameter.data[half:] = 0.02
            elif ".experts.local_experts." in name:
                parameter.data.fill_(0.03)

    source = model.Trainer(first, mtp_num_layers=1)
    fill(source)
    save(source, folder, optimizer=False)
    target = model.Trainer(second, seed=SEED_OF_RESUMED, mtp_num_layers=1)
    load(target, folder, optimizer=False)
    mine = dict(source.models[0].module.named_parameters())
    theirs = dict(target.models[0].module.named_parameters())
    return {
        "names": list(mine) == list(theirs),
        "mtp": any("mtp" in name and "local_experts" in name for name in mine),
        "weights": all(mine[name].equal(theirs[name]) for name in mine),
        "loss": abs(source.gradients() - target.gradients()) <= 5e-7,
    }
