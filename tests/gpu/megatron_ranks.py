"""One process of test_megatron: Megatron-Core models with the kernels.

    python -m tests.gpu.megatron_ranks RESULT_FOLDER

First rank 0 alone, EP 1 over NCCL; then all four ranks on the one GPU, EP 4 and 2, over gloo (see
megatron_staged) and symmetric memory. Every case is a function; its result, or its traceback, goes to
RESULT_FOLDER/rank.json. On a machine without a GPU the same runs on the CPU back end, with
fewer steps and smaller sizes: a dry run.

Legend: S sequence length, H hidden size, I expert intermediate size, E experts, K experts per token.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import itertools
import json
import os
import sys
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.gpu import megatron_staged

GPU = torch.cuda.is_available()
megatron_staged.install(*([] if GPU else [lambda tensor: True]))

import megatron_mok  # noqa: E402
from megatron_mok import MokConfig, runtime  # noqa: E402
from megatron_mok.mcore import figures  # noqa: E402
from tests.mcore import model  # noqa: E402

from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402  isort: skip
    get_gpt_layer_local_spec,
    get_mlp_module_spec,
)
from megatron.core.transformer.enums import AttnBackend  # noqa: E402  isort: skip
from megatron.core.transformer.spec_utils import build_module  # noqa: E402  isort: skip

RANKS = 4
LENGTHS = (256, 128, 192, 256) if GPU else (48, 16, 24, 48)
STEPS, SHORT = (12, 4) if GPU else (3, 2)  # ranks that share a GPU take half of them
SIZES: dict[str, Any] = dict(
    bf16=True,
    hidden_size=256 if GPU else 128,
    ffn_hidden_size=256,
    moe_ffn_hidden_size=128,
    moe_shared_expert_intermediate_size=128,
)
OTHER: dict[str, Any] = SIZES | dict(
    hidden_size=128,
    num_moe_experts=8,
    moe_router_topk=2,
    moe_router_num_groups=None,
    moe_router_group_topk=None,
)
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
SHARDED = dict(overlap_grad_reduce=True, use_distributed_optimizer=True, overlap_param_gather=True)
VARIANTS: dict[str, dict[str, Any]] = {
    "recompute moe": dict(recompute_granularity="selective", recompute_modules=["moe"]),
    "recompute full": FULL,
    "overlap_grad_reduce": dict(ddp=dict(overlap_grad_reduce=True)),
    "distributed optimizer": dict(ddp=dict(use_distributed_optimizer=True)),
    "overlap_param_gather": dict(ddp=SHARDED),
    "gradients in bf16": dict(ddp=dict(grad_reduce_in_fp32=False)),
    "clipping": dict(clip_grad=0.1),
    "mtp": dict(mtp_num_layers=1),
    "aux and z loss": dict(
        moe_router_load_balancing_type="aux_loss", moe_router_score_function="softmax",
        moe_router_enable_expert_bias=False, moe_z_loss_coeff=1e-3, moe_router_num_groups=None,
        moe_router_group_topk=None,
    ),
    "padding mask": dict(
        padded=LENGTHS[0] // 2, moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"],
        moe_aux_loss_coeff=[1e-2, 1e-2], moe_z_loss_coeff=1e-3, moe_router_enable_expert_bias=False,
    ),
    "frozen experts": dict(frozen=".experts.local_experts."),
    "frozen fc1": dict(frozen=".linear_fc1.weight"),
    "lengths": dict(lengths=LENGTHS),
}  # fmt: skip


class Streams:
    """The micro-batches of several data-parallel ranks in turns: a global batch is the same on 1 and 4."""

    def __init__(self, streams: range, padded: int = 0) -> None:
        self.batches = [model.Batches(stream=stream, padded=padded) for stream in streams]
        self.turns = itertools.cycle(self.batches)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        return next(next(self.turns))

    @property
    def length(self) -> int:
        return self.batches[0].length

    @length.setter
    def length(self, length: int) -> None:
        for batches in self.batches:
            batches.length = length


def trainer(dispatcher: str, micro_batches: int, padded: int = 0, **options: Any) -> model.Trainer:
    made = model.Trainer(dispatcher, micro_batches=micro_batches, **SIZES | options)
    first = model.parallel_state.get_data_parallel_rank() * micro_batches
    made.batches = [Streams(range(first, first + micro_batches), padded) for _ in made.batches]
    set_length(made, LENGTHS[0])
    return made


def set_length(made: model.Trainer, length: int) -> None:
    for streams in made.batches:
        streams.length = length


def digest(made: model.Trainer) -> str:
    """A hash of all parameters of this rank."""
    state = hashlib.sha256()
    for parameter in itertools.chain(*(chunk.parameters() for chunk in made.models)):
        state.update(
            parameter.detach().view(torch.uint8 if parameter.dim() else parameter.dtype).cpu().numpy()
        )
    return state.hexdigest()


def train(
    dispatcher: str,
    steps: int,
    micro_batches: int,
    lengths: tuple[int, ...] = (),
    mok: dict[str, Any] | None = None,
    before: dict[int, Callable[[], Any]] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """{losses, norms, weights: a hash of the trained parameters, memory: bytes allocated after each step}.

    before: what else happens, by the step that it precedes.
    """
    configure(**(mok or {}))
    made = trainer(dispatcher, micro_batches, **options)
    losses, norms, memory = [], [], []
    for step in range(steps):
        if before and step in before:
            before[step]()
        if lengths:
            set_length(made, lengths[step % len(lengths)])
        loss, norm = made.step()
        losses.append(loss)
        norms.append(norm)
        memory.append(torch.cuda.memory_allocated())
    return {"losses": losses, "norms": norms, "weights": digest(made), "memory": memory}


def configure(**changes: Any) -> None:
    """mok's settings of the next case, and no workspace of the one before."""
    runtime.release()
    megatron_mok.configure(MokConfig(**dict(timeout_s=60.0, shared_device=GPU) | changes))


