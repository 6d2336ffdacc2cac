"""Run-time figures of the layers for Megatron's TensorBoard and W&B writers, without a host synchronisation.

A call of a layer leaves three words of its schedule on the device, and only in steps whose figures are to be
written. When the step ends they become sums and maxima over all ranks, which travel to the host while the
next step runs, and are written when that one ends.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import runtime
from ..reference.schedule import GROUP_ROWS
from .refusals import NAME

_recording = False  # in this step
_calls: dict[int, list[Tensor]] = defaultdict(list)  # rows of h saved -> rows, blocks, groups of each call
_travelling: tuple[int, Tensor, torch.cuda.Event | None] | None = None  # iteration, figures, their arrival
_waited: Tensor | int = 0  # ns waited for peers before this step


def recorder() -> Callable[[Tensor, int], None] | None:
    """What a layer is to call with the schedule of a forward call and the rows of h that it saved; None where
    nobody wants this step's figures.
    """
    return _record if _recording else None


def _record(schedule: Tensor, saved: int) -> None:
    if schedule.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # the graph's replays would not come by here
    _calls[saved].append(schedule[:3].clone())  # not a view, which would keep the table


def after_step(
    iteration: int, writer: Any = None, wandb_writer: Any = None, *, record_next: bool = True
) -> None:
    """A step has ended: write the figures that were under way, send off this step's, say whether the next
    step's are wanted.

    Collective over all ranks, which give the same `iteration` and `record_next`. Writers (TensorBoard's
    SummaryWriter, a W&B run) are those of this rank, or None. Megatron's training loop calls it by itself.

    A call is one MoE layer on one micro-batch on one rank. Written for the step, each a number:

        mok/rows             routed rows of a call, mean over the step's calls on all ranks
        mok/rows-max         the most rows of any of them
        mok/rows-recomputed  rows of a call beyond save_capacity, in whole groups of 8, mean over them
        mok/workspace-bytes  symmetric memory of the open workspaces, of the rank with the most
        mok/peer-wait-ms     that the kernels of a rank waited for other ranks, mean over the ranks
        mok/peer-wait-ms-max of the rank that waited longest; both without the reference back end. Too low in
                             a step that makes a workspace anew
    """
    global _recording, _travelling, _waited
    if _travelling is not None and (writer is not None or wandb_writer is not None):
        for name, value in _figures().items():
            if writer is not None:
                writer.add_scalar(name, value, _travelling[0])
            if wandb_writer is not None:
                wandb_writer.log({name: value}, _travelling[0])
    _travelling = _send(iteration) if _recording else None
    _calls.clear()
    _recording = record_next
    _waited = _waited_so_far() if record_next else 0


def _waited_so_far() -> Tensor | int:
    """Nanoseconds that this rank's kernels have waited for peers, int64 [] on the device."""
    words = runtime.waited_ns()
    return torch.cat(words).sum() if words else 0


def _figures() -> dict[str, float]:
    assert _travelling is not None
    _, values, arrival = _travelling
    if arrival is not None:
        arrival.synchronize()  # a step ago: it has long been there
    calls, rows, recomputed, waited, most, workspace, waited_most = values.tolist()
    if not calls:
        return {}
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    waits = {"mok/peer-wait-ms": waited / ranks / 1e6, "mok/peer-wait-ms-max": waited_most / 1e6}
    return {
        "mok/rows": rows / calls,
        "mok/rows-max": most,
        "mok/rows-recomputed": recomputed / calls,
        "mok/workspace-bytes": workspace,
        **(waits if workspace else {}),
    }


def _send(iteration: int) -> tuple[int, Tensor, torch.cuda.Event | None]:
    """Reduce this step's words over the ranks, and start their way to the host."""
    make = functools.partial(torch.full, dtype=torch.int64, device=torch.cuda.current_device())
    rows, recomputed = [make((1,), 0)], [make((1,), 0)]  # a stage may have no layer of ours
    for saved, calls in _calls.items():
        words = torch.stack(calls).long()
        rows.append(words[:, 0])
        recomputed.append((GROUP_ROWS * words[:, 2] - saved).clamp(min=0))
    count = sum(map(len, _calls.values()))
    waited = (make((), 0) + _waited_so_far() - _waited).clamp(min=0)  # a workspace made anew starts from zero
    sums = torch.stack([make((), count), torch.cat(rows).sum(), torch.cat(recomputed).sum(), waited])
    most = torch.stack([torch.cat(rows).max(), make((), runtime.open_workspace_bytes()), waited])
    if dist.is_initialized():
        dist.all_reduce(sums)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
    values = torch.cat([sums, most])
    if not values.is_cuda:
        return iteration, values, None
    on_host = values.to("cpu", non_blocking=True)  # torch makes it pinned
    arrival = torch.cuda.Event()
    arrival.record()
    return iteration, on_host, arrival


def forget() -> None:
    """Record nothing, write nothing more."""
    global _recording, _travelling, _waited
    _recording, _travelling, _waited = False, None, 0
    _calls.clear()


def wrap(training_log: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's training_log, which every rank calls after each step, with our figures.

    They come first: they belong to the step before, and W&B takes no step older than the last one.
    """
    signature = inspect.signature(training_log)

    @functools.wraps(training_log)
    def log_with_figures(*positional: Any, **named: Any) -> Any:
        from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

        args = get_args()
        chosen = getattr(getattr(args, "language_model", args), "moe_token_dispatcher_type", None)
        # The last rank alone has writers; all know whether they were asked for.
        asked = getattr(args, "tensorboard_dir", None) or getattr(args, "wandb_project", None)
        if chosen == NAME and asked:
            iteration = signature.bind(*positional, **named).arguments["iteration"]
            wanted = (iteration + 1) % args.tensorboard_log_interval == 0
            after_step(iteration, get_tensorboard_writer(), get_wandb_writer(), record_next=wanted)
        return training_log(*positional, **named)

    return log_with_figures
