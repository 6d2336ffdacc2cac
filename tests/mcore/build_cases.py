"""Runs inside a rank: models are built and wrapped, and what is printed or raised meanwhile."""

from __future__ import annotations

import contextlib
import gc
import io
import time
from collections.abc import Callable
from typing import Any

import model
import torch
import torch.distributed as dist
from cases import difference, layer_config, make_layer, oracle, random_routes, run, tokens_of

import megatron_mok
from megatron_mok import runtime


def lines_of(act: Callable[[], Any]) -> list[str]:
    """Lines about mok that act() prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        act()
    return [line for line in printed.getvalue().splitlines() if "megatron_mok" in line]


def failure_of(act: Callable[[], Any]) -> tuple[str, str] | None:
    """What act() raises on this rank."""
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def fresh(*layout: Any) -> None:
    model.layout(*layout)
    megatron_mok.unregister()  # layers of earlier cases that nothing has counted
    megatron_mok.register()


def chunks(**changes: Any) -> list[str]:
    """Two pipeline stages of two chunks each; of rank 0's layers only the second chunk's have experts."""
    fresh(2, 2, 2)
    options = dict(num_layers=4, moe_layer_freq=[0, 0, 1, 1], micro_batches=4) | changes
    return lines_of(lambda: model.Trainer("mok", **options).step())


def without_ddp() -> list[list[str]]:
    """Nothing wraps the layers: the first forward says the line; a second model says its own."""
    fresh(4)

    def two_layers(hidden: int) -> Callable[[], Any]:
        layers = [make_layer(layer_config(hidden_size=hidden)) for _ in range(2)]
        batch = (tokens_of(8, hidden=hidden), *random_routes(8))
        return lambda: [run(layer, *batch) for layer in layers * 2]

    first = lines_of(two_layers(32))
    return [first, lines_of(two_layers(16))]


def foreign_layer_on_rank_1() -> dict[str, Any]:
    """DDP's constructor finds, on one rank, experts that are not mok's; afterwards all ranks build anew."""
    fresh(2)
    config = model.make_config("mok")
    chunk = model.build(config)[0]
    if dist.get_rank() == 1:
        chunk.decoder.layers[-1].mlp.experts = torch.nn.Linear(1, 1)
    start = time.monotonic()
    failure = failure_of(lambda: model.wrap([chunk], config))
    return {"failure": failure, "seconds": time.monotonic() - start, "step": model.Trainer("mok").step()}


def no_memory_for_gradients_on_rank_1() -> dict[str, Any]:
    """Megatron's own part of DDP's constructor fails on one rank; afterwards all ranks build anew."""
    from megatron.core.distributed import distributed_data_parallel

    def fails(*_: Any, **__: Any) -> Any:
        raise MemoryError("no memory for the gradients")

    fresh(2)
    real = distributed_data_parallel._ParamAndGradBuffer
    start = time.monotonic()
    try:
        if dist.get_rank() == 1:
            distributed_data_parallel._ParamAndGradBuffer = fails
        failure = failure_of(lambda: model.Trainer("mok"))
    finally:
        distributed_data_parallel._ParamAndGradBuffer = real
    return {"failure": failure, "seconds": time.monotonic() - start, "step": model.Trainer("mok").step()}


def dropped() -> list[str]:
    """A model that is built and dropped, and another that is wrapped."""
    fresh(4)
    model.build(model.make_config("mok"))
    gc.collect()
    return lines_of(lambda: model.Trainer("mok"))


def no_back_end_on_rank_2() -> tuple[str, str] | None:
    """The machine of one pipeline stage cannot run the back end."""
    fresh(2, 2)
    real = runtime.choose_backend

    def choose(*arguments: Any) -> tuple[str, str]:
        if dist.get_rank() == 2:
            raise megatron_mok.UnsupportedDevice("sm_80: need sm_90a")
        return real(*arguments)

    runtime.choose_backend = choose
    try:
        return failure_of(lambda: model.Trainer("mok", num_layers=4, moe_layer_freq=1))
    finally:
        runtime.choose_backend = real


def pre_hook_fails_on_rank_1() -> dict[str, Any]:
    """A hook in front of the experts' weights raises on one rank, in the first forward and in a later one."""
    model.layout(4)
    layer = make_layer(layer_config())
    x, (probs, routing) = tokens_of(8), random_routes(8)
    failures, start = [], time.monotonic()
    for _ in range(2):
        hook = None
        if dist.get_rank() == 1:

            def fails(module: Any, inputs: Any) -> None:
                raise MemoryError("no memory for the gathered weights")

            hook = layer.experts.local_experts[0].linear_fc1.register_forward_pre_hook(fails)
        failures.append(failure_of(lambda: run(layer, x, probs, routing)))
        if hook is not None:
            hook.remove()
        run(layer, x, probs, routing)
    seconds = time.monotonic() - start
    again = difference(run(layer, x, probs, routing), oracle(layer, x, probs, routing))
    return {"failures": failures, "seconds": seconds, "again": again}