# --- cases of one rank


def evaluation_between_steps() -> dict[str, Any]:
    """Evaluation between steps: its loss twice, whether training goes on as without, what stays allocated."""
    configure()
    plain, mixed = (trainer("mok", 2) for _ in range(2))
    stock = trainer("alltoall", 2)
    batch = next(iter(Streams(range(1))))
    evaluations, allocated = [], []
    losses: dict[str, list[float]] = {"plain": [], "mixed": []}
    for _ in range(3):
        losses["plain"].append(plain.step()[0])
    for _ in range(3):
        before = torch.cuda.memory_allocated()
        evaluations.append([evaluate(mixed, batch), evaluate(mixed, batch)])
        allocated.append(torch.cuda.memory_allocated() - before)
        losses["mixed"].append(mixed.step()[0])
    return {
        "losses": losses,
        "weights": digest(plain) == digest(mixed),
        "repeated": all(a == b for a, b in evaluations),
        "allocated": allocated,
        "first": [evaluations[0][0], evaluate(stock, batch)],
    }


def evaluate(made: model.Trainer, batch: dict[str, torch.Tensor]) -> float:
    chunk = made.models[0].eval()
    try:
        with torch.no_grad():
            positions = torch.arange(batch["tokens"].shape[1], device=model.DEVICE).expand_as(batch["tokens"])
            return float(chunk(batch["tokens"], positions, None, labels=batch["labels"]).float().mean())
    finally:
        chunk.train()


def loaded_weights() -> list[float]:
    """A model that has run takes another's weights: the losses of both. A copy of old weights would show."""
    configure()
    source, target = trainer("mok", 1), trainer("mok", 1, seed=2)
    batch = next(iter(Streams(range(1))))
    for made in (source, source, target):
        made.step()
    before = evaluate(target, batch)
    target.models[0].load_state_dict(source.models[0].state_dict())
    return [before, evaluate(source, batch), evaluate(target, batch)]


def two_models() -> bool:
    """Two models of different sizes, step by step in turns: the bits of each alone."""
    configure()
    alone = [[made.step() for _ in range(3)] for made in (trainer("mok", 2), trainer("mok", 2, **OTHER))]
    both = trainer("mok", 2), trainer("mok", 2, **OTHER)
    turns = [[made.step() for made in both] for _ in range(3)]
    return [list(steps) for steps in zip(*turns, strict=True)] == alone


def host_waits() -> list[str]:
    """What torch says of host synchronisations inside a MoE layer's forward and backward; needs a GPU."""
    configure()
    made = trainer("mok", 1)
    layer = made.models[0].module.decoder.layers[-1].mlp
    x = torch.randn(LENGTHS[0], 2, SIZES["hidden_size"], device=model.DEVICE, dtype=torch.bfloat16)

    def step() -> None:
        out, _ = layer(x.requires_grad_())
        out.backward(torch.ones_like(out))

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")  # which itself warns, that it is a prototype
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [f"{w.filename}:{w.lineno}: {w.message}" for w in seen if "synchroniz" in str(w.message)]


