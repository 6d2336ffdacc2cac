"""Runs inside a rank: save under one dispatcher and layout, resume under another."""

from __future__ import annotations

import pathlib
import queue
from collections.abc import Iterator
from typing import Any

import model
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from model import layout

# Megatron starts a process on each rank for what its writers report, which imports Megatron again: ten
# seconds in all. A save that is not asynchronous writes in this process, and so needs none.
filesystem_async._results_queue = queue.Queue()

SEED_OF_RESUMED = 2  # other weights than the saved ones, so that a tensor that is not loaded shows


def moments(trainer: model.Trainer, weights: dict[str, Any]) -> dict[str, Any]:
    """Adam's state as sharded tensors named after the weights; made where there is none yet.

    Megatron's own names depend on the number of its optimizers, which is one at EP=1 and two above: it cannot
    load one's state into the other, whatever the dispatcher.
    """
    state: dict[str, Any] = {}
    for parameter, name, adam in parameters(trainer):
        mine = adam.state[parameter]
        for moment in ("exp_avg", "exp_avg_sq"):
            mine.setdefault(moment, torch.zeros_like(parameter))
            state[f"{name}.{moment}"] = make_sharded_optimizer_tensor(
                weights[name], mine[moment], f"moments.{moment}"
            )
        state["step"] = float(mine.setdefault("step", torch.tensor(0.0)))
    return state


def parameters(trainer: model.Trainer) -> Iterator[tuple[torch.nn.Parameter, str, Any]]:
    names = {parameter: name for name, parameter in trainer.models[0].module.named_parameters()}
    for part in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, names[parameter], part.optimizer


def sharded(trainer: model.Trainer, loading: bool, optimizer: str = "megatron") -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    chunk = trainer.models[0].module
    state: dict[str, Any] = {"model": chunk.sharded_state_dict(metadata={"dp_cp_group": group})}
    if optimizer == "megatron":
        state["optimizer"] = trainer.optimizer.sharded_state_dict(state["model"], is_loading=loading)
    elif optimizer == "moments":
        state["moments"] = moments(trainer, state["model"])
    return state


def save(trainer: model.Trainer, folder: str, **options: Any) -> None:
    if dist.get_rank() == 0:
        pathlib.Path(folder).mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(sharded(trainer, loading=False, **options), folder)


def load(trainer: model.Trainer, folder: str, optimizer: str = "megatron") -> None:
    state = dist_checkpointing.load(sharded(trainer, loading=True, optimizer=optimizer), folder)
    trainer.models[0].module.load_state_dict(state["model"])
    if optimizer == "megatron":
        trainer.optimizer.load_state_dict(state["optimizer"])
    elif optimizer == "moments":
        for parameter, name, adam in parameters(trainer):
            for moment in ("exp_avg", "exp_avg_sq"):
                adam.state[parameter][moment].copy_(state["moments"][f"{name}.{moment}"])
            adam.state[parameter]["step"] = torch.tensor(state["moments"]["step"])


def save_and_go_on(
    dispatcher: str, folder: str, ep: int, before: int, after: int, **options: Any
) -> list[float]:
    """`before` steps, a checkpoint in both forms of the optimizer's state, and the losses of `after` more."""
    layout(ep)
    trainer = model.Trainer(dispatcher, **options)
    trainer.steps(before)
    for optimizer in ("megatron", "moments"):
        save(trainer, f"{folder}-{optimizer}", optimizer=optimizer)
    return trainer.steps(after)["losses"]


def resume(
    dispatcher: str, folder: str, optimizer: str, ep: int, before: int, after: int, **options: Any
) -> list[float]:
    """Losses of `after` steps from the checkpoint."""
    layout(ep)
    trainer = model.Trainer(dispatcher, seed=SEED_OF_RESUMED, **options)
    load(trainer, f"{folder}-{optimizer}", optimizer)
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
    save(source, folder, optimizer="none")
    target = model.Trainer(second, seed=SEED_OF_RESUMED, mtp_num_layers=1)
    load(target, folder, optimizer="none")
    mine = dict(source.models[0].module.named_parameters())
    theirs = dict(target.models[0].module.named_parameters())
    return {
        "names": list(mine) == list(theirs),
        "mtp": any("mtp" in name and "local_experts" in name for name in mine),
        "weights": all(mine[name].equal(theirs[name]) for name in mine),
        "loss": abs(source.gradients() - target.gradients()) <= 5e-7,
    }
