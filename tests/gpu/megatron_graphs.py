"""The process of test_megatron_graphs: CUDA graphs of the layer, and Megatron's without Transformer Engine.

    python -m tests.gpu.megatron_graphs RESULT_FILE [CASE...]

One rank. Every case is a function; its result, or its traceback, goes to RESULT_FILE. On a machine without a
GPU nothing is captured: layers run eagerly on the CPU back end and Megatron only records what it would
capture.

Legend: S sequence length, B batch, H hidden size.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # what Megatron can do without it

from tests.gpu import megatron_ranks as ranks  # noqa: E402
from tests.gpu.megatron_ranks import GPU, LENGTHS, SIZES, model  # noqa: E402

from megatron.core import full_cuda_graph, tensor_parallel  # noqa: E402  isort: skip
from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader  # noqa: E402  isort: skip
from megatron.core.transformer import cuda_graphs  # noqa: E402  isort: skip
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler  # noqa: E402  isort: skip
from megatron.core.transformer.transformer_layer import MoETransformerLayer  # noqa: E402  isort: skip
from megatron_mok import runtime  # noqa: E402  isort: skip

STEPS, WARM_UP, MICRO_BATCHES = (12 if GPU else 4), 2, 2
REPLAYS = 20 if GPU else 2
GRAPHS: dict[str, dict[str, Any]] = {
    "full iteration": dict(cuda_graph_impl="full_iteration", cuda_graph_modules=[]),
    "moe_router": dict(cuda_graph_impl="local", cuda_graph_modules=["moe_router"]),
    "whole layers": dict(cuda_graph_impl="local", cuda_graph_modules=[]),
}


# --- the MoE layer: router, shared expert and experts


class Whole(torch.nn.Module):
    """A MoE layer whose output is one tensor."""

    def __init__(self) -> None:
        super().__init__()
        ranks.configure()
        config = model.make_config("mok", **SIZES)
        self.layer: Any = model.build(config)[0].decoder.layers[-1].mlp
        MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device=model.DEVICE))  # as schedules do

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


def values(replay: int) -> list[torch.Tensor]:
    """x and dy [S, B, H] of a replay."""
    generator = torch.Generator().manual_seed(replay)
    shape = LENGTHS[0], 2, SIZES["hidden_size"]
    return [torch.randn(shape, generator=generator).to(model.DEVICE, torch.bfloat16) for _ in range(2)]


def routing_of(layer: Any, x: torch.Tensor) -> int:
    with torch.no_grad():
        _, routing_map = layer.route(x)
    return hash(routing_map.cpu().numpy().tobytes())


def graphed_callables() -> dict[str, Any]:
    """torch.cuda.make_graphed_callables: which replays differ from eager calls in output or gradients."""
    whole = Whole()
    layer = whole.layer
    if GPU:
        sample = values(-1)[0].requires_grad_()
        torch.cuda.make_graphed_callables(whole, (sample,))
    weights = list(layer.parameters())
    differ, routings = [], set()
    for replay in range(REPLAYS):
        x, dy = values(replay)
        routings.add(routing_of(layer, x))
        results = []
        for forward in (whole.forward, lambda leaf: layer(leaf)[0]):
            leaf = x.clone().requires_grad_()
            out = forward(leaf)
            grads = torch.autograd.grad(out, [leaf, *weights], dy)
            results.append([t.detach().clone() for t in (out, *grads)])
        if not all(map(torch.equal, *results)):
            differ.append(replay)
    return {"differ": differ, "routings": len(routings)}


def captured_with_main_grad() -> dict[str, Any]:
    """Forward and backward captured as one graph that adds to main_grad: which replays differ from eager."""
    layer = Whole().layer
    experts = list(layer.experts.parameters())
    for weight in experts:  # as Megatron's DDP
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        weight.grad_added_to_main_grad = False
    others = [p for p in layer.parameters() if not hasattr(p, "main_grad")]
    x, dy = values(-1)
    x.requires_grad_()

    def step() -> list[torch.Tensor]:
        for leaf in (x, *others, *experts):
            leaf.grad = None
        out = layer(x)[0]
        out.backward(dy)
        return [out.detach(), x.grad, *(p.grad for p in others)]

    graph = torch.cuda.CUDAGraph() if GPU else None
    if graph:
        side = torch.cuda.Stream()  # whose autograd nodes of the weights the capture meets again
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            static = step()
    differ, routings = [], set()
    for replay in range(REPLAYS):
        with torch.no_grad():
            for tensor, new in zip((x, dy), values(replay), strict=True):
                tensor.copy_(new)
        routings.add(routing_of(layer, x))
        results = []
        for eager in (False, True):
            for weight in experts:
                weight.main_grad.fill_(0.5)  # is added to
            if graph and not eager:
                graph.replay()
                seen = static
            else:
                seen = step()
            results.append([t.clone() for t in (*seen, *(w.main_grad for w in experts))])
        if not all(map(torch.equal, *results)):
            differ.append(replay)
    return {"differ": differ, "routings": len(routings)}


# --- models


@contextlib.contextmanager
def moe_transformer_layers() -> Iterator[None]:
    """The GPT specs with MoETransformerLayer, as in Megatron's hybrid models, where a layer has experts.

    Only that class can capture parts of a MoE layer with the local implementation; in the TransformerLayer of
    the GPT specs moe_router captures nothing.
    """
    stock = model.get_gpt_decoder_block_spec

    def with_moe_layers(config: Any, **options: Any) -> Any:
        block = stock(config, **options)
        for has_experts, layer in zip(config.moe_layer_freq, block.layer_specs, strict=True):
            if has_experts:
                layer.module = MoETransformerLayer
        return block

    model.get_gpt_decoder_block_spec = with_moe_layers
    try:
        yield
    finally:
        model.get_gpt_decoder_block_spec = stock


def train(dispatcher: str = "mok", moe_layers: bool = False, **graphs: Any) -> dict[str, Any]:
    """{losses, norms, weights: hash of the trained parameters, graphs: pairs captured}; STEPS of Megatron's
    training step with other data, and so other routes, in each. `moe_layers`: with moe_transformer_layers.
    """
    ranks.configure()
    # Megatron keeps the first random number tracker: its own that can be captured.
    tensor_parallel.model_parallel_cuda_manual_seed(1, use_cudagraphable_rng=True, force_reset_rng=True)
    full = graphs.get("cuda_graph_impl") == "full_iteration"
    if graphs:
        graphs["cuda_graph_warmup_steps"] = WARM_UP
    # As megatron.training: autograd's nodes of the parameters must belong to the stream of the capture.
    with torch.cuda.stream(full_cuda_graph.get_shared_capture_stream()) if full else contextlib.nullcontext():
        with moe_transformer_layers() if moe_layers else contextlib.nullcontext():
            made = ranks.trainer(dispatcher, MICRO_BATCHES, **graphs)
    torch.cuda.synchronize()
    if full:
        made.run = FullCudaGraphWrapper(made.run, cuda_graph_warmup_steps=WARM_UP if GPU else STEPS)
    rows = [made.step() for _ in range(STEPS)]
    return {
        "losses": [loss for loss, _ in rows],
        "norms": [norm for _, norm in rows],
        "weights": ranks.digest(made),
        "graphs": captured(made),
    }


def captured(made: model.Trainer) -> int:
    """Graphs of a forward with one of its backward; the whole iteration counts as one."""
    runners = [
        runner
        for module in made.models[0].modules()
        if isinstance(module, cuda_graphs.CudaGraphManager)
        for runner in module.cudagraph_runners
    ]
    pairs = sum(runner.fwd_graph is not None and runner.bwd_graph is not None for runner in runners)
    return pairs + (FullCudaGraphWrapper.cuda_graph["training"] is not None)


def forget_graphs() -> None:
    """Megatron keeps its graphs in classes."""
    cuda_graphs.delete_cuda_graphs()
    FullCudaGraphWrapper.reset_cuda_graph(None)
    StaticBufferLoader.static_buffers = {"training": [], "validation": []}
    torch.cuda.set_stream(torch.cuda.default_stream())
    torch.cuda.synchronize()


def cases() -> dict[str, Callable[[], Any]]:
    """The likeliest to end the process come last."""
    made: dict[str, Callable[[], Any]] = {
        "callables": graphed_callables,
        "main_grad": captured_with_main_grad,
        "eager": train,
    }
    made |= {name: partial(train, **graphs) for name, graphs in GRAPHS.items()}
    made["moe_router, alltoall"] = partial(train, "alltoall", **GRAPHS["moe_router"])
    made["moe_router, MoE layers"] = partial(train, moe_layers=True, **GRAPHS["moe_router"])
    return made


def dry_run() -> None:
    """What the CPU lacks for Megatron to record."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random

    schedules.create_cudagraphs = lambda: None
    random._get_cuda_rng_state = lambda *_, **__: torch.Generator()
    random._set_cuda_rng_state = lambda *_, **__: None
    torch.cuda.graph_pool_handle = lambda: 0  # type: ignore


def main() -> None:
    file, chosen = Path(sys.argv[1]), sys.argv[2:]
    logging.basicConfig(level=logging.INFO)
    if GPU:
        torch.cuda.set_device(0)
        torch.use_deterministic_algorithms(True, warn_only=True)  # as in megatron_ranks
    else:
        dry_run()
    dist.init_process_group(
        "nccl" if GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=90)
    )
    model.layout(1)
    results: dict[str, Any] = {"seconds": {}}

    def freeing(case: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            try:
                return case()
            finally:
                gc.collect()
                forget_graphs()

        return run

    every = {name: freeing(case) for name, case in cases().items() if not chosen or name in chosen}
    ranks.run(every, results, file)
    runtime.release()
    model.leave()
    results["ended"] = True
    file.write_text(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)  # graphs that hold NCCL's calls may outlive its groups


if __name__ == "__main__":
    main()