class Writer:
    """TensorBoard's: what was written, by step."""

    def __init__(self) -> None:
        self.written: dict[int, dict[str, float]] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.written.setdefault(step, {})[name] = value


def figures_without_waits() -> dict[int, dict[str, float]]:
    """Figures of a layer's calls in steps 2 and 3, where torch makes every host synchronisation an error."""
    configure(save_capacity=0.5)
    layer, writer = trainer("mok", 1).models[0].module.decoder.layers[-1].mlp, Writer()
    x = torch.randn(LENGTHS[0], 2, SIZES["hidden_size"], device=model.DEVICE, dtype=torch.bfloat16)
    figures.after_step(0)
    try:
        for step in (1, 2, 3, 4):
            if GPU and step == 2:  # all has been allocated and connected
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            out, _ = layer(x.requires_grad_())
            out.backward(torch.ones_like(out))
            figures.after_step(step, writer, record_next=step < 3)
    finally:
        if GPU:
            torch.cuda.set_sync_debug_mode("default")
        figures.forget()
    return writer.written


def figures_of_training() -> dict[int, dict[str, float]]:
    """Figures of two training steps, 1 and 2; every rank has a writer here."""
    configure(save_capacity=0.5)
    made, writer = trainer("mok", 1), Writer()
    figures.after_step(0)
    for step in (1, 2, 3):
        made.step()
        figures.after_step(step, writer, record_next=step < 2)
    figures.forget()
    return writer.written


def one_rank() -> dict[str, Callable[[], Any]]:
    def on_one(**options: Any) -> Callable[[], Any]:
        return lambda: train(**dict(dispatcher="mok", steps=SHORT, micro_batches=2) | options)

    cases = {
        "alltoall": on_one(dispatcher="alltoall", steps=STEPS, micro_batches=RANKS),
        "mok": on_one(steps=STEPS, micro_batches=RANKS),
        "mok again": on_one(steps=STEPS, micro_batches=RANKS),
        "plain": on_one(),
        "main_grad on": on_one(mok=dict(main_grad="on")),
        "main_grad off": on_one(mok=dict(main_grad="off")),
        "save nothing": on_one(mok=dict(save_capacity=0.0)),
        "save half": on_one(mok=dict(save_capacity=0.5)),
        "small rings": on_one(mok=dict(ring_rows=1024, minibatch_rows=256)),
    }
    for name, options in VARIANTS.items():
        cases[f"{name}, mok"] = on_one(**options)
        cases[f"{name}, alltoall"] = on_one(dispatcher="alltoall", **options)
    cases |= {
        "evaluation": evaluation_between_steps,
        "loaded": loaded_weights,
        "two models": two_models,
        "figures of training": figures_of_training,
        "figures": figures_without_waits,
    }
    if GPU:
        cases["host waits"] = host_waits
    return cases


# --- a layer whose tokens are split over ranks by tensor parallelism with sequence parallelism, or by context


class Block(torch.nn.Module):
    """Self-attention if asked for, then a MoE layer, on [S, B, H]. No norms: torch's know no sequence
    parallelism. Weights depend on their global names only."""

    def __init__(self, config: Any, attention: bool) -> None:
        super().__init__()
        self.config = config
        self.attention = None
        if attention:
            spec = get_gpt_layer_local_spec(qk_layernorm=False).submodules.self_attention
            self.attention = build_module(spec, config=config, layer_number=1)
        moe = get_mlp_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
        self.moe = moe(config=config)
        self.moe.set_layer_number(1)
        self.to(model.DEVICE, torch.bfloat16)
        for name, parameter in self.named_parameters():
            whole, dim, mine = self.part(name, parameter)
            seed = zlib.crc32(model.global_name(name, None, config).encode())
            weight = torch.randn(whole, generator=torch.Generator().manual_seed(seed)) * whole[1] ** -0.5
            with torch.no_grad():
                parameter.copy_(weight.index_select(dim, mine))

    def part(self, name: str, parameter: torch.Tensor) -> tuple[list[int], int, torch.Tensor]:
        """(shape of the whole weight, the split dimension, the indices along it that are here)."""
        tp, rank = (
            self.config.tensor_model_parallel_size,
            model.parallel_state.get_tensor_model_parallel_rank(),
        )
        split = getattr(parameter, "tensor_model_parallel", False) and ".local_experts." not in name
        tp, dim = (tp, parameter.partition_dim) if split else (1, 0)
        whole = list(parameter.shape)
        whole[dim] *= tp
        pieces = 2 if "shared_experts.linear_fc1" in name else 1  # gate rows and up rows are split apart
        indices = torch.arange(whole[dim]).view(pieces, tp, -1)[:, rank if split else 0]
        return whole, dim, indices.flatten()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.attention is not None:
            x = x + self.attention(x, attention_mask=None)[0]
        return x + self.moe(x)[0]


