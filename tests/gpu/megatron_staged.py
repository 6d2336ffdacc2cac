"""Collectives of CUDA tensors over gloo, by way of the host: for ranks that share a GPU, which NCCL refuses.

gloo itself moves CUDA tensors in a few collectives only. `install` before Megatron-Core is imported, which
takes some of these functions by name. Groups of other backends, and CPU tensors, are left alone.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

# The tensors that each fills, and those that it reads.
COLLECTIVES = {
    "all_reduce": (("tensor",), ()),
    "broadcast": (("tensor",), ()),
    "all_gather": (("tensor_list",), ("tensor",)),
    "all_gather_into_tensor": (("output_tensor",), ("input_tensor",)),
    "reduce_scatter_tensor": (("output",), ("input",)),
    "all_to_all_single": (("output",), ("input",)),
}


class Done:
    """The work of a collective that has ended."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Received:
    """A receive into host memory: waiting also copies."""

    def __init__(self, work: Any, host: torch.Tensor, tensor: torch.Tensor) -> None:
        self.work, self.host, self.tensor = work, host, tensor

    def wait(self, *arguments: Any) -> bool:
        done = self.work.wait(*arguments)
        with torch.no_grad():  # pipelines receive into leaves that require grad
            self.tensor.copy_(self.host)
        return done


def over_gloo(group: Any) -> bool:
    return dist.get_backend(group) == "gloo"


def on_host(value: Any) -> Any:
    """A copy in host memory, of a tensor or of each of a list."""
    return list(map(on_host, value)) if isinstance(value, list) else value.to("cpu", copy=True)


def staged(collective: Callable, fills: tuple[str, ...], reads: tuple[str, ...], apart: Callable) -> Callable:
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        first = given[fills[0]]
        if not apart(first[0] if isinstance(first, list) else first) or not over_gloo(given["group"]):
            return collective(*args, **kwargs)
        targets = [given[name] for name in fills]
        given.update({name: on_host(given[name]) for name in fills + reads})
        asynchronous, given["async_op"] = given["async_op"], False
        collective(*bound.args, **bound.kwargs)
        for target, name in zip(targets, fills, strict=True):
            several = isinstance(target, list)
            for there, here in zip(
                target if several else [target], given[name] if several else [given[name]], strict=True
            ):
                there.copy_(here)
        return Done() if asynchronous else None

    return call


def install(apart: Callable[[torch.Tensor], bool] = lambda tensor: tensor.is_cuda) -> None:
    """`apart`: which tensors go by way of the host (a dry run on the CPU sends all)."""
    for name, (fills, reads) in COLLECTIVES.items():
        setattr(dist, name, staged(getattr(dist, name), fills, reads, apart))

    send, receive, coalescing = dist.isend, dist.irecv, dist._coalescing_manager

    @functools.wraps(send)
    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return send(on_host(tensor) if apart(tensor) else tensor, *args, **kwargs)

    @functools.wraps(receive)
    def irecv(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not apart(tensor):
            return receive(tensor, *args, **kwargs)
        host = torch.empty_like(tensor, device="cpu")
        return Received(receive(host, *args, **kwargs), host, tensor)

    @contextlib.contextmanager
    def coalesce(group: Any = None, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if over_gloo(group):
            yield Done()  # what is inside ends at once
        else:
            with coalescing(group, *args, **kwargs) as work:
                yield work

    dist.isend, dist.irecv, dist._coalescing_manager = isend, irecv, coalesce