def run_block(ep: int, attention: bool, **split: int) -> dict[str, torch.Tensor]:
    """out and dx [2, S, B, H] of two sequences, and the gradient of every weight, summed over all ranks.

    Ranks 2i and 2i + 1 work on sequence i: each on half of its tokens, or both on all with half of dy.
    """
    model.layout(ep, **split)
    configure()
    config = model.make_config(
        "mok",
        mla=False,
        **SIZES
        | dict(
            qk_layernorm=False,
            moe_router_load_balancing_type="none",
            moe_aux_loss_coeff=0.0,
            tensor_model_parallel_size=split.get("tp", 1),
            sequence_parallel="tp" in split,
            context_parallel_size=split.get("cp", 1),
            expert_tensor_parallel_size=1,
        ),
    )
    block = Block(config, attention)
    sequence, half = divmod(dist.get_rank(), 2)
    shape, weight = (2, LENGTHS[0], model.B, SIZES["hidden_size"]), 1.0 if split else 0.5
    generator = torch.Generator().manual_seed(3)
    x, dy = (torch.randn(shape, generator=generator)[sequence] for _ in range(2))
    here = slice(half * shape[1] // 2, (half + 1) * shape[1] // 2) if split else slice(None)
    leaf = x[here].to(model.DEVICE, torch.bfloat16).requires_grad_()
    out = block(leaf)
    out.backward((dy[here] * weight).to(out))
    results = {}
    for name, value in (("out", out.detach() * weight), ("dx", leaf.grad)):
        results[name] = torch.zeros(shape)
        results[name][sequence, here] = value.float().cpu()
    for name, parameter in block.named_parameters():
        whole, dim, mine = block.part(name, parameter)
        gradient = torch.zeros(whole).index_copy_(dim, mine, parameter.grad.float().cpu())
        results[model.global_name(name, None, config)] = gradient
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, {name: tuple(value.shape) for name, value in results.items()})
    for name, whole in sorted({name: shape for names in every for name, shape in names.items()}.items()):
        dist.all_reduce(results.setdefault(name, torch.zeros(whole)))
    return results


def split_tokens(ep: int, attention: bool = False, **split: int) -> dict[str, Any]:
    """Relative errors against whole sequences on each rank: of every gradient, and of out and dx the one
    that nine of ten tokens stay below: a token whose scores tie within bf16 may go to another expert.
    """
    whole, parts = (run_block(ep, attention, **sizes) for sizes in ({}, split))
    assert whole.keys() == parts.keys()
    errors = {}
    for name, expected in whole.items():
        distance, size = parts[name] - expected, expected
        if name in ("out", "dx"):
            apart = distance.norm(dim=-1) / size.norm(dim=-1)
            errors[name] = float(apart.flatten().quantile(0.9))
        else:
            errors[name] = float(distance.norm() / size.norm().clamp_min(1e-30))
    return errors


# --- cases of four ranks


def other_layouts(release: bool) -> dict[str, Any]:
    """EP 4, EP 2 and EP 4 again in these processes: Megatron's groups destroyed and made anew each time."""
    model.layout(4)
    configure()
    return model.layouts_in_turn([4, 2, 4], release, lambda: trainer("mok", 1), 2)


def te_model_with_tp2(dispatcher: str) -> dict[str, Any]:
    """A training of the transformer_engine implementation: TP 2 with sequence parallelism, ETP 1, EP 2."""
    model.layout(2, tp=2)
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)  # each model's own configuration says which
    local = model.get_gpt_decoder_block_spec

    def spec(config: Any, use_transformer_engine: bool, **options: Any) -> Any:
        return local(config, use_transformer_engine=True, **options)

    model.get_gpt_decoder_block_spec = spec
    try:
        return train(
            dispatcher,
            steps=SHORT // 2 + 1,
            micro_batches=1,
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            expert_tensor_parallel_size=1,
            moe_grouped_gemm=True,
            attention_backend=AttnBackend.unfused,
        )
    finally:
        model.get_gpt_decoder_block_spec = local


def four_ranks(rank: int) -> dict[str, Callable[[], Any]]:
    def on_four(ep: int = 4, pp: int = 1, vpp: int | None = None, **options: Any) -> Callable[[], Any]:
        def case() -> Any:
            model.layout(ep, pp, vpp)
            return train(**dict(dispatcher="mok", steps=SHORT // 2 + 1, micro_batches=1) | options)

        return case

    uneven = dict(lengths=(LENGTHS[rank],))  # every rank brings another number of tokens
    small, large = LENGTHS[1], LENGTHS[0]  # rank 1 alone brings more, from the second step on
    more = dict(steps=3, lengths=(small, large if rank == 1 else small, large if rank == 1 else small))
    stages = dict(ep=2, num_layers=4, moe_layer_freq=1)
    cases = {
        "ep4": on_four(steps=STEPS // 2),
        "ep4 again": on_four(steps=STEPS // 2),
        "ep4, alltoall": on_four(dispatcher="alltoall"),
        "ep4, uneven": on_four(**uneven),
        "ep4, uneven, alltoall": on_four(dispatcher="alltoall", **uneven),
        "ep4, recompute moe": on_four(**VARIANTS["recompute moe"]),
        "ep4, overlap_param_gather": on_four(**VARIANTS["overlap_param_gather"]),
        "ep4, frozen experts": on_four(**VARIANTS["frozen experts"]),
        "ep4, frozen experts, alltoall": on_four(dispatcher="alltoall", **VARIANTS["frozen experts"]),
        "ep2": on_four(ep=2, steps=STEPS // 2),
        "ep2, overlap_param_gather": on_four(ep=2, **VARIANTS["overlap_param_gather"]),
        "ep2, main_grad off": on_four(ep=2, mok=dict(main_grad="off")),
        "ep4, figures": lambda: (model.layout(4), figures_of_training())[1],
        "tp2 ep4": lambda: split_tokens(4, tp=2),
        "tp2 ep4, attention": lambda: split_tokens(4, attention=True, tp=2),
        "cp2 ep4": lambda: split_tokens(4, cp=2),
        "tp2 ep2": lambda: split_tokens(2, tp=2),
        "cp2 ep2": lambda: split_tokens(2, cp=2),
        "ep4, large workspace": on_four(mok=dict(max_tokens=large * model.B), **more),
        "ep4, reserved": on_four(before={1: lambda: megatron_mok.reserve(large * model.B)}, **more),
        "ep4, released": on_four(before={1: megatron_mok.release}, **more),
        "layouts, released": lambda: other_layouts(True),
        "layouts, not released": lambda: other_layouts(False),
        "pp2 with virtual stages": on_four(pp=2, vpp=2, micro_batches=4, **stages),
        "one stage": on_four(micro_batches=2, **stages),
    }
    if GPU and importlib.util.find_spec("transformer_engine"):
        for dispatcher in ("mok", "alltoall"):
            cases[f"tp2, transformer_engine, {dispatcher}"] = lambda name=dispatcher: te_model_with_tp2(name)
    return cases


# --- the program


def join(backend: str, name: str, rank: int, world: int, root: dist.Store) -> None:
    """Process groups of `world` ranks; Megatron's come with a layout."""
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(name, root),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=90),
    )
    model.layout(world)


def run(cases: dict[str, Callable[[], Any]], results: dict[str, Any], file: Path) -> None:
    for name, case in cases.items():
        began = time.monotonic()
        try:
            results[name] = case()
        except Exception:
            results[name] = traceback.format_exc()
        results["seconds"][name] = time.monotonic() - began
        file.write_text(json.dumps(results))
        gc.collect()


def main() -> None:
    rank = int(os.environ["RANK"])
    file = Path(sys.argv[1], f"{rank}.json")
    results: dict[str, Any] = {"seconds": {}}
    if GPU:
        torch.cuda.set_device(0)
        # Bits repeat only where the rest of the model repeats them. It also fills torch.empty with NaN.
        torch.use_deterministic_algorithms(True, warn_only=True)
        warnings.filterwarnings("ignore", message=".*deterministic")
    root = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), RANKS, rank == 0, timedelta(seconds=240)
    )
    if rank == 0:
        join("nccl" if GPU else "gloo", "one", 0, 1, root)
        run(one_rank(), results, file)
        runtime.release()
        model.leave()
        root.set("alone", "done")
    root.wait(["alone"])
    join("gloo", "four", rank, RANKS, root)
    run(four_ranks(rank), results, file)
    runtime.release()
    model.leave()
    results["ended"] = RANKS
    file.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
